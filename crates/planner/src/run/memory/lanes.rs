//! Window of lanes on a rank: which micro-batch comes next, what it is added to, and what the
//! ranks give at the end.

use fusestep_collective::Divisor;

use crate::plan::lanes::{BegunLane, Contribution, LaneSchedule, OpenLanes};
use crate::plan::settings::Accumulated;
use crate::plan::value::Plan;

/// Micro-steps of this rank until the next update, and the sums of all ranks then.
#[derive(Clone, Debug)]
pub(crate) struct LaneWindow {
    pub(crate) schedule: LaneSchedule,
    pub(crate) contributions: Vec<Contribution>,
    /// Weight of each micro-batch of the global batch; 0 where none has come yet.
    pub(crate) weights: Vec<f64>,
    /// Micro-batches that all ranks together give in this window.
    pub(crate) micro_batches: u64,
    /// This rank's steps among them.
    pub(crate) given_steps: usize,
    /// Whether a weight was set in this window.
    pub(crate) is_weighted: bool,
    /// Whether the window ends before all of its micro-batches were given.
    pub(crate) is_cut_short: bool,
    /// The window that another run has begun, which goes on here.
    pub(crate) origin: Option<OpenLanes>,
    /// Whether sums lie in memory of their own, apart from a gradient's.
    pub(crate) adds: bool,
    /// Whether ranks exchange sums as they are.
    pub(crate) exchanges: bool,
    /// The number that the reduced sum is divided by, once ranks agree on it.
    pub(crate) divisor: Option<Divisor>,
    of_lane: u32,
}

impl LaneWindow {
    /// The window of a plan's own lanes; `None` of a plan without.
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        let lanes = plan.lanes?;
        let (rank, world) = (plan.topology.rank, plan.topology.world);
        let micro_batches = lanes.count.get() as usize * plan.of_lane() as usize;
        let schedule = lanes.of_window(rank, world, plan.of_lane());
        Some(Self {
            micro_batches: micro_batches as u64,
            given_steps: schedule.steps.len(),
            schedule,
            contributions: lanes.contributions(world),
            weights: vec![0.0; micro_batches],
            is_weighted: false,
            is_cut_short: false,
            origin: None,
            adds: plan.adds_micro_steps(),
            exchanges: plan.exchanges_lanes(),
            divisor: None,
            of_lane: plan.of_lane(),
        })
    }

    /// The rest of a window that has begun, and the parts of it that this rank begins with.
    pub(crate) fn resumed(plan: &Plan, begun: &OpenLanes) -> Option<(Self, Vec<usize>)> {
        let (rank, world) = (plan.topology.rank, plan.topology.world);
        let (schedule, parts) = begun.schedules(world).nth(rank)?;
        let mut window = Self {
            given_steps: schedule.steps.len(),
            schedule,
            contributions: begun.contributions(world),
            is_weighted: begun.is_weighted,
            origin: Some(begun.clone()),
            adds: true,
            exchanges: plan.reduces(),
            ..Self::of(plan)?
        };
        window.limit(begun.micro_batches);
        // One rank knows each weight, so that their sum over ranks has it once.
        if let Some(origin) = window.origin.as_ref().filter(|_| rank == 0) {
            let most = window.weights.len().min(origin.weights.len());
            window.weights[..most].copy_from_slice(&origin.weights[..most]);
        }
        Some((window, parts))
    }

    /// Whether gradients of the window have been added.
    pub(crate) fn has_begun(&self, micro_steps: u32) -> bool {
        micro_steps > 0 || self.origin.is_some()
    }

    /// Parts of the window once every rank has made so many micro-steps.
    pub(crate) fn open(&self, plan: &Plan, micro_steps: u32) -> Option<OpenLanes> {
        let lanes = plan.lanes.filter(|_| self.has_begun(micro_steps))?;
        let world = plan.topology.world;
        let (mut sums, mut begun) = (Vec::new(), Vec::new());
        let schedules: Vec<LaneSchedule> = match &self.origin {
            Some(origin) => origin.schedules(world).map(|(schedule, _)| schedule).collect(),
            None => (0..world).map(|rank| lanes.of_window(rank, world, self.of_lane)).collect(),
        };
        for (rank, schedule) in schedules.iter().enumerate() {
            let done = schedule.steps.len().min(micro_steps as usize);
            let (held, open) = schedule.held_after(done);
            sums.extend(held.into_iter().flatten().map(|sum| (sum, rank)));
            begun.extend(
                open.iter().map(|open| (BegunLane { lane: open.lane, done: open.done }, rank)),
            );
        }
        sums.sort_unstable();
        begun.sort_unstable_by_key(|(begun, _)| begun.lane);
        let ranks = sums.iter().map(|(_, rank)| *rank);
        Some(OpenLanes {
            count: lanes.count.get(),
            of_lane: self.of_lane,
            micro_batches: self.micro_batches,
            is_weighted: self.is_weighted,
            ranks: ranks.chain(begun.iter().map(|(_, rank)| *rank)).collect(),
            sums: sums.into_iter().map(|(sum, _)| sum).collect(),
            begun: begun.into_iter().map(|(begun, _)| begun).collect(),
            weights: self.weights.clone(),
        })
    }

    /// The memory of this rank that has a part of the window.
    pub(crate) fn slot_of(&self, open: &OpenLanes, part: usize, micro_steps: u32) -> Option<usize> {
        let done = self.schedule.steps.len().min(micro_steps as usize);
        let (held, begun) = self.schedule.held_after(done);
        match open.sums.get(part) {
            Some(sum) => held.iter().position(|own| own.as_ref() == Some(sum)),
            None => {
                let lane = open.begun.get(part - open.sums.len())?.lane;
                begun.iter().find(|own| own.lane == lane)?.slot
            }
        }
    }

    /// The number, within the global batch, of the micro-batch that a step is for.
    pub(crate) fn micro_batch(&self, step: usize) -> Option<usize> {
        let step = self.schedule.steps.get(step)?;
        Some(step.lane as usize * self.of_lane as usize + step.of_lane as usize)
    }

    /// Limits the window to the first micro-batches.
    pub(crate) fn limit(&mut self, micro_batches: u64) {
        let within = |step: &usize| {
            self.micro_batch(*step).is_some_and(|number| (number as u64) < micro_batches)
        };
        self.given_steps = (0..self.schedule.steps.len()).filter(within).count();
        self.micro_batches = micro_batches;
    }

    /// Sets the weight of the micro-batch of a step.
    pub(crate) fn weigh(&mut self, step: usize, weight: f64) {
        if let Some(micro_batch) = self.micro_batch(step).filter(|_| step < self.given_steps) {
            self.weights[micro_batch] = weight;
        }
    }

    /// Whether the window was cut short before any rank had given a micro-batch.
    pub(crate) fn is_empty(&self) -> bool {
        self.is_cut_short && self.weights.iter().all(|weight| *weight == 0.0)
    }

    /// Sum of the weights of all micro-batches, in their order.
    pub(crate) fn total(&self) -> f64 {
        self.weights.iter().sum()
    }
}

/// Whether segments are reduced in the step only: sums of lanes, and sums of all ranks where groups
/// of them share out shards.
pub(crate) fn wait_for_step(plan: &Plan) -> bool {
    let in_groups = plan.lanes.is_some() && plan.shard_group < plan.topology.world;
    plan.exchanges_lanes() || in_groups
}

/// The divisor of a sum of gradients whose weights come to `total`.
pub(crate) fn mean(plan: &Plan, total: f64) -> Divisor {
    match plan.accumulation().map(|rule| rule.accumulated) {
        Some(Accumulated::Sum) => Divisor::ONE,
        Some(Accumulated::Mean) | None => Divisor::of(total),
    }
}

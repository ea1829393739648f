//! Lanes: sums of gradients whose order is that of the global batch, not that of the ranks.
//!
//! ```text
//! T(a, a+1) = lane a        T(a, b) = T(a, m) + T(m, b)
//! ```
//! `m − a` is the largest power of two below `b − a`.

use std::num::NonZeroU32;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Adds gradients along one binary tree over the lanes of the global batch, so that their sum has
/// the same bits at any number of ranks.
///
/// A lane is a left fold of the micro-batches of [`crate::GradientAccumulation::every`], one
/// without that pass. A rank has consecutive lanes, as equal a share of them as can be, and makes a
/// micro-step for each of their micro-batches. It adds its lanes as far as they are whole subtrees;
/// ranks exchange what is left. The mean divides once, at the end.
///
/// ```text
/// T(a, a+1) = lane a        T(a, b) = T(a, m) + T(m, b)        m − a the largest 2ⁿ below b − a
/// ```
///
/// Sums are f32, f64 of f64 gradients. A micro-batch without a gradient leaves them as they are.
///
/// # Cost
/// One read of each gradient, and as many reads and writes of sums as accumulation in their order.
/// A rank holds few sums at once, about as many as the number of its lanes has binary digits; the
/// plan says how many. Ranks that send each other their memory also hold all sums of their part of
/// a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Lanes {
    /// The number of lanes, at least that of the ranks.
    pub count: NonZeroU32,
}

/// Consecutive lanes whose sum is a node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LaneSum {
    /// First lane.
    pub first: u32,
    /// Lane behind the last.
    pub end: u32,
}

impl LaneSum {
    fn of(lane: u32) -> Self {
        Self { first: lane, end: lane + 1 }
    }

    fn has(self, other: Self) -> bool {
        self.first <= other.first && other.end <= self.end
    }

    /// The two sums that this one is of; `None` of a single lane.
    fn halves(self) -> Option<[Self; 2]> {
        let lanes = self.end - self.first;
        if lanes < 2 {
            return None;
        }
        let middle = self.first + lanes.next_power_of_two() / 2;
        Some([Self { end: middle, ..self }, Self { first: middle, ..self }])
    }
}

impl std::fmt::Display for LaneSum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.end)
    }
}

/// The sum of some lanes on a rank, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contribution {
    pub(crate) sum: LaneSum,
    pub(crate) rank: usize,
    /// The rank's memory that has it.
    pub(crate) slot: usize,
}

/// Addition of a gradient to its lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LaneStep {
    /// Lane of the micro-batch.
    pub(crate) lane: u32,
    /// Micro-batch of the lane.
    pub(crate) of_lane: u32,
    /// The memory of the lane under way.
    pub(crate) slot: usize,
    /// Addition of the lane to others, behind its last micro-batch.
    pub(crate) ends: Option<LaneEnd>,
}

impl LaneStep {
    /// Whether the micro-batch is the lane's first.
    pub(crate) fn begins(&self) -> bool {
        self.of_lane == 0
    }
}

/// The end of a lane: sums that it completes are added to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LaneEnd {
    /// The memory of the sums that are added, in order.
    pub(crate) adds: SmallVec<[usize; 8]>,
    /// The memory that gets the result.
    pub(crate) into: usize,
    /// Lanes of the result.
    pub(crate) sum: LaneSum,
}

/// Micro-steps of a rank until the next update, and the sums that it gives then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneSchedule {
    /// Sums at the beginning by their memory, and lanes that have begun before.
    pub(crate) begins_with: Vec<Option<LaneSum>>,
    pub(crate) begun: Vec<OpenLane>,
    pub(crate) steps: Vec<LaneStep>,
    /// Sums at the end by their memory.
    pub(crate) sums: Vec<Option<LaneSum>>,
    /// Number of memories in use.
    pub(crate) slots: usize,
}

/// A lane that is still to be done, from a micro-batch of it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenLane {
    pub(crate) lane: u32,
    /// Micro-batches of it that are done.
    pub(crate) done: u32,
    /// The memory of its sum so far.
    pub(crate) slot: Option<usize>,
}

/// A window of lanes that has begun: what there is of it, whatever ranks have it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpenLanes {
    /// The number of lanes.
    pub count: u32,
    /// Micro-batches of a lane.
    pub of_lane: u32,
    /// Micro-batches that the update has.
    pub micro_batches: u64,
    /// Whether micro-batches have weights.
    pub is_weighted: bool,
    /// Sums of whole lanes, in order.
    pub sums: Vec<LaneSum>,
    /// Lanes some of whose micro-batches are done, and how many, in order.
    pub begun: Vec<BegunLane>,
    /// The rank that has each of the sums and then of the lanes.
    #[serde(skip)]
    pub ranks: Vec<usize>,
    /// Weight of each micro-batch that is done, else 0, as far as this rank knows it.
    #[serde(skip)]
    pub weights: Vec<f64>,
}

/// A lane some of whose micro-batches are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BegunLane {
    /// The lane.
    pub lane: u32,
    /// Micro-batches of it that are done.
    pub done: u32,
}

impl OpenLanes {
    /// Micro-batches of all lanes.
    pub fn all_micro_batches(&self) -> u64 {
        u64::from(self.count) * u64::from(self.of_lane)
    }

    /// Number of tensors that the window has of each parameter.
    pub fn parts(&self) -> usize {
        self.sums.len() + self.begun.len()
    }

    /// Name of a part: the lanes of a sum, or a lane and how many of its micro-batches are done.
    pub fn part_name(&self, part: usize) -> String {
        match self.sums.get(part) {
            Some(sum) => sum.to_string(),
            None => {
                let BegunLane { lane, done } = self.begun[part - self.sums.len()];
                format!("{lane}+{done}")
            }
        }
    }

    /// Whether the parts are of one tree and do not overlap.
    pub fn is_valid(&self) -> bool {
        let Some(count) = NonZeroU32::new(self.count) else {
            return false;
        };
        let lanes = Lanes::new(count);
        let of_tree = |sum: &LaneSum| {
            *sum == lanes.root() || sum.first < sum.end && lanes.above(*sum).is_some()
        };
        let begun = self.begun.iter();
        let all = self.sums.iter().copied().chain(begun.map(|begun| LaneSum::of(begun.lane)));
        let mut all: Vec<LaneSum> = all.collect();
        let in_order = self.sums.is_sorted() && self.begun.is_sorted_by_key(|begun| begun.lane);
        all.sort_unstable();
        self.of_lane > 0
            && in_order
            && (1..=self.all_micro_batches()).contains(&self.micro_batches)
            && self.sums.iter().all(of_tree)
            && self.begun.iter().all(|begun| (1..self.of_lane).contains(&begun.done))
            && all.iter().all(|sum| sum.end <= self.count)
            && all.windows(2).all(|pair| pair[0].end <= pair[1].first)
    }

    /// Lanes that are not done yet, in order.
    fn left(&self) -> Vec<u32> {
        let mut left = Vec::new();
        let mut next = 0;
        for sum in &self.sums {
            left.extend(next..sum.first);
            next = sum.end;
        }
        left.extend(next..self.count);
        left
    }

    /// The schedules of ranks that go on with their shares of what is left, each with the parts
    /// whose sums its rank begins with, in the order of its memories.
    pub(crate) fn schedules(
        &self,
        world: usize,
    ) -> impl Iterator<Item = (LaneSchedule, Vec<usize>)> {
        let left = self.left();
        (0..world).map(move |rank| self.schedule(&left, rank, world))
    }

    fn schedule(&self, left: &[u32], rank: usize, world: usize) -> (LaneSchedule, Vec<usize>) {
        let share = |of: usize| of * rank / world..of * (rank + 1) / world;
        let mut parts: Vec<usize> = share(self.sums.len()).collect();
        let held = parts.iter().map(|&part| Some(self.sums[part])).collect();
        let begun = |lane| self.begun.binary_search_by_key(&lane, |begun| begun.lane);
        let lanes = left[share(left.len())].iter().map(|&lane| match begun(lane) {
            Err(_) => OpenLane { lane, done: 0, slot: None },
            Ok(at) => {
                parts.push(self.sums.len() + at);
                OpenLane { lane, done: self.begun[at].done, slot: Some(parts.len() - 1) }
            }
        });
        let lanes: Vec<OpenLane> = lanes.collect();
        let own = Lanes { count: NonZeroU32::new(self.count).unwrap_or(NonZeroU32::MIN) };
        (own.schedule(lanes, self.of_lane, held), parts)
    }

    /// Sums of all ranks at the end, in the order of lanes.
    pub(crate) fn contributions(&self, world: usize) -> Vec<Contribution> {
        in_order(self.schedules(world).map(|(schedule, _)| schedule.sums))
    }
}

/// Sums that ranks give at the end, in the order of lanes.
fn in_order(of_ranks: impl Iterator<Item = Vec<Option<LaneSum>>>) -> Vec<Contribution> {
    let all = of_ranks.enumerate().flat_map(|(rank, sums)| {
        let sums = sums.into_iter().enumerate();
        sums.filter_map(move |(slot, sum)| Some(Contribution { sum: sum?, rank, slot }))
    });
    let mut all: Vec<Contribution> = all.collect();
    all.sort_by_key(|contribution| contribution.sum);
    all
}

impl Lanes {
    /// Most micro-batches of all lanes together: every rank has a schedule of its own.
    pub const MOST_MICRO_BATCHES: u64 = 1 << 20;

    /// Adds along a tree over so many lanes.
    pub fn new(count: NonZeroU32) -> Self {
        Self { count }
    }

    fn root(self) -> LaneSum {
        LaneSum { first: 0, end: self.count.get() }
    }

    /// Lanes of a rank.
    pub fn of_rank(self, rank: usize, world: usize) -> Range<u32> {
        let place = |rank: usize| (rank as u64 * u64::from(self.count.get()) / world as u64) as u32;
        place(rank)..place(rank + 1)
    }

    /// The sum that `sum` is a half of; `None` of all lanes, and of what is no sum of the tree.
    fn above(self, sum: LaneSum) -> Option<[LaneSum; 2]> {
        let mut at = self.root();
        while at.has(sum) {
            let halves = at.halves()?;
            if halves.contains(&sum) {
                return Some([at, if halves[0] == sum { halves[1] } else { halves[0] }]);
            }
            at = *halves.iter().find(|half| half.has(sum))?;
        }
        None
    }

    /// The steps of lanes in an order, of `of_lane` micro-batches each, on a rank that holds sums
    /// in some of its memories.
    pub(crate) fn schedule(
        self,
        lanes: impl IntoIterator<Item = OpenLane>,
        of_lane: u32,
        held: Vec<Option<LaneSum>>,
    ) -> LaneSchedule {
        let lanes: Vec<OpenLane> = lanes.into_iter().collect();
        let begun = lanes.iter().filter_map(|lane| lane.slot).max();
        let slots = held.len().max(begun.map_or(0, |slot| slot + 1));
        let mut plan = LaneSchedule {
            begins_with: held.clone(),
            begun: lanes.iter().filter(|lane| lane.slot.is_some()).copied().collect(),
            steps: Vec::new(),
            sums: held,
            slots,
        };
        for (at, &OpenLane { lane, done, slot }) in lanes.iter().enumerate() {
            let slot = slot.unwrap_or_else(|| plan.free_slot(&lanes[at..]));
            let end = self.end_of(lane, slot, of_lane == 1, &mut plan);
            for micro_batch in done..of_lane {
                plan.steps.push(LaneStep {
                    lane,
                    of_lane: micro_batch,
                    slot,
                    ends: (micro_batch + 1 == of_lane).then(|| end.clone()),
                });
            }
        }
        plan
    }

    /// Ends a lane that lies in `slot`, if it ever lies anywhere: a gradient that is a whole lane
    /// is added to other sums as it comes.
    fn end_of(self, lane: u32, slot: usize, is_one: bool, plan: &mut LaneSchedule) -> LaneEnd {
        let (mut sum, mut adds) = (LaneSum::of(lane), SmallVec::<[usize; 8]>::new());
        while let Some([above, other]) = self.above(sum) {
            let Some(at) = plan.sums.iter().position(|held| *held == Some(other)) else {
                break;
            };
            plan.sums[at] = None;
            adds.push(at);
            sum = above;
        }
        let into = adds.iter().copied().min().map_or(slot, |least| least.min(slot));
        let needed = if is_one { into } else { into.max(slot) };
        plan.slots = plan.slots.max(needed + 1);
        if plan.sums.len() <= into {
            plan.sums.resize(into + 1, None);
        }
        plan.sums[into] = Some(sum);
        LaneEnd { adds, into, sum }
    }

    /// The schedule of a rank's own lanes, from the first to the last.
    pub(crate) fn of_window(self, rank: usize, world: usize, of_lane: u32) -> LaneSchedule {
        let lanes = self.of_rank(rank, world);
        let lanes = lanes.map(|lane| OpenLane { lane, done: 0, slot: None });
        self.schedule(lanes, of_lane, Vec::new())
    }

    /// Sums of all ranks at the end of a window in which each has its own lanes, in the order of
    /// lanes.
    pub(crate) fn contributions(self, world: usize) -> Vec<Contribution> {
        in_order((0..world).map(|rank| self.of_window(rank, world, 1).sums))
    }

    /// Number of sums that are added to each of some sums, in the order of lanes, before the next
    /// one comes.
    pub(crate) fn merges(self, sums: impl IntoIterator<Item = LaneSum>) -> Vec<usize> {
        let mut held: Vec<LaneSum> = Vec::new();
        let merged = sums.into_iter().map(|mut sum| {
            let mut merges = 0;
            while let (Some(&left), Some([above, other])) = (held.last(), self.above(sum)) {
                if left != other {
                    break;
                }
                held.pop();
                merges += 1;
                sum = above;
            }
            held.push(sum);
            merges
        });
        merged.collect()
    }

    /// Most sums that a rank gives at the end, and most that it holds at once.
    pub(crate) fn most(self, world: usize, of_lane: u32) -> [usize; 2] {
        let ranks = (0..world).map(|rank| self.of_window(rank, world, of_lane));
        ranks.fold([0, 0], |[given, held], plan| {
            [given.max(plan.sums.iter().flatten().count()), held.max(plan.slots)]
        })
    }

    /// Whether every rank gives one sum, and these are added along the tree over the ranks.
    pub(crate) fn is_tree_of_ranks(self, world: usize) -> bool {
        let (lanes, world) = (self.count.get() as usize, world);
        lanes.is_multiple_of(world) && (lanes / world).is_power_of_two()
    }
}

impl LaneSchedule {
    /// The first memory that has no sum, and no lane of those that are still open.
    fn free_slot(&self, open: &[OpenLane]) -> usize {
        let has_lane = |at| open.iter().any(|lane| lane.slot == Some(at));
        let has_sum = |at: usize| self.sums.get(at).is_some_and(Option::is_some);
        (0..).find(|&at| !has_sum(at) && !has_lane(at)).unwrap_or_default()
    }

    /// Sums after some of the steps, by their memory, and lanes that have begun.
    pub(crate) fn held_after(&self, done: usize) -> (Vec<Option<LaneSum>>, Vec<OpenLane>) {
        let (mut sums, mut open) = (self.begins_with.clone(), self.begun.clone());
        sums.resize(sums.len().max(self.slots), None);
        for LaneStep { lane, of_lane, slot, ends, .. } in &self.steps[..done] {
            open.retain(|open| open.lane != *lane);
            match ends {
                None => {
                    open.push(OpenLane { lane: *lane, done: of_lane + 1, slot: Some(*slot) });
                }
                Some(end) => {
                    end.adds.iter().for_each(|&at| sums[at] = None);
                    sums[end.into] = Some(end.sum);
                }
            }
        }
        (sums, open)
    }
}

#[cfg(test)]
#[path = "lanes_tests.rs"]
mod tests;

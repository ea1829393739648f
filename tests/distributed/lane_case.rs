//! A run of several ranks whose sums follow lanes.

use std::num::{NonZeroU32, NonZeroUsize};

use fusestep_collective::{Communicator, Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_launch::Backend;
use fusestep_planner::{
    Accumulated, Comms, FuseReduceIntoUpdate, GradientAccumulation, Lanes, Planner, Run, RunAlone,
    StepReport, Topology, UpdateInBackward, ZeroStage,
};
use fusestep_tensor::Role;

use crate::run::{Case, Mixed, whole_params};

/// A run whose gradients follow the number of their micro-batch, not the rank.
#[derive(Clone, Debug)]
pub(crate) struct LaneCase {
    pub(crate) case: Case,
    pub(crate) lanes: u32,
    pub(crate) of_lane: u32,
    pub(crate) accumulated: Accumulated,
    pub(crate) fused: bool,
    pub(crate) in_backward: bool,
    pub(crate) weighted: bool,
    /// Gradients are written to views.
    pub(crate) views: bool,
    /// Micro-batches of the last window; all of them without a number.
    pub(crate) last: Option<u64>,
    /// Whether ranks say before a window how many micro-batches it has.
    pub(crate) announced: bool,
    /// Update, micro-batch and parameter whose gradient is not given.
    pub(crate) without_gradient: fn(u64, u64, usize) -> bool,
}

impl Default for LaneCase {
    fn default() -> Self {
        Self {
            case: Case { numels: vec![3_001, 3, 0, 1, 2_048, 17], steps: 2, ..Case::default() },
            lanes: 6,
            of_lane: 1,
            accumulated: Accumulated::Mean,
            fused: false,
            in_backward: false,
            weighted: false,
            views: false,
            last: None,
            announced: true,
            without_gradient: |_, _, _| false,
        }
    }
}

/// Parameters, and of each update the norm of gradients and how many were not there.
pub(crate) type End = (Vec<Vec<u8>>, Vec<(Option<u64>, Option<u64>, u64)>);

impl LaneCase {
    pub(crate) fn planner(&self) -> Planner {
        let mut case = self.case.clone();
        case.merge = 1;
        let lanes = NonZeroU32::new(self.lanes).unwrap();
        let mut planner = case.planner().with(Lanes::new(lanes));
        let mut sums = GradientAccumulation::every(NonZeroU32::new(self.of_lane).unwrap());
        if self.accumulated == Accumulated::Sum {
            sums = sums.sum();
        }
        if self.of_lane > 1 || self.accumulated == Accumulated::Sum {
            planner = planner.with(sums);
        }
        if self.fused {
            planner = planner.with(FuseReduceIntoUpdate);
        }
        if self.in_backward { planner.with(UpdateInBackward::default()) } else { planner }
    }

    fn micro_batches(&self) -> u64 {
        u64::from(self.lanes * self.of_lane)
    }

    fn weight(&self, micro_batch: u64) -> f64 {
        if self.weighted { 0.3 + micro_batch as f64 / 7.0 } else { 1.0 }
    }

    fn rank(&self, comm: &mut dyn Communicator) -> End {
        self.rank_on(comm, &CpuBackend::new(NonZeroUsize::MIN))
    }

    /// What a rank of the world ends with on a backend.
    pub(crate) fn rank_on(&self, comm: &mut dyn Communicator, backend: &dyn Backend) -> End {
        let planner = self.planner().limits(backend.limits());
        let plan = planner.plan_for(&self.case.params(), Topology::of(comm)).unwrap();
        let (rank, streams) = (comm.rank(), self.case.streams);
        let mut comms = match (self.case.shard_group, streams) {
            (Some(group), streams) => Comms::in_groups(comm, group, streams).unwrap(),
            (None, 0) if self.case.world.is_multiple_of(2) => {
                Comms::direct(comm).reducing_when_full()
            }
            (None, 0) => Comms::direct(comm),
            (None, streams) => Comms::with_streams(comm, streams).unwrap(),
        };
        let mut state = plan.allocate_on(backend, comms.communicator()).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            let first = self.case.first_values(param);
            state.write(backend, Role::Param, &desc.name, &first).unwrap();
        }
        let mut run = Run::of(&plan, &mut state, backend, &mut comms);
        let mut reports = Vec::new();
        for update in 0..self.case.steps {
            let all = match self.last {
                Some(last) if update + 1 == self.case.steps => last,
                _ => self.micro_batches(),
            };
            if self.announced {
                run.state_mut().set_micro_batches(all).unwrap();
            }
            let mut report = None;
            while let Some(micro_batch) = run.state().micro_batch().filter(|&at| at < all) {
                self.give(&mut run, update, micro_batch, rank);
                report = run.step().unwrap().update;
                if report.is_some() {
                    break;
                }
            }
            // A rank that had no micro-batch of this update makes its step all the same.
            if report.is_none() && self.announced {
                if self.weighted {
                    // Where sums are reduced early, a rank has to know that there are weights.
                    run.state_mut().set_weight(1.0).unwrap();
                }
                report = run.step().unwrap().update;
            } else if report.is_none() {
                report = run.flush().unwrap().update;
            }
            let report = report.expect("an update ends every window");
            reports.push(norms(&report));
            if !self.views && backend.host().is_some() {
                assert_eq!(run.state().memory_bytes(), plan.memory_bytes(), "{self:?}");
            }
        }
        (whole_params(&mut run), reports)
    }

    /// Gives the gradients of a micro-batch.
    pub(crate) fn give(&self, run: &mut Run<'_, '_>, update: u64, micro_batch: u64, rank: usize) {
        if self.weighted {
            run.state_mut().set_weight(self.weight(micro_batch)).unwrap();
        }
        let step = update * self.micro_batches() + micro_batch;
        let count = self.case.numels.len();
        for at in 0..count {
            let param = if rank.is_multiple_of(2) { count - 1 - at } else { at };
            if (self.without_gradient)(update, micro_batch, param) {
                continue;
            }
            let bytes = self.case.gradient(0, step, param);
            let name = run.plan().params()[param].name.clone();
            if self.views {
                let state = run.state_mut();
                let mut view = state.grad_mut::<f32>(&name).unwrap();
                let values = bytes.chunks_exact(4);
                for (to, from) in view.as_mut_slice().iter_mut().zip(values) {
                    *to = f32::from_le_bytes(from.try_into().unwrap());
                }
                drop(view);
                run.give_view(&name).unwrap();
            } else {
                run.push_grad(&name, &bytes).unwrap();
            }
        }
    }

    pub(crate) fn run(&self) -> End {
        if self.case.world == 1 {
            return self.rank(&mut Solo::new());
        }
        let ends = run_ranks(self.case.world, &Options::default(), |mut comm| self.rank(&mut comm));
        let ends: Vec<End> = ends
            .unwrap()
            .into_iter()
            .map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        for (rank, end) in ends.iter().enumerate() {
            assert!(*end == ends[0], "rank {rank} ends otherwise: {self:?}");
        }
        ends.into_iter().next().unwrap()
    }

    pub(crate) fn on(&self, world: usize) -> End {
        let mut other = self.clone();
        other.case.world = world;
        other.run()
    }

    /// Runs on all these worlds and stages; all end as one rank does. Returns that end.
    pub(crate) fn same_everywhere(&self, worlds: &[usize]) -> End {
        let expected = self.on(1);
        for &world in worlds {
            for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                for streams in [0, 2] {
                    let mut other = self.clone();
                    other.case.zero = zero;
                    other.case.streams = streams;
                    let found = other.on(world);
                    assert!(found == expected, "{world} ranks, {zero:?}, {streams}: {other:?}");
                }
            }
        }
        expected
    }

    /// One rank that is given sums along the tree, as they are defined, in f32.
    pub(crate) fn by_hand(&self) -> Vec<Vec<u8>> {
        assert!(self.case.mixed == Mixed::No && self.last.is_none());
        let planner = Planner::new(self.case.rule).naive();
        let plan = planner.plan(&self.case.params()).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            let first = self.case.first_values(param);
            state.write(&backend, Role::Param, &desc.name, &first).unwrap();
        }
        for update in 0..self.case.steps {
            for (param, desc) in plan.params().iter().enumerate() {
                match self.tree(update, param, 0..self.lanes) {
                    None if desc.numel() > 0 => state.set_without_gradient(&desc.name).unwrap(),
                    sums => {
                        let total: f64 = (0..self.micro_batches()).map(|at| self.weight(at)).sum();
                        let mean = |sum: f32| match self.accumulated {
                            Accumulated::Mean => sum / total as f32,
                            Accumulated::Sum => sum,
                        };
                        let sums = sums.unwrap_or_default().into_iter();
                        let bytes: Vec<u8> = sums.flat_map(|sum| mean(sum).to_le_bytes()).collect();
                        state.write(&backend, Role::Grad, &desc.name, &bytes).unwrap();
                    }
                }
            }
            RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
        }
        let params = plan.params().iter().map(|desc| {
            let mut bytes = vec![0; desc.numel() as usize * 4];
            state.read(&backend, Role::Param, &desc.name, &mut bytes).unwrap();
            bytes
        });
        params.collect()
    }

    /// The sum of some lanes; `None` if none of them has a gradient.
    fn tree(&self, update: u64, param: usize, lanes: std::ops::Range<u32>) -> Option<Vec<f32>> {
        let add = |left: Option<Vec<f32>>, right: Option<Vec<f32>>| match (left, right) {
            (Some(left), Some(right)) => {
                Some(left.into_iter().zip(right).map(|(x, y)| x + y).collect())
            }
            (left, right) => left.or(right),
        };
        if lanes.len() > 1 {
            let middle = lanes.start + (lanes.len() as u32).next_power_of_two() / 2;
            let left = self.tree(update, param, lanes.start..middle);
            return add(left, self.tree(update, param, middle..lanes.end));
        }
        let micro_batches = (0..self.of_lane).map(|at| u64::from(lanes.start * self.of_lane + at));
        micro_batches.fold(None, |sum, at| {
            if (self.without_gradient)(update, at, param) {
                return sum;
            }
            let bytes = self.case.gradient(0, update * self.micro_batches() + at, param);
            let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            let weight = self.weight(at) as f32;
            add(sum, Some(values.map(|x| if self.weighted { x * weight } else { x }).collect()))
        })
    }
}

pub(crate) fn norms(report: &StepReport) -> (Option<u64>, Option<u64>, u64) {
    let bits = |norm: Option<f64>| norm.map(f64::to_bits);
    (bits(report.grad_norm), bits(report.update_norm), report.without_gradient)
}

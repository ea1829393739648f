//! Runs a few steps of a small model on a world of threads, and by hand.

use std::num::{NonZeroU32, NonZeroUsize};

use fusestep_collective::{Communicator, Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_launch::{Backend, Precision, StateDType};
use fusestep_planner::{
    ClipByGlobalNorm, Comms, FuseAllReduce, FuseBroadcast, GradientAccumulation, LocalSgd,
    LossScaling, Optimizer, Oversize, Ownership, Planner, ReduceDType, ReducedWhen, Run, RunAlone,
    Shard, StepReport, Topology, UpdateNorms, ZeroStage,
};
use fusestep_simd::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use half::bf16;

/// What is run.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) rule: Optimizer,
    pub(crate) numels: Vec<u64>,
    /// Every second tensor is bf16.
    pub(crate) mixed: Mixed,
    pub(crate) world: usize,
    pub(crate) zero: ZeroStage,
    pub(crate) ownership: Ownership,
    /// Ranks that share shards; `None` for all.
    pub(crate) shard_group: Option<NonZeroUsize>,
    /// Bytes of a bucket; `None` for one call per tensor and no pass at all.
    pub(crate) cap: Option<u64>,
    /// Bytes of a broadcast of updated parameters; `None` without the pass.
    pub(crate) broadcast_cap: Option<u64>,
    pub(crate) streams: usize,
    pub(crate) clip: Option<f64>,
    pub(crate) scaled: Option<f64>,
    pub(crate) measured: Measured,
    pub(crate) merge: u32,
    pub(crate) reduced: ReducedWhen,
    /// Type in which gradients are added up and travel.
    pub(crate) reduce_dtype: ReduceDType,
    /// Values are small integers over 16, whose sums are exact in any order.
    pub(crate) exact: Exact,
    pub(crate) local_sgd: Option<LocalSgd>,
    /// How state of f32 parameters is kept.
    pub(crate) state: StateDType,
    /// How 16-bit parameters and their state are kept.
    pub(crate) precision: Option<Precision>,
    pub(crate) steps: u64,
    /// Rank, step and parameter whose gradient is not given.
    pub(crate) without_gradient: Vec<(usize, u64, usize)>,
    /// Rank, step and parameter whose gradient's last element is infinite.
    pub(crate) infinite: Option<(usize, u64, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Exact {
    No,
    Yes,
}

/// Whether updates are measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Measured {
    No,
    Yes,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mixed {
    No,
    Yes,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            rule: Adam::default().into(),
            numels: vec![70_001, 3, 0, 1, 5_000, 131_072, 17, 257],
            mixed: Mixed::No,
            world: 1,
            zero: ZeroStage::None,
            ownership: Ownership::Elements,
            shard_group: None,
            cap: Some(100_000),
            broadcast_cap: None,
            streams: 0,
            clip: None,
            scaled: None,
            measured: Measured::No,
            merge: 1,
            reduced: ReducedWhen::PerWindow,
            reduce_dtype: ReduceDType::Param,
            exact: Exact::No,
            local_sgd: None,
            state: StateDType::Compute,
            precision: None,
            steps: 3,
            without_gradient: Vec::new(),
            infinite: None,
        }
    }
}

/// What a run ends with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) params: Vec<Vec<u8>>,
    pub(crate) reports: Vec<StepReport>,
    /// After each update, if it is measured.
    pub(crate) update_norms: Vec<Option<Vec<f64>>>,
    pub(crate) skipped: u64,
}

/// Gradients that are missing: one rank lacks one in a micro-step, all lack another in a whole
/// update.
pub(crate) fn lacking(world: usize, merge: u32) -> Vec<(usize, u64, usize)> {
    let mut lacking = vec![(0, 1, 4), (world - 1, 4, 0)];
    let window = u64::from(merge)..2 * u64::from(merge);
    lacking.extend(window.flat_map(|step| (0..world).map(move |rank| (rank, step, 5))));
    lacking
}

impl Case {
    pub(crate) fn params(&self) -> Vec<ParamDesc> {
        let describe = |(at, &numel): (usize, &u64)| {
            let dtype = match (self.mixed, at % 2) {
                (Mixed::Yes, 1) => DType::BF16,
                _ => DType::F32,
            };
            let name = format!("layer{}.weight{at}", at / 2);
            let mut param = ParamDesc::new(name, Shape::new([numel]).unwrap(), dtype);
            param.lr_scale = [1.0, 0.5][at % 2];
            param
        };
        self.numels.iter().enumerate().map(describe).collect()
    }

    pub(crate) fn planner(&self) -> Planner {
        let of_f32 = Precision { state: self.state, ..Precision::default() };
        let planner = Planner::new(self.rule).precision(of_f32);
        let mut planner = planner.reduce_dtype(self.reduce_dtype);
        if let Some(precision) = self.precision {
            planner = planner.precision_of(DType::BF16, precision);
        }
        match self.cap {
            None => planner = planner.naive(),
            Some(cap) => {
                planner = planner.with(FuseAllReduce::of_bytes(cap).oversize(Oversize::Split))
            }
        }
        if let Some(cap) = self.broadcast_cap {
            planner = planner.with(FuseBroadcast::of_bytes(cap));
        }
        if let Some(norm) = self.clip {
            planner = planner.with(ClipByGlobalNorm::new(norm));
        }
        if let Some(scale) = self.scaled {
            planner = planner.with(LossScaling::fixed(scale));
        }
        if self.measured == Measured::Yes {
            planner = planner.with(UpdateNorms);
        }
        if self.merge > 1 {
            let every = NonZeroU32::new(self.merge).unwrap();
            planner = planner.with(GradientAccumulation::every(every).reduced(self.reduced));
        }
        if let Some(rule) = self.local_sgd {
            planner = planner.with(rule);
        }
        match self.zero {
            ZeroStage::None => planner,
            zero => {
                let shard = Shard::new(zero).ownership(self.ownership);
                planner.with(match self.shard_group {
                    Some(group) => shard.group(group),
                    None => shard,
                })
            }
        }
    }

    pub(crate) fn first_values(&self, param: usize) -> Vec<u8> {
        self.bytes(param, |element| noise([7, param as u64, element]) * 0.1)
    }

    /// The gradient of a rank; `step` counts micro-steps from 0.
    pub(crate) fn gradient(&self, rank: usize, step: u64, param: usize) -> Vec<u8> {
        let last = self.numels[param].saturating_sub(1);
        self.bytes(param, |element| {
            if self.infinite == Some((rank, step, param)) && element == last {
                return f32::INFINITY;
            }
            let value = noise([rank as u64 + 1, step + 1, (param as u64) << 32 | element]);
            let value = match self.exact {
                Exact::Yes => (value * 16.0).round() / 16.0,
                Exact::No => value,
            };
            value * self.scaled.unwrap_or(1.0) as f32
        })
    }

    pub(crate) fn lacks_gradient(&self, rank: usize, step: u64, param: usize) -> bool {
        self.without_gradient.contains(&(rank, step, param))
    }

    fn bytes(&self, param: usize, value: impl Fn(u64) -> f32) -> Vec<u8> {
        let wide = self.mixed == Mixed::No || param.is_multiple_of(2);
        let values = (0..self.numels[param]).map(value);
        if wide {
            values.flat_map(f32::to_le_bytes).collect()
        } else {
            values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect()
        }
    }

    /// The run on threads; every rank must end alike.
    pub(crate) fn run(&self) -> Outcome {
        let backend = || CpuBackend::new(NonZeroUsize::MIN);
        let body = |comm: &mut dyn Communicator| self.rank(comm, &backend());
        if self.world == 1 {
            return body(&mut Solo::new());
        }
        let outcomes =
            run_ranks(self.world, &Options::default(), |mut comm| body(&mut comm)).unwrap();
        let outcomes: Vec<Outcome> = outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        for (rank, outcome) in outcomes.iter().enumerate() {
            assert!(
                outcome.params == outcomes[0].params,
                "rank {rank} has other parameters: {self:?}"
            );
            let alike = |report: &StepReport| {
                (
                    report.step,
                    report.skipped,
                    report.without_gradient,
                    report.grad_norm.map(f64::to_bits),
                    report.update_norm.map(f64::to_bits),
                )
            };
            let (own, first) = (&outcome.reports, &outcomes[0].reports);
            assert!(self.local_sgd.is_some() || own.iter().map(alike).eq(first.iter().map(alike)));
        }
        outcomes.into_iter().next().unwrap()
    }

    /// One rank of the run.
    pub(crate) fn rank(&self, comm: &mut dyn Communicator, backend: &dyn Backend) -> Outcome {
        let plan = self
            .planner()
            .limits(backend.limits())
            .plan_for(&self.params(), Topology::of(comm))
            .unwrap();
        let rank = comm.rank();
        let mut comms = match (self.shard_group, self.streams) {
            (Some(group), streams) => Comms::in_groups(comm, group, streams).unwrap(),
            // Both ways without streams; they differ from ZeRO stage 2 on.
            (None, 0) if self.world.is_multiple_of(2) => Comms::direct(comm).reducing_when_full(),
            (None, 0) => Comms::direct(comm),
            (None, streams) => Comms::with_streams(comm, streams).unwrap(),
        };
        let mut state = plan.allocate(backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            state.write(backend, Role::Param, &desc.name, &self.first_values(param)).unwrap();
        }
        let (mut reports, mut update_norms) = (Vec::new(), Vec::new());
        for step in 0..self.steps * u64::from(self.merge) {
            // Ranks report gradients in different orders; calls must not follow them.
            let count = plan.params().len();
            let mut run = Run::of(&plan, &mut state, backend, &mut comms);
            for at in 0..count {
                let param = match rank % 2 {
                    0 => count - 1 - at,
                    _ => at,
                };
                if !self.lacks_gradient(rank, step, param) {
                    let bytes = self.gradient(rank, step, param);
                    let name = &plan.params()[param].name;
                    run.push_grad(name, &bytes).unwrap();
                }
            }
            let report = run.step().unwrap();
            // A device keeps what it has once given.
            if report.update.is_some() && backend.host().is_some() {
                assert_eq!(state.memory_bytes(), plan.memory_bytes(), "{self:?}");
            }
            if report.update.is_some() {
                update_norms.push(state.update_norms(backend).unwrap());
            }
            reports.extend(report.update);
        }
        if self.local_sgd.is_some() {
            Run::of(&plan, &mut state, backend, &mut comms).average_now().unwrap();
        }
        Outcome {
            params: whole_params(&mut Run::of(&plan, &mut state, backend, &mut comms)),
            skipped: state.skipped(),
            reports,
            update_norms,
        }
    }

    /// The mean over ranks in rank order, within shard groups and then over groups, and the plain
    /// naive plan: no code of the step of many ranks.
    pub(crate) fn by_hand(&self) -> Outcome {
        assert!(self.mixed == Mixed::No && self.merge == 1 && self.local_sgd.is_none());
        let of_f32 = Precision { state: self.state, ..Precision::default() };
        let mut planner = Planner::new(self.rule).precision(of_f32).naive();
        if let Some(norm) = self.clip {
            planner = planner.with(ClipByGlobalNorm::new(norm));
        }
        if let Some(scale) = self.scaled {
            planner = planner.with(LossScaling::fixed(scale));
        }
        if self.measured == Measured::Yes {
            planner = planner.with(UpdateNorms);
        }
        let plan = planner.plan(&self.params()).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            state.write(&backend, Role::Param, &desc.name, &self.first_values(param)).unwrap();
        }
        let (mut reports, mut update_norms) = (Vec::new(), Vec::new());
        for step in 0..self.steps {
            for (param, desc) in plan.params().iter().enumerate() {
                let (sum, any) = self.mean_gradient(step, param);
                if any || self.numels[param] == 0 {
                    let bytes: Vec<u8> = sum.into_iter().flat_map(f32::to_le_bytes).collect();
                    state.write(&backend, Role::Grad, &desc.name, &bytes).unwrap();
                } else {
                    state.set_without_gradient(&desc.name).unwrap()
                }
            }
            reports.push(RunAlone::of(&plan, &mut state, &backend).step_all().unwrap());
            update_norms.push(state.update_norms(&backend).unwrap());
        }
        let params = plan.params().iter().map(|desc| {
            let mut bytes = vec![0; desc.numel() as usize * desc.dtype.len_bytes()];
            state.read(&backend, Role::Param, &desc.name, &mut bytes).unwrap();
            bytes
        });
        Outcome { params: params.collect(), skipped: state.skipped(), reports, update_norms }
    }

    /// The mean of all ranks' gradients, of means of groups, and whether any rank has one.
    /// A value as it travels between ranks.
    fn sent(&self, value: f32) -> f32 {
        match self.reduce_dtype {
            ReduceDType::Bf16 => widen_bf16(narrow_bf16(value)),
            ReduceDType::F16 => widen_f16(narrow_f16(value)),
            ReduceDType::Param | ReduceDType::F32 => value,
        }
    }

    fn mean_gradient(&self, step: u64, param: usize) -> (Vec<f32>, bool) {
        let numel = self.numels[param] as usize;
        let (mut sum, mut means) = (vec![0.0f32; numel], vec![0.0f32; numel]);
        let mut any = false;
        let group = self.shard_group.map_or(self.world, NonZeroUsize::get);
        for rank in 0..self.world {
            let grad: Vec<f32> = if self.lacks_gradient(rank, step, param) {
                vec![0.0; sum.len()]
            } else {
                any = true;
                self.gradient(rank, step, param)
                    .chunks_exact(4)
                    .map(|b| self.sent(f32::from_le_bytes(b.try_into().unwrap())))
                    .collect()
            };
            for (sum, grad) in sum.iter_mut().zip(grad) {
                *sum = if rank % group == 0 { grad } else { *sum + grad };
            }
            if rank % group == group - 1 {
                for (mean, sum) in means.iter_mut().zip(&sum) {
                    let sum = sum / group as f32;
                    *mean = if rank < group { sum } else { *mean + sum };
                }
            }
        }
        let groups = (self.world / group) as f32;
        (means.into_iter().map(|mean| mean / groups).collect(), any)
    }
}

/// All parameters, gathered.
pub(crate) fn whole_params(run: &mut Run<'_, '_>) -> Vec<Vec<u8>> {
    let names: Vec<&str> = run.plan().params().iter().map(|param| param.name.as_str()).collect();
    let gathered = run.gather(&names).unwrap();
    (0..names.len()).map(|at| gathered.bytes(at).to_vec()).collect()
}

/// A number from −1 to 1 that depends on the key alone.
pub(crate) fn noise(key: [u64; 3]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for part in key {
        x ^= part.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 30)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 27;
    }
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

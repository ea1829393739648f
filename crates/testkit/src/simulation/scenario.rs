//! What a seed decides: the model, the rule, who shares what, when is saved.

use std::num::{NonZeroU32, NonZeroUsize};

use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_launch::{Master, Precision};
use fusestep_lion::Lion;
use fusestep_planner::{
    ClipByGlobalNorm, FuseAllReduce, FuseReduceIntoUpdate, GradientAccumulation, Optimizer, Plan,
    PlanError, Planner, Reach, ReducedWhen, Shard, Topology, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A training run, up to the numbers of ranks it is run on.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    numels: Vec<u64>,
    rule: Optimizer,
    zero: u8,
    cap_bytes: u64,
    clip: Option<f64>,
    merge: u32,
    reduced: ReducedWhen,
    narrow: bool,
    /// Micro-steps of the whole run, and between two saves.
    pub(super) micro_steps: u64,
    pub(super) save_every: u64,
    pub(super) shares_memory: bool,
}

impl Scenario {
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let rules: [Optimizer; 4] = [
            Adam::default().into(),
            Sgd {
                momentum: 0.5,
                ..Sgd::default()
            }
            .into(),
            Lion::default().into(),
            Lamb::default().into(),
        ];
        let tensors = rng.random_range(1..5);
        let merge = rng.random_range(1..4);
        Self {
            seed,
            numels: (0..tensors).map(|_| rng.random_range(0..40)).collect(),
            rule: rules[rng.random_range(0..rules.len())],
            zero: rng.random_range(0..4),
            cap_bytes: rng.random_range(1..300),
            clip: rng.random_bool(0.3).then_some(0.75),
            merge,
            reduced: if rng.random_bool(0.5) {
                ReducedWhen::PerWindow
            } else {
                ReducedWhen::PerMicroStep
            },
            narrow: rng.random_bool(0.3),
            micro_steps: rng.random_range(2..8),
            save_every: rng.random_range(1..4),
            shares_memory: rng.random_bool(0.5),
        }
    }

    /// Numbers of ranks at which the mean of equal gradients is exact; a run within a window goes on with as many as it had.
    pub(super) fn worlds(&self) -> &'static [usize] {
        if self.merge > 1 { &[2] } else { &[1, 2, 4] }
    }

    pub(super) fn params(&self) -> Vec<ParamDesc> {
        let dtype = if self.narrow { DType::BF16 } else { DType::F32 };
        let shapes = self
            .numels
            .iter()
            .filter_map(|&numel| Shape::new([numel]).ok());
        let named = shapes.enumerate();
        named
            .map(|(at, shape)| ParamDesc::new(format!("t{at}"), shape, dtype))
            .collect()
    }

    pub(super) fn plan(&self, topology: Topology) -> Result<Plan, PlanError> {
        let mut planner = Planner::new(self.rule);
        if self.narrow {
            planner = planner.precision(Precision {
                master: Master::F32,
                ..Precision::default()
            });
        }
        if let Some(max_norm) = self.clip {
            planner = planner.with(ClipByGlobalNorm::new(max_norm));
        }
        if let Some(merge) = NonZeroU32::new(self.merge).filter(|merge| merge.get() > 1) {
            planner = planner.with(GradientAccumulation::every(merge).reduced(self.reduced));
        }
        if topology.world > 1 {
            planner = planner.with(FuseAllReduce::of_bytes(self.cap_bytes));
            if topology.reach == Reach::SharedMemory {
                planner = planner.with(FuseReduceIntoUpdate);
            }
            if let Some(zero) = ZeroStage::of(self.zero).filter(|zero| *zero != ZeroStage::None) {
                planner = planner.with(Shard::new(zero));
            }
        }
        planner.plan_for(&self.params(), topology)
    }

    /// The first values of a parameter.
    pub(super) fn first_values(&self, param: usize) -> Vec<u8> {
        self.values(u64::MAX, param)
    }

    /// A gradient, the same on all ranks, with so few digits that any sum of it is exact.
    pub(super) fn gradient(&self, micro_step: u64, param: usize) -> Vec<u8> {
        self.values(micro_step, param)
    }

    fn values(&self, salt: u64, param: usize) -> Vec<u8> {
        let mixed = self.seed ^ salt.rotate_left(17) ^ (param as u64).rotate_left(40);
        let mut rng = ChaCha8Rng::seed_from_u64(mixed);
        let mut bytes = Vec::new();
        for _ in 0..self.numels[param] {
            let value = f32::from(rng.random_range(-32i16..=32)) / 64.0;
            if self.narrow {
                bytes.extend(bf16::from_f32(value).to_le_bytes())
            } else {
                bytes.extend(value.to_le_bytes())
            }
        }
        bytes
    }

    /// Threads of a rank's backend.
    pub(super) fn threads() -> NonZeroUsize {
        NonZeroUsize::MIN
    }
}

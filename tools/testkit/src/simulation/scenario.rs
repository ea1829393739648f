//! Scenarios of simulated runs. A seed decides the model, the rule, the sharing between ranks and
//! the times of saves.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use fusestep::StepOptions;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_launch::{Master, Precision};
use fusestep_lion::Lion;
use fusestep_planner::{Averaged, Initial, LocalSgd, Optimizer, ReducedWhen, Topology};
use fusestep_tensor::{DType, ParamDesc, Shape};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Parts of a batch, each with a gradient of its own: no run has more ranks.
const BATCH_PARTS: u64 = 4;

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// A training run, except for its numbers of ranks.
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
    averaging: Option<LocalSgd>,
    /// Lanes of the global batch, with which gradients need not be exact.
    pub(super) lanes: Option<NonZeroU32>,
    /// Micro-steps of the whole run, and between two saves; updates with lanes.
    pub(super) micro_steps: u64,
    pub(super) save_every: u64,
    pub(super) shares_memory: bool,
    /// If given, saves are written in the background, each part at every `looks`-th look; otherwise
    /// the run waits for them.
    pub(super) looks: Option<u32>,
}

impl Scenario {
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let rules: [Optimizer; 4] = [
            Adam::default().into(),
            Sgd { momentum: 0.5, ..Sgd::default() }.into(),
            Lion::default().into(),
            Lamb::default().into(),
        ];
        let tensors = rng.random_range(1..5);
        let averaging = rng.random_bool(0.2).then(|| LocalSgd {
            averaged: if rng.random_bool(0.5) {
                Averaged::Params
            } else {
                Averaged::ParamsAndState
            },
            begin: rng.random_range(0..3),
            ..LocalSgd::every(NonZeroU64::MIN.saturating_add(rng.random_range(0..3)))
        });
        let merge = rng.random_range(1..4);
        let lanes = NonZeroU32::new(rng.random_range(4..9));
        let lanes = lanes.filter(|_| rng.random_bool(0.25) && averaging.is_none());
        let each = rng.random_bool(0.5) && lanes.is_none();
        Self {
            seed,
            numels: (0..tensors).map(|_| rng.random_range(0..40)).collect(),
            rule: rules[rng.random_range(0..rules.len())],
            zero: rng.random_range(0..4),
            cap_bytes: rng.random_range(1..300),
            clip: rng.random_bool(0.3).then_some(0.75),
            merge,
            lanes,
            reduced: if each { ReducedWhen::PerMicroStep } else { ReducedWhen::PerWindow },
            narrow: rng.random_bool(0.3),
            averaging,
            micro_steps: rng.random_range(2..8),
            save_every: rng.random_range(1..4),
            shares_memory: rng.random_bool(0.5),
            looks: rng.random_bool(0.5).then(|| rng.random_range(1..4)),
        }
    }

    /// Numbers of ranks at which the mean of all gradients is exact; the reference has the first. A
    /// run that accumulates gradients or averages parameters keeps its number of ranks.
    pub(super) fn worlds(&self) -> &'static [usize] {
        if self.lanes.is_some() {
            &[1, 2, 3, 4]
        } else if self.merge > 1 || self.averages() {
            &[2]
        } else {
            &[1, 2, 4]
        }
    }

    /// Whether ranks update on their own and average every few steps.
    pub(super) fn averages(&self) -> bool {
        self.averaging.is_some()
    }

    pub(super) fn params(&self) -> Vec<ParamDesc> {
        let dtype = if self.narrow { DType::BF16 } else { DType::F32 };
        let shapes = self.numels.iter().filter_map(|&numel| Shape::new([numel]).ok());
        let named = shapes.enumerate();
        named.map(|(at, shape)| ParamDesc::new(format!("t{at}"), shape, dtype)).collect()
    }

    /// The settings of a run on so many ranks.
    pub(super) fn options(&self, world: usize) -> StepOptions {
        let mut options = StepOptions {
            clip_norm: self.clip,
            accumulate: self.merge,
            lanes: self.lanes.map(NonZeroU32::get),
            // Each rank's own are the same, so either way begins with the same values.
            initial: if self.seed.is_multiple_of(3) {
                Initial::OwnAndEqual
            } else {
                Initial::OfRankZero
            },
            ..StepOptions::of(self.rule)
        };
        if self.narrow {
            options.precision = Precision { master: Master::F32, ..Precision::default() };
        }
        if let Some(averaging) = self.averaging {
            options.local_sgd = Some(averaging.every.get());
            options.local_sgd_begin = averaging.begin;
            options.local_sgd_averaged = averaging.averaged;
        } else {
            options.bucket_cap_mib = Some(self.cap_bytes as f64 / MIB);
            options.zero = self.zero;
            // Threads of streams would not wait for their turns.
            options.comm_streams = Some(0);
            if self.merge > 1 {
                options.reduced = self.reduced;
            }
        }
        if world == 1 { options.of_one() } else { options }
    }

    /// The first values of a parameter.
    pub(super) fn first_values(&self, param: usize) -> Vec<u8> {
        let values = self.values(u64::MAX, param);
        self.stored(values.into_iter().map(|value| f32::from(value) / 64.0))
    }

    /// A rank's gradient: the mean over its share of the batch. It has so few digits that any sum
    /// or mean of gradients is exact.
    pub(super) fn gradient(&self, micro_step: u64, param: usize, topology: Topology) -> Vec<u8> {
        let share = BATCH_PARTS / topology.world as u64;
        let first = topology.rank as u64 * share;
        let mut sums = vec![0; self.numels[param] as usize];
        for part in first..first + share {
            let values = self.values(micro_step * BATCH_PARTS + part, param);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value;
            }
        }
        let scale = 64.0 * share as f32;
        self.stored(sums.into_iter().map(|sum| f32::from(sum) / scale))
    }

    /// Whether a save of every rank fits between its first two micro-steps of an update.
    pub(super) fn saves_within(&self, world: usize) -> bool {
        let lanes = self.lanes.map_or(0, NonZeroU32::get) as usize;
        self.seed.is_multiple_of(2) && lanes / world * self.merge as usize > 1
    }

    /// The gradient of a micro-batch, whose sums depend on their order.
    pub(super) fn gradient_of(&self, update: u64, micro_batch: u64, param: usize) -> Vec<u8> {
        let values = self.values(update * 1000 + micro_batch, param);
        self.stored(values.into_iter().map(|value| f32::from(value) / 61.0))
    }

    fn values(&self, salt: u64, param: usize) -> Vec<i16> {
        let mixed = self.seed ^ salt.rotate_left(17) ^ (param as u64).rotate_left(40);
        let mut rng = ChaCha8Rng::seed_from_u64(mixed);
        let drawn = (0..self.numels[param]).map(|_| rng.random_range(-32i16..=32));
        drawn.collect()
    }

    fn stored(&self, values: impl Iterator<Item = f32>) -> Vec<u8> {
        if self.narrow {
            let values = values.map(|value| bf16::from_f32(value).to_le_bytes());
            values.flatten().collect()
        } else {
            values.flat_map(f32::to_le_bytes).collect()
        }
    }

    /// Threads of a rank's backend.
    pub(super) fn threads() -> NonZeroUsize {
        NonZeroUsize::MIN
    }
}

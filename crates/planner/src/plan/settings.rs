//! Types of a plan's settings, which depend on nothing else in the planner.

use std::fmt;
use std::num::{NonZeroU32, NonZeroU64};

use fusestep_amp::{GradientRule, LossScale, MaxNorm};
use fusestep_tensor::{DType, counted};
use serde::{Deserialize, Serialize};

/// Gradient of the update, formed from the gradients of all micro-steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Accumulated {
    /// Mean of all micro-steps' gradients; weighted, if weights were given.
    #[default]
    Mean,
    /// Sum of all micro-steps' gradients.
    Sum,
}

/// Time at which ranks reduce gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReducedWhen {
    /// Once per update, which moves the fewest bytes between ranks. Every rank keeps sums of all
    /// gradients.
    #[default]
    PerWindow,
    /// Once per micro-step. From ZeRO stage 2 on a rank keeps sums of its shard only.
    ///
    /// Sums are the same at every stage, but differ from sums of [`ReducedWhen::PerWindow`]: they
    /// go over ranks first and over micro-steps then.
    PerMicroStep,
}

/// Adds the gradients of `every` micro-steps, in f32 for 16-bit gradients, and updates once.
///
/// The first micro-step writes, the others add, the last one also divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GradientAccumulation {
    /// Micro-steps of an update.
    pub every: NonZeroU32,
    /// Whether the update takes the mean or the sum of the gradients.
    pub accumulated: Accumulated,
    /// Time at which gradients are reduced across ranks.
    pub reduced: ReducedWhen,
}

impl GradientAccumulation {
    /// Takes the mean of this many micro-steps.
    pub fn every(every: NonZeroU32) -> Self {
        Self { every, accumulated: Accumulated::Mean, reduced: ReducedWhen::PerWindow }
    }

    /// Takes the sum in place of the mean.
    pub fn sum(mut self) -> Self {
        self.accumulated = Accumulated::Sum;
        self
    }

    /// Sets the time at which gradients are reduced across ranks.
    pub fn reduced(mut self, reduced: ReducedWhen) -> Self {
        self.reduced = reduced;
        self
    }

    /// Whether gradients are reduced in every one of several micro-steps.
    pub fn reduces_each(self) -> bool {
        self.every.get() > 1 && self.reduced == ReducedWhen::PerMicroStep
    }
}

/// Text by which ranks compare the setting: `4 micro-steps, their mean, reduced once per update`.
impl fmt::Display for GradientAccumulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accumulated = match self.accumulated {
            Accumulated::Mean => "mean",
            Accumulated::Sum => "sum",
        };
        let reduced = match self.reduced {
            ReducedWhen::PerWindow => "once per update",
            ReducedWhen::PerMicroStep => "in each",
        };
        write!(f, "{} micro-steps, their {accumulated}, reduced {reduced}", self.every)
    }
}

/// Storage type in which gradients are added up and travel between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceDType {
    /// The storage type of each parameter; with lanes as [`ReduceDType::F32`], but for state in 8
    /// bits.
    #[default]
    Param,
    /// f32 for parameters of 16 bits, whose gradients may be given in either type. Their sums are
    /// f32 from the first addition to the update and never rounded in between.
    F32,
    /// bf16 for f32 gradients on their way between ranks: each rank's contribution is rounded once
    /// and their sums are f32.
    Bf16,
    /// f16 for f32 gradients on their way between ranks, as with [`ReduceDType::Bf16`]. Values
    /// beyond 65,504 become infinite; a loss scale sees that.
    F16,
}

impl ReduceDType {
    /// The name in every face.
    pub const NAME: &'static str = "reduce_dtype";

    /// The type in which f32 gradients travel, if it is another.
    pub fn wire(self) -> Option<DType> {
        match self {
            Self::Param | Self::F32 => None,
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
        }
    }
}

/// Rules by which gradients are put into buckets.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Caps {
    pub(crate) bytes: u64,
    pub(crate) count: usize,
    pub(crate) oversize: Oversize,
}

/// Places at which parts and buckets may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grain {
    /// Cuts between any two elements. In buckets much longer than a slot, cuts are at multiples of
    /// a slot, because devices load 16 bytes at a time.
    Elements,
    /// Cuts at multiples of so many elements from the start of a tensor, so that each sum in the
    /// fixed tree belongs to one rank.
    Of(u64),
    Tensors,
}

/// The treatment of a gradient that is longer than a bucket's cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Oversize {
    /// The gradient is cut into buckets of the cap and a rest.
    #[default]
    Split,
    /// The gradient is a bucket of its own, beyond the cap.
    Alone,
}

/// Tensors that LocalSGD averages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Averaged {
    /// Parameters only; each rank's optimizer state stays its own.
    #[default]
    Params,
    /// The optimizer's state as well.
    ParamsAndState,
}

/// Rule for the number of steps between two averages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Interval {
    /// The number stays as given.
    #[default]
    Fixed,
    /// After every average [`LocalSgd::adapted`] computes the number from the losses given to
    /// [`crate::State::set_loss`]. A step without a loss is followed by an average.
    Adaptive,
}

/// Averages parameters every `every` steps, in place of reducing gradients in every step. Up to
/// step `begin` each step averages.
///
/// Averaging is counted in steps taken or skipped since the last one, so a skipped step does not
/// skip it.
///
/// # Source
/// Stich 2019, arXiv:1805.09767; the rule for adaptive intervals is that of PaddlePaddle's
/// `localsgd_optimizer.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LocalSgd {
    /// Steps between two averages.
    pub every: NonZeroU64,
    /// Number of steps at the start that are each followed by an average.
    pub begin: u64,
    /// The lists that are averaged.
    pub averaged: Averaged,
    /// Whether `every` changes as the run goes on.
    pub interval: Interval,
}

impl LocalSgd {
    /// Longest interval of the adaptive rule.
    pub const MAX_ADAPTIVE: u64 = 16;

    /// Averages parameters once in this many steps, from the first step on.
    pub fn every(every: NonZeroU64) -> Self {
        Self { every, begin: 0, averaged: Averaged::Params, interval: Interval::Fixed }
    }

    /// Lets the interval, `every` at first, follow the loss.
    pub fn adaptive(mut self) -> Self {
        self.interval = Interval::Adaptive;
        self
    }

    /// Setting with the number of steps that the adaptive rule chooses from the loss and learning
    /// rate.
    ///
    /// ```text
    /// every ← ⌈√(first_lr · loss / (lr · first_loss) · every)⌉
    /// ```
    ///
    /// The result is from 1 to [`Self::MAX_ADAPTIVE`]. `first_loss` and `first_lr` are from the
    /// start of the run, `loss` and `lr` from now. A NaN gives 1.
    pub fn adapted(self, first_loss: f64, loss: f64, first_lr: f64, lr: f64) -> Self {
        let ratio = first_lr * loss / (lr * first_loss) * self.every.get() as f64;
        let every = ratio.sqrt().ceil();
        // NaN and everything below 1 become 1: a run that has lost its way averages at once.
        let every = if every >= 1.0 { (every as u64).min(Self::MAX_ADAPTIVE) } else { 1 };
        Self { every: NonZeroU64::new(every).unwrap_or(NonZeroU64::MIN), ..self }
    }

    /// Whether an average is due after step `step` (counted from 1), `since` steps after the last
    /// average.
    pub(crate) fn due(self, step: u64, since: u64) -> bool {
        step <= self.begin || since >= self.every.get()
    }
}

/// Text by which ranks compare the setting: `parameters every 4 steps, and after each of the first
/// 2 steps`.
impl fmt::Display for LocalSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let averaged = match self.averaged {
            Averaged::Params => "parameters",
            Averaged::ParamsAndState => "parameters and state",
        };
        let interval = match self.interval {
            Interval::Fixed => "",
            Interval::Adaptive => " at first, then as losses say",
        };
        let LocalSgd { every, begin, .. } = self;
        write!(f, "{averaged} every {}{interval}", counted(every.get(), "step"))?;
        match begin {
            0 => Ok(()),
            begin => write!(f, ", and after each of the first {}", counted(*begin, "step")),
        }
    }
}

/// Tensors that ranks share out among each other.
///
/// # Source
/// Rajbhandari et al. 2020, arXiv:1910.02054.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
pub enum ZeroStage {
    /// Nothing: every rank has everything.
    #[default]
    None,
    /// The optimizer's state and the update; parameters are gathered after it.
    One,
    /// Gradients too: a rank keeps the gradients of its shard.
    Two,
    /// Parameters too, which are gathered when they are needed.
    Three,
}

impl ZeroStage {
    /// The stage as a number.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The stage of this number.
    pub fn of(number: u8) -> Option<Self> {
        [Self::None, Self::One, Self::Two, Self::Three].get(usize::from(number)).copied()
    }
}

/// Places where shards end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ownership {
    /// Between elements, so that shards are as equal as can be: at leaves of the fixed tree (1,024
    /// elements from a tensor's start) where sums are taken over gradients or tensors, at its
    /// chunks (65,536) where updates are measured.
    #[default]
    Elements,
    /// Between tensors.
    Tensors,
}

/// Keeper of parameters and gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
pub enum Tensors {
    /// The state keeps them; a caller writes gradients into the state's views.
    #[default]
    Kept,
    /// The caller's framework keeps them and lends them for each step. The state keeps only the
    /// optimizer's own tensors.
    Borrowed,
    /// The caller's framework keeps the optimizer's own tensors, too, and lends all of them: the
    /// state keeps step counts only.
    BorrowedWithState,
}

impl Tensors {
    /// Whether parameters and gradients are lent for each step.
    pub fn are_borrowed(self) -> bool {
        self != Tensors::Kept
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Gradients {
    pub(crate) max_norm: Option<MaxNorm>,
    pub(crate) loss_scale: Option<LossScale>,
}

impl Gradients {
    /// The rule of the control block; `None` if no pass asks for one.
    pub(crate) fn rule(&self) -> Option<GradientRule> {
        if self.max_norm.is_none() && self.loss_scale.is_none() {
            return None;
        }
        Some(GradientRule {
            max_norm: self.max_norm.unwrap_or(MaxNorm::UNLIMITED),
            loss_scale: self.loss_scale.unwrap_or(LossScale::unscaled()),
        })
    }
}

/// Place of a launch's table of tensors. The place changes launches and the host's work for them,
/// never a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TableKind {
    /// Arguments of the launch. A launch takes as many tensors as fit, and the host derives the
    /// scalars of every step.
    #[default]
    Arguments,
    /// Memory of the device, in which the table is built once. A launch takes any number of
    /// tensors. The device counts steps and derives the scalars, so that a step can be recorded in
    /// a graph.
    Resident,
    /// Arguments if each stage fits into one launch, else resident.
    Auto,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_intervals_stay_within_bounds() {
        let start = LocalSgd::every(NonZeroU64::new(4).unwrap());
        let every = |loss, lr| start.adapted(1.0, loss, 1.0, lr).every.get();
        assert_eq!((every(1.0, 1.0), every(0.25, 1.0), every(0.0, 1.0)), (2, 1, 1));
        assert_eq!((every(1e9, 1.0), every(1.0, 1e-9), every(f64::NAN, 1.0)), (16, 16, 1));
        assert_eq!(every(1.01, 1.0), 3);
    }

    #[test]
    fn averages_are_due_at_the_start_and_then_every_few_steps() {
        let rule = LocalSgd { begin: 2, ..LocalSgd::every(NonZeroU64::new(3).unwrap()) };
        assert!(rule.due(1, 1) && rule.due(2, 1));
        assert!(!rule.due(3, 1) && !rule.due(4, 2) && rule.due(5, 3) && rule.due(9, 7));
    }
}

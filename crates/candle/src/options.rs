//! What an optimizer does besides its rule.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use fusestep_planner::{LossScale, Precision, Schedule};

use crate::ParamGroup;

/// What an optimizer does besides its rule; the default is what [`crate::Fused::new`] takes.
///
/// ```
/// use fusestep_candle::{LossScale, Master, Options, Precision};
///
/// // Mixed precision: bf16 variables with f32 masters, a scaled loss, gradients clipped to norm 1,
/// // no decay on biases.
/// let options = Options {
///     clip_norm: Some(1.0),
///     loss_scale: Some(LossScale::dynamic()),
///     precision: Precision { master: Master::F32, ..Precision::default() },
///     exclude: vec!["bias".to_owned()],
///     ..Options::default()
/// };
/// ```
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Most threads, the caller's included; as many as rayon's pool has if `None`. The bits do not
    /// depend on it.
    pub threads: Option<NonZeroUsize>,
    /// Gradients whose common norm is above this are multiplied by clip_norm / (norm + 1e-6) as
    /// the update reads them.
    pub clip_norm: Option<f64>,
    /// The loss is multiplied by [`crate::Fused::loss_scale`] before `backward`; the step takes it
    /// out again, and is skipped if a gradient is not finite.
    pub loss_scale: Option<LossScale>,
    /// How far each variable moves in a step is measured as the update writes it:
    /// [`crate::Report::update_norm`], [`crate::Fused::update_norms`].
    pub update_norms: bool,
    /// How exactly f16 and bf16 variables and the state are kept.
    pub precision: Precision,
    /// Variables whose name contains one of these have no weight decay, and with LARS and LAMB the
    /// rate that the rule's `excluded` says.
    pub exclude: Vec<String>,
    /// What multiplies the learning rates at every update, those of groups too. It follows from the
    /// step count, so a run that is resumed goes on in the middle of it.
    pub schedule: Option<Schedule>,
    /// Whether passes fuse the launches.
    pub fusion: Fusion,
    /// Variables with a rule and settings of their own.
    pub groups: Vec<ParamGroup>,
    /// What ranks share out ([`crate::Fused::on`]): 1 optimizer state, 2 gradients too, 3 the
    /// optimizer's copy of the variables too; 0 is nothing. It changes no bit.
    pub zero: u8,
    /// Adds the gradients of this many micro-steps before each update ([`crate::Fused::on`]).
    pub accumulate: Option<NonZeroU32>,
    /// Most MiB of gradients that one call between ranks reduces; 25 if `None`. It changes no bit.
    pub bucket_cap_mib: Option<f64>,
    /// Reduces buckets on so many streams while gradients are still being given. If `None`, 2, and
    /// 0 where ranks see each other's memory: there a bucket is reduced and updated in one pass. It
    /// changes no bit.
    pub comm_streams: Option<usize>,
    /// Averages variables over ranks every this many steps in place of gradients every step.
    pub local_sgd: Option<NonZeroU64>,
    /// Whose first values ranks train.
    pub initial: Initial,
}

/// Whose first values ranks train.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Initial {
    /// Those of rank 0, which the others' variables are set to: candle draws other random values on
    /// every rank.
    #[default]
    OfRankZero,
    /// Each rank's own, which have to be the same; the first step compares them.
    OwnAndEqual,
}

/// Whether passes fuse the launches; it changes no bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fusion {
    /// As few launches as the limits allow.
    #[default]
    Fused,
    /// One launch for each variable: the oracle of the fused plan.
    Naive,
}

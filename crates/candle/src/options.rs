//! What an optimizer does besides its rule.

use std::num::NonZeroUsize;

use fusestep_planner::{LossScale, Precision, Schedule};

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
    /// What multiplies the learning rate at every step; it follows from the step count that
    /// [`crate::Fused::save`] writes.
    pub schedule: Option<Schedule>,
    /// Whether passes fuse the launches.
    pub fusion: Fusion,
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

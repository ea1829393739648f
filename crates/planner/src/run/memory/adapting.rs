//! An interval of LocalSGD that follows the loss.

use std::num::NonZeroU64;

/// An interval that follows the loss.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Adapting {
    /// Loss of this rank in the step under way.
    pub(crate) loss: Option<f64>,
    /// Mean loss of all ranks in the first step, and the learning rate.
    pub(crate) first: Option<(f64, f64)>,
    pub(crate) every: Option<NonZeroU64>,
}

//! What one step did.

use serde::Serialize;

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepReport {
    /// The state's step after this one.
    pub step: u64,
    /// Launches issued.
    pub launches: u64,
    /// Elements updated.
    pub elements: u64,
    /// Parameters left out because they had no gradient; neither they nor their state changed.
    pub absent: u64,
}

//! Parts of a run that belong to single ranks, as a manifest tells of them.

use fusestep_planner::{OpenLanes, ReducedWhen};
use serde::{Deserialize, Serialize};

/// Values of a checkpoint that belong to single ranks. If all ranks have the same values, any
/// number of ranks can resume, and otherwise only as many. `Manifest::average` makes the values
/// the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenRun {
    /// The number of ranks.
    pub ranks: usize,
    /// The gradient accumulation that is under way, if there is one.
    pub window: Option<OpenWindow>,
    /// Steps between two averages as planned, if ranks average parameters.
    pub local_sgd: Option<u64>,
    /// The window of lanes that has begun, with which any number of ranks can go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<OpenLanes>,
    /// Parameters of which each rank has a slice of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<String>,
}

impl OpenRun {
    pub(crate) fn new(
        ranks: usize,
        window: Option<OpenWindow>,
        every: Option<u64>,
        slices: Vec<String>,
    ) -> Self {
        Self { ranks, window, local_sgd: every, lanes: None, slices }
    }

    /// Steps between two averages as planned, if ranks average parameters.
    pub(crate) fn every(&self) -> Option<u64> {
        self.local_sgd
    }

    /// Whether ranks average parameters.
    pub(crate) fn averages(&self) -> bool {
        self.local_sgd.is_some()
    }
}

/// A gradient accumulation some of whose micro-steps are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenWindow {
    /// Micro-steps that are over.
    pub micro_steps: u32,
    /// Micro-steps of the whole accumulation.
    pub every: u32,
    /// When gradients are reduced.
    pub reduced: ReducedWhen,
}

//! Argument tables in a device's memory, and the steps that were enqueued on them.

use fusestep_launch::ResidentTable;

use crate::error::{PlanError, Result};
use crate::plan::settings::TableKind;
use crate::plan::value::Plan;

/// A state's tables in its backend's memory.
#[derive(Default)]
pub(crate) struct Tables {
    pub(crate) kind: TableKind,
    /// Tables of each stage that updates; `None` for a stage without batches.
    pub(crate) updates: Vec<Option<Box<dyn ResidentTable>>>,
    /// Tables of each storage whose gradients are read.
    pub(crate) reads: Vec<Option<Box<dyn ResidentTable>>>,
    /// Number of these tables among all that were built; 0 before the first.
    pub(crate) generation: u64,
    /// Bits of each rule's learning rate, from which the tables derive step scalars.
    pub(crate) rates: Vec<u64>,
    /// Steps enqueued whose outcome the host does not know.
    pub(crate) pending: u64,
    /// Whether pending steps were counted before a caller set the state's step.
    pub(crate) superseded: bool,
}

impl Tables {
    pub(crate) fn of(plan: &Plan) -> Self {
        Self { kind: plan.table, ..Self::default() }
    }

    /// An error if a step's outcome is not known.
    pub(crate) fn check_settled(&self) -> Result<()> {
        match self.pending {
            0 => Ok(()),
            pending => Err(PlanError::Unsettled { pending }),
        }
    }
}

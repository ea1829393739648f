//! Why the adapter refused.

use candle_core::{DType, Shape};
use fusestep_launch::BackendError;
use fusestep_planner::PlanError;

/// Why the adapter refused; inside a [`candle_core::Error`], because candle's trait returns that.
/// Nothing has been written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// A variable's dtype has no kernel.
    #[error(
        "variable `{name}`: expected f32, f64, f16 or bf16, found {found:?}; build the model with \
         a dtype of those"
    )]
    DType {
        /// The variable.
        name: String,
        /// Its dtype.
        found: DType,
    },
    /// A variable is not where the optimizer works: on the cpu, or with the feature `cuda` on the
    /// device of the first variable.
    #[error(
        "variable `{name}`: expected it on {expected}, found it on {found}; build the model on one \
         device, Device::Cpu without the feature `cuda`"
    )]
    Device {
        /// The variable.
        name: String,
        /// Where it has to be.
        expected: &'static str,
        /// Where it is.
        found: String,
    },
    /// One variable was given twice.
    #[error(
        "variable `{name}`: expected each variable once, found the same one as `{first}`; drop \
         one of them"
    )]
    SameVariable {
        /// The second place.
        name: String,
        /// The first place.
        first: String,
    },
    /// A save after every 0 steps.
    #[error(
        "checkpoint_every: expected a save after every 1 step or more, found 0; leave the call out \
         to save nothing"
    )]
    SaveEvery0,
    /// A gradient does not fit its variable.
    #[error(
        "gradient of `{name}`: expected {expected_dtype:?} {expected:?}, found {found_dtype:?} \
         {found:?}; take it from the backward pass of this variable"
    )]
    Gradient {
        /// The variable.
        name: String,
        /// The variable's shape.
        expected: Shape,
        /// The variable's dtype.
        expected_dtype: DType,
        /// The gradient's shape.
        found: Shape,
        /// The gradient's dtype.
        found_dtype: DType,
    },
    /// Variables given as a bare list have no names to save or load a state by.
    #[error(
        "state: expected variables with names, found a bare list; build the optimizer from the \
         VarMap"
    )]
    Unnamed,
    /// A variable's name is what safetensors files call their texts.
    #[error(
        "variable `__metadata__`: expected another name, since files of models call their texts \
         so; rename it, or build the optimizer with `.on(comm)`, which saves it apart"
    )]
    MetadataName,
    /// An option out of range.
    #[error("option `{option}`: expected {expected}, found {found}")]
    Option {
        /// Its name.
        option: &'static str,
        /// What works.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// An option needs gradients in memory of the optimizer's own.
    #[error(
        "option `{option}` of {found}: expected an optimizer on a communicator, found one that \
         borrows candle's memory; build it with `.on(comm)`, `Solo` for one process"
    )]
    NeedsRanks {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: String,
    },
    /// There is no such parameter group.
    #[error("group {found}: expected one of the {count} of `Options::groups`, counted from 0")]
    NoSuchGroup {
        /// The number given.
        found: usize,
        /// The number of groups.
        count: usize,
    },
    /// An optimizer that has stepped, saved or resumed cannot change to ranks.
    #[error("on: expected an optimizer before its first step, found one of {steps} steps")]
    InUse {
        /// Steps run.
        steps: u64,
    },
    /// A call between ranks failed.
    #[error(transparent)]
    Collective(#[from] fusestep_collective::CollectiveError),
    /// Planning, running, saving or loading failed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// candle's own, about memory it guards.
    #[error("{0}")]
    Candle(String),
    /// Threads could not be started.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl AdapterError {
    /// Whether it is one of saving or resuming, which comes on all ranks alike.
    pub(crate) fn is_of_checkpoint(&self) -> bool {
        matches!(self, Self::Plan(error) if error.is_of_checkpoint())
    }

    /// An error that has passed through candle.
    pub(crate) fn from_candle(error: candle_core::Error) -> Self {
        Self::Candle(error.to_string())
    }
}

impl From<AdapterError> for candle_core::Error {
    fn from(error: AdapterError) -> Self {
        candle_core::Error::wrap(error)
    }
}

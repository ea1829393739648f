//! Errors of the optimizers on candle variables.

use candle_core::{DType, Shape};
use fusestep::SessionError;
use fusestep_launch::BackendError;
use fusestep_planner::PlanError;

/// Error of an optimizer on candle variables; inside a [`candle_core::Error`], because candle's
/// trait returns that. Nothing has been written.
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
        /// The place that it has to be in.
        expected: &'static str,
        /// The place that it is in.
        found: String,
    },
    /// A launcher has started several processes, and this one steps as if it were the only one.
    #[error(transparent)]
    TakenForWhole(#[from] fusestep_collective::TakenForWhole),
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
    /// There is nothing to train.
    #[error(
        "variables: expected at least one of floating point, found none; build the model from the \
         VarMap before its optimizer"
    )]
    NoVariables,
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
    /// A gradient is in f32 where sums of gradients are in the dtype of its 16-bit variable.
    #[error(
        "gradient of `{name}`: expected {expected:?}, in which these gradients are added up, found \
         F32; set `Options::reduce_dtype` to `ReduceDType::F32`, which takes it as it is"
    )]
    WideGradient {
        /// The variable.
        name: String,
        /// The variable's dtype.
        expected: DType,
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
        /// Values that work.
        expected: &'static str,
        /// The value given.
        found: String,
    },
    /// A setting out of range, without effect, or against another one.
    #[error(transparent)]
    Setting(#[from] fusestep::OptionError),
    /// A layer is split over other ranks than the optimizer has.
    #[error(
        "variable `{name}`: expected an optimizer on the {expected} ranks that its layer is split \
         over, found one on {found}; split layers over all ranks of `.on(comm)`, or train on the \
         communicator of the layer's group"
    )]
    SplitOver {
        /// The variable.
        name: String,
        /// Ranks of the layer's group.
        expected: usize,
        /// Ranks of the optimizer.
        found: usize,
    },
    /// A layer that is split over ranks was built of a variable once the optimizer had it as a
    /// whole.
    #[error(
        "variable `{name}`: expected one that every rank has whole, found a slice of a layer that \
         was built behind the optimizer; build layers first, or name it in `Options::distributed`"
    )]
    SplitLate {
        /// The variable.
        name: String,
    },
    /// A setting takes whole tensors, and the optimizer of one process has a slice.
    #[error(
        "variable `{name}`: expected an optimizer on the ranks that its layer is split over, since \
         {what} takes all gradients of whole tensors, found one of this rank alone; build it with \
         `.on(comm)`"
    )]
    SliceAlone {
        /// The variable.
        name: String,
        /// The option or rule.
        what: &'static str,
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
    #[error("on: expected an optimizer before its first step, found one in use, of {steps} steps")]
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

impl From<SessionError> for AdapterError {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::Setting(error) => error.into(),
            SessionError::Plan(error) => error.into(),
            SessionError::TakenForWhole(error) => error.into(),
            other => Self::Candle(other.to_string()),
        }
    }
}

impl From<AdapterError> for candle_core::Error {
    fn from(error: AdapterError) -> Self {
        candle_core::Error::wrap(error)
    }
}

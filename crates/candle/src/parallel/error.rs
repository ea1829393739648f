//! Why a split layer refused.

use candle_core::{DType, Shape};
use fusestep_collective::CollectiveError;

/// Why an operation between ranks refused; inside a [`candle_core::Error`], because candle's
/// operations return that.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// A rank's tensor does not fit those of the others; every rank gets this.
    #[error(
        "{operation}: expected {expected} as on rank {expected_rank}, found {found} on rank \
         {found_rank}; give tensors of one dtype whose shapes differ at most along the gathered \
         dimension"
    )]
    RanksDiffer {
        /// What was asked for.
        operation: &'static str,
        /// The rank the others are compared with.
        expected_rank: usize,
        /// Its dtype and shape.
        expected: String,
        /// The lowest rank that differs.
        found_rank: usize,
        /// Its dtype and shape.
        found: String,
    },
    /// A tensor's dtype is not one that ranks sum.
    #[error(
        "{operation}: expected f32, f64, f16 or bf16, found {found:?}; convert it by `to_dtype` \
         first"
    )]
    DType {
        /// What was asked for.
        operation: &'static str,
        /// Its dtype.
        found: DType,
    },
    /// A tensor is not in host memory.
    #[error(
        "{operation}: expected a tensor on the cpu, found it on {found}; move it with `to_device`"
    )]
    Device {
        /// What was asked for.
        operation: &'static str,
        /// Where it is.
        found: String,
    },
    /// A tensor has more dimensions than ranks tell each other.
    #[error(
        "{operation}: expected at most {limit} dimensions, found {found:?}; flatten some of them"
    )]
    Dimensions {
        /// What was asked for.
        operation: &'static str,
        /// The most.
        limit: usize,
        /// The tensor's shape.
        found: Shape,
    },
    /// A tensor is not as long as its split says.
    #[error(
        "{operation}: expected {expected} elements along dimension {dim} as the split {counts:?} \
         says, found {found}; split the tensor as it is, or pad it"
    )]
    Length {
        /// What was asked for.
        operation: &'static str,
        /// The dimension.
        dim: usize,
        /// How many the split has.
        expected: usize,
        /// The split.
        counts: Vec<usize>,
        /// How many there are.
        found: usize,
    },
    /// A split is for another number of ranks.
    #[error("split {counts:?}: expected a block for each of {expected} ranks, found {found}")]
    World {
        /// The group's ranks.
        expected: usize,
        /// The split's blocks.
        found: usize,
        /// The split.
        counts: Vec<usize>,
    },
    /// A root is no rank of the group.
    #[error("{operation}: expected a root below {expected}, found {found}")]
    Root {
        /// What was asked for.
        operation: &'static str,
        /// The number of ranks.
        expected: usize,
        /// The root.
        found: usize,
    },
    /// A tensor holds no integers, or has no dimension to gather along.
    #[error(
        "{operation}: expected integers of at least one dimension, found {found_dtype:?} {found:?}"
    )]
    Integers {
        /// What was asked for.
        operation: &'static str,
        /// The tensor's shape.
        found: Shape,
        /// Its dtype.
        found_dtype: DType,
    },
    /// Labels do not fit the logits.
    #[error(
        "labels: expected integers of shape {expected:?} as the logits have, found {found_dtype:?} {found:?}"
    )]
    Labels {
        /// The logits' shape but for the classes.
        expected: Shape,
        /// The labels' shape.
        found: Shape,
        /// The labels' dtype.
        found_dtype: DType,
    },
    /// A label is no class; every rank gets this.
    #[error(
        "label of sample {sample}: expected a class below {expected} on every rank, found another on at least one"
    )]
    Label {
        /// The last sample in question.
        sample: usize,
        /// The number of classes.
        expected: usize,
    },
    /// Ranks have different labels; every rank gets this.
    #[error(
        "label of sample {sample}: expected the same on every rank, found it in the classes of \
         {found} ranks; every rank needs the labels of all samples (`all_gather_labels`)"
    )]
    LabelsDiffer {
        /// The first sample in question.
        sample: usize,
        /// How many ranks took it for one of their classes.
        found: usize,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

impl From<ParallelError> for candle_core::Error {
    fn from(error: ParallelError) -> Self {
        candle_core::Error::wrap(error)
    }
}

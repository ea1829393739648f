//! Errors of layers that are split over ranks.

use candle_core::{DType, Shape};
use fusestep_collective::CollectiveError;

/// Error of an operation between ranks, inside a [`candle_core::Error`], because candle's
/// operations return that type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// A rank's tensor does not fit those of the others; every rank gets this error.
    #[error(
        "{operation}: expected {expected} as on rank {expected_rank}, found {found} on rank \
         {found_rank}; give tensors of one dtype whose shapes differ at most along the gathered \
         dimension"
    )]
    RanksDiffer {
        /// Name of the operation.
        operation: &'static str,
        /// Rank that the others are compared with.
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
        /// Name of the operation.
        operation: &'static str,
        /// Its dtype.
        found: DType,
    },
    /// A tensor is not in host memory.
    #[error(
        "{operation}: expected a tensor on the cpu, found it on {found}; move it with `to_device`"
    )]
    Device {
        /// Name of the operation.
        operation: &'static str,
        /// Device of the tensor.
        found: String,
    },
    /// A tensor has more dimensions than ranks can compare.
    #[error(
        "{operation}: expected at most {limit} dimensions, found {found:?}; flatten some of them"
    )]
    Dimensions {
        /// Name of the operation.
        operation: &'static str,
        /// Most dimensions of a tensor.
        limit: usize,
        /// The tensor's shape.
        found: Shape,
    },
    /// A tensor's length differs from its split's.
    #[error(
        "{operation}: expected {expected} elements along dimension {dim} as the split {counts:?} \
         says, found {found}; split the tensor as it is, or pad it"
    )]
    Length {
        /// Name of the operation.
        operation: &'static str,
        /// Dimension that is split.
        dim: usize,
        /// Number of elements that the split has.
        expected: usize,
        /// The split.
        counts: Vec<usize>,
        /// Number of elements that the tensor has.
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
        /// Name of the operation.
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
        /// Name of the operation.
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
    /// A label is no class; every rank gets this error.
    #[error(
        "label of sample {sample}: expected a class below {expected} on every rank, found another on at least one"
    )]
    Label {
        /// Last sample with such a label.
        sample: usize,
        /// The number of classes.
        expected: usize,
    },
    /// Ranks have different labels; every rank gets this error.
    #[error(
        "label of sample {sample}: expected the same on every rank, found it in the classes of \
         {found} ranks; every rank needs the labels of all samples (`all_gather_labels`)"
    )]
    LabelsDiffer {
        /// First sample whose label differs.
        sample: usize,
        /// Number of ranks that have found the label among their own classes.
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

//! Fields: what fingerprints of calls are compared by.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A part of a fingerprint, in the order of comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Field {
    /// The operation.
    Operation,
    /// The way in which the call reduces.
    ReduceOp,
    /// The elements' type.
    DType,
    /// Elements of the whole.
    Numel,
    /// The root.
    Root,
    /// The counts of blocks.
    Counts,
    /// The bucket.
    Bucket,
    /// The plan.
    PlanHash,
    /// The number of the call.
    Sequence,
}

impl Field {
    /// All fields, in the order of comparison.
    pub const ALL: [Field; 9] = [
        Field::Operation,
        Field::ReduceOp,
        Field::DType,
        Field::Numel,
        Field::Root,
        Field::Counts,
        Field::Bucket,
        Field::PlanHash,
        Field::Sequence,
    ];
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Field::Operation => "operation",
            Field::ReduceOp => "reduce op",
            Field::DType => "dtype",
            Field::Numel => "length in elements",
            Field::Root => "root",
            Field::Counts => "hash of the counts",
            Field::Bucket => "bucket",
            Field::PlanHash => "plan hash",
            Field::Sequence => "sequence",
        })
    }
}

//! Stages of a plan, which run in order.

use std::ops::Range;

use fusestep_launch::{Batch, TensorList};
use serde::Serialize;

use crate::plan::group::SizeClass;
use crate::plan::settings::{GradientAccumulation, LocalSgd};

/// Gradients of several micro-steps, added before they are used: the first writes, later ones add,
/// the last one also divides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Accumulate {
    /// The number of micro-steps, and whether their mean or their sum is used.
    pub rule: GradientAccumulation,
}

/// One call that reduces a bucket over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Reduce {
    /// Index into the plan's buckets.
    pub bucket: usize,
    /// The part of the sum that each rank gets.
    pub result: Reduced,
}

/// The part that each rank gets of a bucket that is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduced {
    /// The whole sum: an all-reduce.
    Whole,
    /// The rank's part of the sum: a reduce-scatter.
    Part,
}

/// The update of tensors of one storage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Optimize {
    /// Index into the plan's storages.
    pub storage: usize,
    /// The bucket whose elements are updated; `None` for all elements of the tensors.
    pub bucket: Option<usize>,
    /// Whether tensors fit into one launch.
    pub size_class: SizeClass,
    /// Tensors of the storage (their positions in it) that this stage updates, in storage order.
    pub tensors: Vec<u32>,
    /// Elements of the storage that this rank updates: the bucket's, or this rank's part of the
    /// bucket.
    pub elements: Range<u64>,
    /// Batches of the update, one launch each.
    pub batches: Vec<Batch>,
}

/// The read of all gradients: their norm, the finite check and the factor that updates multiply
/// gradients with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// Reads of gradients: one for each storage, in order. With several ranks, one of this rank's
    /// part of each bucket.
    pub reads: Vec<GradientRead>,
}

impl Norm {
    /// Launches of the stage: the reads and the conclusion.
    pub fn launches(&self) -> usize {
        let reads = self.reads.iter().map(|read| read.batches.len());
        reads.sum::<usize>() + 1
    }

    /// Chunks of all reads: partial sums of the stage.
    pub fn chunks(&self) -> u64 {
        let batches = self.reads.iter().flat_map(|read| &read.batches);
        batches.map(|batch| u64::from(batch.chunks)).sum()
    }
}

/// The read of one storage's gradients, or of a part of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GradientRead {
    /// Index into the plan's storages.
    pub storage: usize,
    /// The bucket whose part is read; `None` for the whole storage.
    pub bucket: Option<usize>,
    /// Elements of the storage.
    pub elements: Range<u64>,
    /// Batches of the read, one launch each, in chunks of 65,536 elements whatever the limits.
    pub batches: Vec<Batch>,
}

/// Calls that bring each rank's part of the parameters to the other ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gather {
    /// Index into the plan's buckets.
    pub bucket: usize,
    /// Ranges that come by a broadcast of the rank that has them; empty for one all-gather of all
    /// parts.
    pub broadcasts: Vec<Broadcast>,
}

/// Parameters of one owner that one call brings to all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Broadcast {
    /// Rank of the shard group that has updated the parameters.
    pub owner: usize,
    /// Elements of the storage.
    pub elements: Range<u64>,
}

/// One entry of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stage {
    /// Add the gradients of micro-steps.
    Accumulate(Accumulate),
    /// Reduce a bucket over all ranks, as soon as it is ready where there are communication
    /// streams.
    Reduce(Reduce),
    /// Read all gradients and decide on the step.
    Norm(Norm),
    /// Take the sums over whole tensors that a layer-wise rule needs, each rank over its part.
    Trust,
    /// Apply the update rule.
    Optimize(Optimize),
    /// Reduce a bucket and apply the update rule in one pass: each rank its part, on the memory of
    /// all.
    ReduceUpdate(Optimize),
    /// Bring the parameters that other ranks have updated.
    Gather(Gather),
    /// Average parameters across ranks, now and then.
    Average(LocalSgd),
}

impl Stage {
    /// The bucket that the stage is about; `None` for one about whole storages.
    pub fn bucket(&self) -> Option<usize> {
        match self {
            Stage::Reduce(reduce) => Some(reduce.bucket),
            Stage::Gather(gather) => Some(gather.bucket),
            other => other.update().and_then(|update| update.bucket),
        }
    }

    /// The update that the stage makes; `None` for one that makes none.
    pub fn update(&self) -> Option<&Optimize> {
        match self {
            Stage::Optimize(update) | Stage::ReduceUpdate(update) => Some(update),
            _ => None,
        }
    }
}

/// Time at which a stage runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Every micro-step.
    MicroStep,
    /// Every step, as soon as the stage's gradients are given.
    Ready,
    /// Every step.
    Step,
    /// One step in so many.
    Every(u64),
}

/// The roles of a kernel's lists, as an error names them.
pub(crate) fn role_names(lists: &[TensorList]) -> String {
    let names: Vec<&str> = lists.iter().map(|list| list.role.name()).collect();
    names.join(", ")
}

//! Updates cut at buckets, and each rank's part of them.

use fusestep_tensor::Role;

use crate::plan::note::Verdict;
use crate::plan::settings::{Ownership, ZeroStage};
use crate::plan::stage::{Optimize, Stage};
use crate::plan::storage::{Extent, Part};
use crate::plan::value::Plan;

/// Says which part of every storage this rank updates, and how much of each list it has.
pub(crate) fn share_out(plan: &mut Plan) {
    let rank = plan.shard_place().rank;
    let reduces = plan.reduces();
    let of_storages = buckets_of_storages(plan);
    for (spec, own) in plan.storages.iter_mut().zip(of_storages) {
        let shared = plan.zero != ZeroStage::None && reduces && !spec.distributed;
        spec.shard = if shared {
            let part = |bucket: usize| plan.buckets[bucket].part(rank);
            let mut parts: Vec<_> = own.into_iter().map(part).collect();
            parts.retain(|part| part.start < part.end);
            parts.sort_by_key(|part| part.start);
            let mut at = 0;
            let place = |elements: std::ops::Range<u64>| {
                let part = Part { elements, at };
                at += part.elements.end - part.elements.start;
                part
            };
            parts.into_iter().map(place).collect()
        } else {
            vec![Part { elements: 0..spec.layout.total_numel(), at: 0 }]
        };
        let zero = if shared { plan.zero } else { ZeroStage::None };
        let segmented = reduces && !spec.distributed;
        let extent = |role: Role| match role {
            Role::Grad if zero >= ZeroStage::Two => Extent::Shard,
            Role::Grad if segmented => Extent::Segments,
            Role::Param if zero < ZeroStage::Three => Extent::Whole,
            Role::Grad => Extent::Whole,
            _ if zero == ZeroStage::None => Extent::Whole,
            _ => Extent::Shard,
        };
        spec.extents = spec.lists.iter().map(|list| extent(list.role)).collect();
    }
}

/// The buckets of every storage, found in one go: a naive plan has as many of both as tensors.
fn buckets_of_storages(plan: &Plan) -> Vec<Vec<usize>> {
    let mut found = vec![Vec::new(); plan.storages.len()];
    for (index, bucket) in plan.buckets.iter().enumerate() {
        found[bucket.storage].push(index);
    }
    found
}

/// An update reads gradients of one bucket, so that it can follow the bucket's reduction.
pub(crate) fn split_updates_by_bucket(plan: &mut Plan) {
    let rank = plan.shard_place().rank;
    let mut stages = Vec::with_capacity(plan.stages.len());
    let of_storages = buckets_of_storages(plan);
    for stage in std::mem::take(&mut plan.stages) {
        match stage {
            Stage::Optimize(optimize) if !plan.buckets.is_empty() => {
                let spec = &plan.storages[optimize.storage];
                if spec.distributed {
                    stages.push(Stage::Optimize(optimize));
                    continue;
                }
                let own = &of_storages[optimize.storage];
                stages.extend(by_bucket(plan, &optimize, own, rank).map(Stage::Optimize));
            }
            Stage::ReduceUpdate(mut optimize) => {
                if let Some(bucket) = optimize.bucket {
                    optimize.elements = plan.buckets[bucket].part(rank);
                }
                stages.push(Stage::ReduceUpdate(optimize));
            }
            other => stages.push(other),
        }
    }
    plan.stages = stages;
}

/// A stage's part in each bucket that has some of its tensors.
fn by_bucket<'a>(
    plan: &'a Plan,
    optimize: &'a Optimize,
    own: &'a [usize],
    rank: usize,
) -> impl Iterator<Item = Optimize> + 'a {
    let spec = &plan.storages[optimize.storage];
    own.iter().filter_map(move |&index| {
        let bucket = &plan.buckets[index];
        let first = |tensor: &u32| spec.layout.range(*tensor as usize);
        let from =
            optimize.tensors.partition_point(|tensor| first(tensor).end <= bucket.elements.start);
        let to =
            optimize.tensors.partition_point(|tensor| first(tensor).start < bucket.elements.end);
        let tensors: Vec<u32> = optimize.tensors.get(from..to)?.to_vec();
        let elements = match plan.zero {
            ZeroStage::None => bucket.elements.clone(),
            _ => bucket.part(rank),
        };
        (!tensors.is_empty()).then(|| Optimize {
            bucket: Some(index),
            tensors,
            elements,
            batches: Vec::new(),
            ..*optimize
        })
    })
}

pub(crate) fn explain_shards(plan: &mut Plan) {
    let shared = plan.zero != ZeroStage::None && plan.reduces();
    if shared && plan.update_norms && plan.ownership == Ownership::Elements {
        let reason =
            "parts end with chunks of 65,536 elements, so that one rank measures each chunk";
        plan.note("update_norms", Verdict::Split, reason);
    }
}

//! Calls that bring parameters from the ranks that own them.

use fusestep_tensor::counted;

use crate::plan::bucket::Bucket;
use crate::plan::note::Verdict;
use crate::plan::settings::Ownership;
use crate::plan::stage::{Broadcast, Stage};
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;

/// Replaces all-gathers of whole tensors by broadcasts, if pass `fuse_broadcast` asks for it.
pub(crate) fn place_broadcasts(plan: &mut Plan) {
    let Some(cap_bytes) = plan.broadcast_cap_bytes else {
        return;
    };
    if plan.ownership != Ownership::Tensors {
        return;
    }
    let (mut params, mut calls) = (0, 0);
    let (storages, buckets) = (&plan.storages, &plan.buckets);
    for stage in &mut plan.stages {
        let Stage::Gather(gather) = stage else {
            continue;
        };
        let bucket = &buckets[gather.bucket];
        let spec = &storages[bucket.storage];
        for owner in 0..bucket.bounds.len() - 1 {
            let (count, more) = broadcasts(spec, bucket, owner, cap_bytes);
            params += count;
            gather.broadcasts.extend(more);
        }
        calls += gather.broadcasts.len();
    }
    if calls > 0 {
        let reason = format!(
            "owners give all others {} in {}",
            counted(params as u64, "parameter"),
            counted(calls as u64, "call"),
        );
        plan.note("fuse_broadcast", Verdict::Applied, reason);
    }
}

/// Calls of at most `cap_bytes` that bring the tensors of an owner's part of a bucket, and how many
/// tensors these are.
fn broadcasts(
    spec: &StorageSpec,
    bucket: &Bucket,
    owner: usize,
    cap_bytes: u64,
) -> (usize, Vec<Broadcast>) {
    let part = bucket.part(owner);
    let width = spec.param_dtype().len_bytes() as u64;
    let mut calls: Vec<Broadcast> = Vec::new();
    let offsets = spec.layout.offsets();
    let first = offsets.partition_point(|&offset| offset < part.start);
    let mut count = 0;
    let tensors = first..spec.layout.tensors();
    for tensor in tensors.filter(|&tensor| spec.layout.numel(tensor) > 0) {
        let own = spec.layout.range(tensor);
        if own.start >= part.end {
            break;
        }
        count += 1;
        match calls.last_mut() {
            Some(call) if (own.end - call.elements.start) * width <= cap_bytes => {
                call.elements.end = own.end;
            }
            _ => calls.push(Broadcast { owner, elements: own }),
        }
    }
    (count, calls)
}

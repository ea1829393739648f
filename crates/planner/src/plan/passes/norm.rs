//! The stage that reads all gradients before the first update.

use fusestep_tensor::counted;

use crate::error::Result;
use crate::plan::batches;
use crate::plan::batches::LaunchCount;
use crate::plan::note::Verdict;
use crate::plan::stage::{GradientRead, Norm, Stage};
use crate::plan::text::bytes;
use crate::plan::value::Plan;

/// Adds the stage, once the passes have said where tensors lie.
pub(crate) fn place(plan: &mut Plan) -> Result<()> {
    if plan.gradients.rule().is_none() {
        return Ok(());
    }
    let rank = plan.shard_place().rank;
    let mut reads = Vec::new();
    let read =
        |storage, bucket, elements| GradientRead { storage, bucket, elements, batches: Vec::new() };
    // Of reduced gradients every rank reads its part, even where it has all of them.
    for (index, bucket) in plan.buckets.iter().enumerate() {
        reads.push(read(bucket.storage, Some(index), bucket.part(rank)));
    }
    for (storage, spec) in plan.storages.iter().enumerate() {
        if plan.buckets.is_empty() || spec.distributed {
            reads.push(read(storage, None, 0..spec.layout.total_numel()));
        }
    }
    let mut launches = LaunchCount::default();
    for read in &mut reads {
        read.batches = batches::of_read(plan, read, |_| true)?;
        launches.add(&read.batches, "amp_norm")?;
    }
    let norm = Norm { reads };
    let reason = format!(
        "{} of gradients are read once, in {}, before the first update",
        bytes(plan.gradient_bytes()),
        counted(norm.launches() as u64, "launch"),
    );
    plan.note("norm", Verdict::Applied, reason);
    plan.stages.insert(0, Stage::Norm(norm));
    Ok(())
}

//! The end of planning: buckets cut, updates shared out, and the order in which everything runs.

use crate::error::Result;
use crate::plan::note::{Note, Verdict};
use crate::plan::passes::broadcasts::place_broadcasts;
use crate::plan::passes::buckets::cut;
use crate::plan::passes::conflicts::check_conflicts;
use crate::plan::passes::share_out::{explain_shards, share_out, split_updates_by_bucket};
use crate::plan::passes::{norm, tables};
use crate::plan::settings::TableKind;
use crate::plan::stage::Stage;
use crate::plan::value::Plan;
use crate::plan::{batches, summary};

/// Completes a plan once all passes are through.
pub(crate) fn finish(plan: &mut Plan, table: TableKind) -> Result<()> {
    check_conflicts(plan)?;
    if !plan.reduces() {
        // Ranks that reduce nothing need no ranges of what is reduced.
        plan.segments.clear();
        plan.buckets.clear();
        let calls = |stage: &Stage| matches!(stage, Stage::Reduce(_) | Stage::Gather(_));
        plan.stages.retain(|stage| !calls(stage));
    }
    let grain = plan.grain()?;
    cut(&plan.storages, &mut plan.buckets, plan.shard_group, grain)?;
    share_out(plan);
    split_updates_by_bucket(plan);
    place_broadcasts(plan);
    norm::place(plan)?;
    if plan.reduces() && plan.has_normed()? {
        plan.stages.push(Stage::Trust);
    }
    put_in_order(plan);
    batches::make_anew(plan)?;
    tables::place(plan, table)?;
    explain_shards(plan);
    explain_fused(plan);
    plan.hash = summary::hash(plan);
    Ok(())
}

/// Puts stages in the order they run: an update follows its bucket's reduction, unless all
/// gradients have to be known first.
fn put_in_order(plan: &mut Plan) {
    let decides = |stage: &Stage| matches!(stage, Stage::Norm(_) | Stage::Trust);
    let waits = plan.stages.iter().any(decides);
    let after = |bucket: Option<usize>| bucket.map_or(usize::MAX, |bucket| bucket);
    let reduced_first = waits || plan.reduces_each();
    plan.stages.sort_by_key(|stage| match stage {
        Stage::Accumulate(_) => (0, 0, 0),
        Stage::Reduce(reduce) if reduced_first => (1, reduce.bucket, 0),
        Stage::Norm(_) => (2, 0, 0),
        Stage::Trust => (3, 0, 0),
        Stage::Reduce(reduce) => (4, reduce.bucket, 0),
        Stage::Optimize(optimize) | Stage::ReduceUpdate(optimize) => (4, after(optimize.bucket), 1),
        Stage::Gather(gather) => (4, gather.bucket, 2),
        Stage::Average(_) => (5, 0, 0),
    });
}

/// A pass that comes later may have said when buckets are updated.
fn explain_fused(plan: &mut Plan) {
    if plan.in_backward {
        return;
    }
    let notes = plan.notes.iter_mut();
    let applied = |note: &&mut Note| {
        note.pass == "fuse_reduce_into_update" && note.verdict == Verdict::Applied
    };
    if let Some(note) = notes.rev().find(applied) {
        note.reason += "; within the step, since a backward pass may read parameters until then";
    }
}

//! The passes that complete every plan: buckets cut, updates shared out, and the order in which
//! everything runs.

use crate::error::Result;
use crate::plan::note::{Note, Verdict};
use crate::plan::passes::broadcasts::place_broadcasts;
use crate::plan::passes::buckets::cut;
use crate::plan::passes::conflicts::check_conflicts;
use crate::plan::passes::fuse_all_reduce::FuseAllReduce;
use crate::plan::passes::pass::Pass;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::passes::share_out::{explain_shards, share_out, split_updates_by_bucket};
use crate::plan::passes::{lanes, norm, tables};
use crate::plan::settings::TableKind;
use crate::plan::stage::Stage;
use crate::plan::value::Plan;
use crate::plan::{batches, summary};

/// A pass that every plan goes through, behind those that were asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Completion {
    /// Passes that cannot both hold are refused.
    Conflicts,
    /// Ranks that reduce nothing need no ranges of what is reduced.
    Unreduced,
    /// Buckets end where ranks and tensors do.
    Buckets,
    /// Each rank has its part of every storage.
    Shares,
    /// An update reads the gradients of one bucket.
    Updates,
    /// Owners of whole tensors bring many to a broadcast.
    Broadcasts,
    /// Norms are read before what they decide.
    Norms,
    /// Sums of single tensors come before the updates that scale by them.
    Trust,
    /// Stages stand in the order in which they run.
    Order,
    /// Launches of what is left to each stage.
    Batches,
    /// Tables of tensors lie in arguments or stay on the device.
    Tables,
    /// Notes say what a later pass has decided.
    Notes,
}

/// All of them, in the order in which they apply.
const COMPLETION: [Completion; 12] = [
    Completion::Conflicts,
    Completion::Unreduced,
    Completion::Buckets,
    Completion::Shares,
    Completion::Updates,
    Completion::Broadcasts,
    Completion::Norms,
    Completion::Trust,
    Completion::Order,
    Completion::Batches,
    Completion::Tables,
    Completion::Notes,
];

impl Completion {
    fn rewrite(self, plan: &mut Plan, table: TableKind) -> Result<()> {
        match self {
            Self::Conflicts => check_conflicts(plan)?,
            Self::Unreduced => drop_unreduced(plan),
            Self::Buckets => {
                let grain = plan.grain()?;
                cut(&plan.storages, &mut plan.buckets, plan.shard_group, grain)?;
            }
            Self::Shares => share_out(plan),
            Self::Updates => split_updates_by_bucket(plan),
            Self::Broadcasts => place_broadcasts(plan),
            Self::Norms => norm::place(plan)?,
            Self::Trust => {
                if plan.reduces() && plan.has_normed()? {
                    plan.stages.push(Stage::Trust);
                }
            }
            Self::Order => put_in_order(plan),
            Self::Batches => batches::make_anew(plan)?,
            Self::Tables => tables::place(plan, table)?,
            Self::Notes => {
                lanes::explain(plan);
                explain_shards(plan);
                explain_fused(plan);
            }
        }
        Ok(())
    }
}

/// Rewrites a plan by the passes that were asked for, then by those that complete it.
///
/// # Errors
/// As [`Pass::rewrite`]; passes that cannot both hold.
pub(crate) fn rewrite<'p>(
    plan: &mut Plan,
    asked: impl Iterator<Item = &'p Pass>,
    table: TableKind,
) -> Result<()> {
    let mut asked: Vec<_> = asked.collect();
    asked.sort_by_key(|pass| pass.acts_on());
    for pass in asked {
        pass.rewrite(plan)?;
    }
    for pass in COMPLETION {
        pass.rewrite(plan, table)?;
    }
    plan.hash = summary::hash(plan);
    Ok(())
}

fn drop_unreduced(plan: &mut Plan) {
    if plan.reduces() {
        return;
    }
    let fused =
        |note: &&mut Note| note.pass == FuseAllReduce::NAME && note.verdict == Verdict::Applied;
    for note in plan.notes.iter_mut().filter(fused) {
        note.verdict = Verdict::Skipped;
        "ranks reduce no gradients".clone_into(&mut note.reason);
    }
    plan.segments.clear();
    plan.buckets.clear();
    let calls = |stage: &Stage| matches!(stage, Stage::Reduce(_) | Stage::Gather(_));
    plan.stages.retain(|stage| !calls(stage));
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

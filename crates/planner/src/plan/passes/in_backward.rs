//! Pass `update_in_backward`: a bucket whose gradients are ready is a bucket updated.

use fusestep_tensor::counted_are;

use crate::error::{PlanError, Result};
use crate::plan::note::Verdict;
use crate::plan::passes::fuse_all_reduce::FuseAllReduce;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::settings::{Tensors, ZeroStage};
use crate::plan::stage::{Optimize, Stage};
use crate::plan::topology::Reach;
use crate::plan::value::Plan;

/// The caller's promise that a backward pass reads no parameter of a bucket once all the bucket's
/// gradients are given.
///
/// The call that gives the last of them then reduces, updates and gathers the bucket at once.
/// [`crate::Run::step`] does what is left.
///
/// Of many ranks buckets are those of [`FuseAllReduce`], in whose order all ranks make their calls;
/// a bucket in which a rank lacks a gradient waits for that rank's step. On one rank, and where
/// ranks update on their own, updates are cut into ranges of so many bytes of gradients. Bits are
/// those of the plan without the pass.
///
/// Without communication streams the giving call reduces and updates. With them a stream reduces,
/// and the update follows on the caller's thread, in the first call that gives a gradient when the
/// reduction is through. Ranks wait for each other where a bucket is updated, so between a step's
/// first gradient and its end a program makes no other calls on that communicator.
///
/// What is set between the two, a learning rate or a rule, would reach some buckets and others
/// not, and is refused ([`PlanError::StepUnderWay`]). A gradient that is given twice is refused
/// ([`PlanError::GradientTwice`]) and changes nothing. A backward pass cannot be taken back: if it
/// fails half-way, end the step; or load a checkpoint, on all ranks behind the same gradient and
/// without communication streams, else ranks start anew. If a call or the device fails, some
/// buckets are updated and the state refuses further steps ([`PlanError::Poisoned`]).
///
/// # Errors
/// [`PlanError::Conflict`] for what needs all gradients before the first update: clipping, loss
/// scaling, LARS and LAMB on several ranks, norms of updates; for gradients that are reduced in
/// every micro-step; for ZeRO stage 3, where layers are gathered by calls that would come between;
/// for borrowed tensors.
/// # Cost
/// One small call for each bucket in place of one for all, by which ranks tell each other which
/// gradients there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateInBackward {
    cap_bytes: u64,
}

impl Default for UpdateInBackward {
    /// Ranges as long as the buckets of many ranks.
    fn default() -> Self {
        Self::of_bytes(FuseAllReduce::DEFAULT_CAP_BYTES)
    }
}

impl UpdateInBackward {
    /// Ranges of at most so many bytes of gradients where ranks reduce none; a longer tensor is one
    /// of its own.
    pub fn of_bytes(cap_bytes: u64) -> Self {
        Self { cap_bytes }
    }
}

impl Rewrite for UpdateInBackward {
    const NAME: &'static str = "update_in_backward";
    const ACTS_ON: ActsOn = ActsOn::Backward;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.in_backward)?;
        if let Some((first, why)) = conflict(plan)? {
            return Err(PlanError::Conflict {
                first: first.to_owned(),
                second: Self::NAME.to_owned(),
                why,
            });
        }
        plan.in_backward = true;
        let ranges = cut_by_readiness(plan, self.cap_bytes);
        let buckets = counted_are(plan.buckets.len() as u64, "bucket");
        let what = if !plan.reduces() {
            match ranges {
                1 => "1 update runs".to_owned(),
                _ => format!("{ranges} updates run"),
            }
        } else if plan.is_fused() {
            format!("{buckets} reduced and updated, in one pass,")
        } else {
            let gathered = match plan.zero {
                ZeroStage::None => "reduced and updated",
                _ => "reduced, updated and gathered",
            };
            format!("{buckets} {gathered}")
        };
        let streams = if plan.reduces() && plan.topology.reach == Reach::Calls {
            "; where a communication stream reduces them, once it is through"
        } else {
            ""
        };
        let reason = format!(
            "{what} as soon as their gradients are given{streams}: the caller says that their \
             parameters are no longer read then"
        );
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}

/// The setting of the plan that stands against the pass, and the reason.
fn conflict(plan: &Plan) -> Result<Option<(&'static str, &'static str)>> {
    let first = "do not go together, since the first would have to know all gradients before the \
                 second updates one bucket";
    Ok(if plan.tensors != Tensors::Kept {
        Some((
            "borrowed tensors",
            "do not go together, since the caller lends the gradients of a whole step at once",
        ))
    } else if plan.gradients.max_norm.is_some() {
        Some(("clip_by_global_norm", first))
    } else if plan.gradients.loss_scale.is_some() {
        Some(("loss_scaling", first))
    } else if plan.update_norms {
        Some((
            "update_norms",
            "do not go together, since the first adds up what the whole step has changed",
        ))
    } else if plan.reduces() && plan.has_normed()? {
        Some((
            "lars or lamb on several ranks",
            "do not go together, since ranks tell each other the norms of all tensors at once",
        ))
    } else if plan.reduces_each() {
        Some((
            "gradients reduced in every micro-step",
            "do not go together, since sums of micro-steps then lie in shards; reduce once per \
             update",
        ))
    } else if plan.zero == ZeroStage::Three && plan.reduces() {
        Some((
            "zero stage 3",
            "do not go together, since gathers of layers would come between the updates' calls; \
             use stage 2",
        ))
    } else {
        None
    })
}

/// Cuts updates that wait for no other rank into ranges of gradients that become ready together;
/// says how many there are.
fn cut_by_readiness(plan: &mut Plan, cap_bytes: u64) -> usize {
    let mut turn = vec![0usize; plan.params.len()];
    for (at, &param) in plan.ready.iter().enumerate() {
        turn[param as usize] = at;
    }
    let reduces = plan.reduces();
    let mut cut: Vec<(usize, Optimize)> = Vec::new();
    let mut stages = Vec::with_capacity(plan.stages.len());
    for stage in std::mem::take(&mut plan.stages) {
        match stage {
            Stage::Optimize(whole) if !reduces || plan.storages[whole.storage].distributed => {
                cut.extend(ranges(plan, whole, &turn, cap_bytes));
            }
            other => stages.push(other),
        }
    }
    cut.sort_by_key(|(last, _)| *last);
    let count = cut.len();
    stages.extend(cut.into_iter().map(|(_, part)| Stage::Optimize(part)));
    plan.stages = stages;
    count
}

/// Parts of an update, each with the turn in which its last gradient becomes ready.
fn ranges(plan: &Plan, whole: Optimize, turn: &[usize], cap_bytes: u64) -> Vec<(usize, Optimize)> {
    let spec = &plan.storages[whole.storage];
    let width = spec.grad_dtype().len_bytes() as u64;
    let turn_of = |tensor: u32| turn[spec.members[tensor as usize] as usize];
    let mut in_turn = whole.tensors.clone();
    in_turn.sort_by_key(|&tensor| turn_of(tensor));
    let mut parts: Vec<(usize, Optimize)> = Vec::new();
    let mut filled = 0;
    for tensor in in_turn {
        let len_bytes = spec.layout.numel(tensor as usize) * width;
        match parts.last_mut() {
            Some((last, part)) if filled + len_bytes <= cap_bytes => {
                part.tensors.push(tensor);
                (*last, filled) = (turn_of(tensor), filled + len_bytes);
            }
            _ => {
                let part = Optimize { tensors: vec![tensor], batches: Vec::new(), ..whole.clone() };
                parts.push((turn_of(tensor), part));
                filled = len_bytes;
            }
        }
    }
    for (_, part) in &mut parts {
        part.tensors.sort_unstable();
    }
    parts
}

//! What follows from the stages that passes have left: shards, batches and the order in which
//! everything runs.

use fusestep_tensor::{Role, counted};

use crate::bucket::cut;
use crate::passes::Ownership;
use crate::stage::{Broadcast, Extent, Part};
use crate::{
    Note, Optimize, Optimizer, Plan, PlanError, Result, Stage, StorageSpec, TableKind, Verdict,
    ZeroStage, batches, norm, summary, table,
};

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
    table::place(plan, table)?;
    explain_shards(plan);
    explain_fused(plan);
    plan.hash = summary::hash(plan);
    Ok(())
}

fn check_conflicts(plan: &Plan) -> Result<()> {
    let conflict = |first: &str, second: &str, why| {
        Err(PlanError::Conflict { first: first.to_owned(), second: second.to_owned(), why })
    };
    let local = plan.local_sgd().is_some();
    let zero = format!("zero stage {}", plan.zero.number());
    if plan.topology.world > 1 && plan.tensors.are_borrowed() {
        let why = "do not go together, since ranks reduce gradients where the state keeps them";
        return conflict("borrowed tensors", "more than one rank", why);
    }
    if plan.accumulation().is_some() && plan.tensors.are_borrowed() {
        let why = "do not go together, since micro-steps are added where the state keeps them";
        return conflict("borrowed tensors", "accumulate", why);
    }
    if plan.zero != ZeroStage::None && local {
        return conflict(&zero, "local_sgd", "both decide how gradients are reduced");
    }
    let average = |rule: &Optimizer| matches!(rule, Optimizer::ScheduleFree(_));
    if plan.schedule.is_some() && plan.rules.iter().any(average) {
        let why = "do not go together, since its average takes the place of a schedule";
        return conflict("schedule-free", "a learning-rate schedule", why);
    }
    let distributed = plan.storages.iter().any(|spec| spec.distributed);
    if distributed && local && plan.gradients.rule().is_some() {
        let why = "leave no gradients of which ranks could form one norm";
        return conflict("distributed", "local_sgd with clipping or loss scaling", why);
    }
    if distributed && local && plan.has_normed()? {
        let why = "do not go together, since a trust ratio takes the norm of all slices at \
                   every step";
        return conflict("distributed with lars or lamb", "local_sgd", why);
    }
    Ok(())
}

/// Says which part of every storage this rank updates, and how much of each list it has.
fn share_out(plan: &mut Plan) {
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
fn split_updates_by_bucket(plan: &mut Plan) {
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

/// Replaces all-gathers of whole tensors by broadcasts, if pass `fuse_broadcast` asks for it.
fn place_broadcasts(plan: &mut Plan) {
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
            let (count, more) = broadcasts(spec, bucket.part(owner), (owner, cap_bytes));
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

fn explain_shards(plan: &mut Plan) {
    let shared = plan.zero != ZeroStage::None && plan.reduces();
    if shared && plan.update_norms && plan.ownership == Ownership::Elements {
        let reason =
            "parts end with chunks of 65536 elements, so that one rank measures each chunk";
        plan.note("update_norms", Verdict::Split, reason);
    }
}

/// Calls of at most `cap_bytes` that bring the tensors of a part from their owner, and how many
/// tensors these are.
fn broadcasts(
    spec: &StorageSpec,
    part: std::ops::Range<u64>,
    (owner, cap_bytes): (usize, u64),
) -> (usize, Vec<Broadcast>) {
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

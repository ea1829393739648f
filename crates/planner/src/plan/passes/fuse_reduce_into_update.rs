//! Pass `fuse_reduce_into_update`: a bucket is reduced and updated in one pass over memory.

use fusestep_collective::ReduceUpdate;
use fusestep_launch::Stride;
use fusestep_tensor::{Role, UNIT_ELEMENTS, counted_are};

use crate::error::Result;
use crate::plan::bucket::Bucket;
use crate::plan::group::SizeClass;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::settings::ZeroStage;
use crate::plan::stage::{Optimize, Stage};
use crate::plan::storage::StorageSpec;
use crate::plan::topology::Reach;
use crate::plan::value::Plan;

/// Lets the rank that owns a part of a bucket sum it over all ranks in rank order and update it at
/// once, while it is in the nearest cache, and write the new parameters where every rank reads
/// them. The reduced gradient is never written.
///
/// It is for ranks that see each other's memory and for steps in which nothing has to be known of
/// all gradients first. Parameters change in the step, and during a backward pass only with
/// [`crate::UpdateInBackward`]; communication streams have nothing to hide then.
///
/// # Cost
/// At 2 ranks and ZeRO stage 1, AdamW in f32: 36 bytes an element where reducing, updating and
/// gathering apart take 48. At stage 0 the owner writes its state to every rank, too: 44 where
/// apart takes 72. At `W` ranks it saves `2·g + (W − 1)·p` bytes at stage 1 and
/// `2·W·g + (W − 1)·(p + s)` at stage 0, for `g`, `p` and `s` bytes of an element's gradient,
/// parameter and state: it is never the dearer one, so nothing is chosen by price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuseReduceIntoUpdate;

impl Rewrite for FuseReduceIntoUpdate {
    const NAME: &'static str = "fuse_reduce_into_update";
    const ACTS_ON: ActsOn = ActsOn::Fusion;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.is_fused())?;
        if let Some(reason) = refusal(plan)? {
            plan.note(Self::NAME, Verdict::Refused, reason);
            return Ok(());
        }
        let separate = bytes_of_element(plan);
        let reduced: Vec<usize> = plan
            .stages
            .iter()
            .filter_map(|stage| match stage {
                Stage::Reduce(reduce) => Some(reduce.bucket),
                _ => None,
            })
            .collect();
        let fused = reduced.iter().map(|&bucket| update_of(plan, bucket));
        let mut fused: Vec<Stage> = fused.map(Stage::ReduceUpdate).collect();
        let storages = &plan.storages;
        plan.stages.retain(|stage| match stage {
            Stage::Reduce(_) | Stage::Gather(_) => false,
            Stage::Optimize(optimize) => storages[optimize.storage].distributed,
            _ => true,
        });
        plan.stages.append(&mut fused);
        let reason = format!(
            "{} reduced and updated in one pass: {} bytes an element for all ranks \
             together, apart {}",
            counted_are(reduced.len() as u64, "bucket"),
            bytes_of_element(plan),
            separate,
        );
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}

/// Whether one call shows other ranks all lists of a storage and all sums of lanes.
fn shows_all(plan: &Plan, spec: &StorageSpec) -> bool {
    // What ranks share out is not there yet.
    let lists = match plan.zero {
        ZeroStage::None => spec.lists.iter().filter(|list| list.role != Role::Grad).count(),
        _ => 1,
    };
    lists + plan.sums_of_lanes().saturating_sub(1) <= ReduceUpdate::MAX_REPLICAS
}

/// The update of all tensors that a bucket has elements of.
fn update_of(plan: &Plan, bucket: usize) -> Optimize {
    let Bucket { storage, elements, segment, .. } = &plan.buckets[bucket];
    let layout = &plan.storages[*storage].layout;
    let tensors = plan.segments[*segment].tensors.clone();
    let full = |tensor: &u32| layout.numel(*tensor as usize) > 0;
    Optimize {
        storage: *storage,
        bucket: Some(bucket),
        size_class: SizeClass::Large,
        tensors: tensors.filter(full).collect(),
        elements: elements.clone(),
        batches: Vec::new(),
    }
}

fn refusal(plan: &Plan) -> Result<Option<&'static str>> {
    let world = plan.topology.world;
    Ok(if world == 1 {
        Some("a world of 1 rank has nothing to reduce")
    } else if plan.averaging().is_some() {
        Some("ranks update on their own and reduce no gradients")
    } else if plan.topology.reach != Reach::SharedMemory {
        Some("ranks do not see each other's memory, so gradients are sent to be reduced")
    } else if plan.zero > ZeroStage::One {
        Some("gradients leave their buckets as soon as they are reduced, before the update")
    } else if plan.gradients.rule().is_some() {
        Some("the norm of all gradients has to be known before the first update")
    } else if plan.has_normed()? {
        Some("the rule needs sums over whole tensors before it updates them")
    } else if plan.update_norms {
        Some("updates are measured, by chunks that one rank updates")
    } else if plan.reduces_each() {
        Some("gradients are reduced in micro-steps that update nothing")
    } else if !plan.storages.iter().all(|spec| shows_all(plan, spec)) {
        Some("sums of lanes are too many to be shown to other ranks beside parameters and state")
    } else if plan.wire.is_some() {
        Some("gradients travel in another type than that of their sums")
    } else if plan.shard_group != world {
        Some("sums are formed within shard groups first")
    } else {
        None
    })
}

/// Bytes that all ranks together read and write for each element of the first storage, in a step
/// without further stages.
pub(crate) fn bytes_of_element(plan: &Plan) -> u64 {
    let Some(spec) = plan.storages.iter().find(|spec| !spec.distributed) else {
        return 0;
    };
    let world = plan.topology.world as u64;
    // Bytes of as many elements as share a unit, so that all are whole numbers.
    let (grad, param) = (
        Stride::of(Role::Grad, spec.grad_dtype()).bytes(UNIT_ELEMENTS),
        Stride::of(Role::Param, spec.param_dtype()).bytes(UNIT_ELEMENTS),
    );
    let state = spec.lists.iter().filter(|list| list.role.is_state());
    let state: u64 = state.map(|list| list.stride().bytes(UNIT_ELEMENTS)).sum();
    // A rank's gather of its part: read once, written by every other rank.
    let gather = |width: u64| (world - 1) * 2 * width;
    let update = grad + 2 * (param + state);
    let sums = plan.lanes.filter(|_| plan.exchanges_lanes());
    let sums = sums.map_or(world, |lanes| lanes.contributions(world as usize).len() as u64);
    let all = match (plan.is_fused(), plan.zero) {
        (true, ZeroStage::None) => sums * grad + (1 + world) * (param + state),
        (true, _) => sums * grad + 2 * state + param + world * param,
        _ if world == 1 => update,
        (false, ZeroStage::None) => (sums + world) * grad + world * update,
        // Of the sum only the owner's part is written.
        (false, ZeroStage::Three) => sums * grad + grad + update,
        (false, _) => sums * grad + grad + update + gather(param),
    };
    all.div_ceil(UNIT_ELEMENTS)
}

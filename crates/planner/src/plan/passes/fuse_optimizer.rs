//! Pass `fuse_optimizer`: the updates of many tensors in one launch.

use std::collections::BTreeMap;

use fusestep_launch::Batch;
use fusestep_tensor::counted;

use crate::error::Result;
use crate::plan::batches;
use crate::plan::group::SizeClass;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::stage::Stage;
use crate::plan::value::Plan;

/// Puts the updates of all tensors of one storage and size class into as few launches as the limits
/// allow.
///
/// The group key is the dtype tuple, the kernel (both one per storage) and the size class.
/// Hyper-parameters never split a launch.
#[derive(Clone, Copy, Debug)]
pub struct FuseOptimizer;

impl Rewrite for FuseOptimizer {
    const NAME: &'static str = "fuse_optimizer";

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        let before = plan.launches();
        let updates = plan.optimize_stages().count();
        if updates < 2 {
            let reason = format!("{updates} update has nothing to be fused with");
            plan.note(Self::NAME, Verdict::Refused, reason);
            return Ok(());
        }
        if plan.storages.len() == plan.params.len() && plan.storages.len() > groups(plan) {
            let reason = format!(
                "{} tensors lie in storages of their own; put pass coalesce_gradients before this \
                 one",
                plan.storages.len()
            );
            plan.note(Self::NAME, Verdict::Refused, reason);
            return Ok(());
        }
        let mut groups: BTreeMap<(usize, SizeClass), Vec<u32>> = BTreeMap::new();
        for stage in plan.optimize_stages() {
            let group = groups.entry((stage.storage, stage.size_class)).or_default();
            group.extend_from_slice(&stage.tensors);
        }
        let mut stages = Vec::with_capacity(groups.len());
        for ((storage, size_class), mut tensors) in groups {
            tensors.sort_unstable();
            stages.push(batches::update_stage(plan, storage, size_class, tensors)?);
        }
        plan.stages.retain(|stage| !matches!(stage, Stage::Optimize(_)));
        plan.stages.extend(stages.into_iter().map(Stage::Optimize));
        self.explain(plan, before);
        Ok(())
    }
}

impl FuseOptimizer {
    fn explain(&self, plan: &mut Plan, before: usize) {
        let mut split = Vec::new();
        if plan.storages.len() > 1 {
            let kernels: Vec<&str> = plan.storages.iter().map(|s| s.kernel).collect();
            let kernels = kernels.join(", ");
            split.push(format!("a launch has one kernel and dtype, so {kernels} run apart"));
        }
        let limits = plan.limits;
        for stage in plan.optimize_stages() {
            if stage.size_class == SizeClass::Large {
                split.push(format!(
                    "several launches for {} of more than {} of {}",
                    counted(stage.tensors.len() as u64, "tensor"),
                    counted(limits.chunks_per_launch.into(), "chunk"),
                    counted(limits.chunk_elements.into(), "element"),
                ));
            } else if stage.batches.len() > 1 {
                let full = |batch: &Batch| batch.chunks == limits.chunks_per_launch;
                let most = stage.batches.iter().map(|b| b.records.len()).max().unwrap_or(0);
                let why = if stage.batches.iter().any(full) {
                    format!("one takes {} chunks", limits.chunks_per_launch)
                } else {
                    let bytes = counted(limits.argument_bytes as u64, "argument byte");
                    format!("{bytes} carry {most} of them")
                };
                let (tensors, launches) = (stage.tensors.len(), stage.batches.len());
                split.push(format!("{tensors} tensors need {launches} launches: {why}"));
            }
        }
        let became = format!("{before} launches became {}", plan.launches());
        plan.note(Self::NAME, Verdict::Applied, became);
        for reason in split {
            plan.note(Self::NAME, Verdict::Split, reason);
        }
        if plan.groups.groups.len() > 1 {
            let groups = plan.groups.groups.len();
            let reason =
                format!("{groups} groups of parameters share launches by a per-tensor index");
            plan.note(Self::NAME, Verdict::Applied, reason);
        }
    }
}

/// Groups of parameters that can lie together.
fn groups(plan: &Plan) -> usize {
    let mut keys: Vec<_> = (0..plan.params.len()).map(|param| plan.storage_key(param)).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.len()
}

//! Pass `coalesce_gradients`: gradients, and with them all tensors of their parameters, into one
//! buffer per role and dtype.

use std::collections::BTreeMap;

use fusestep_tensor::{DType, counted, grouped};

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::buckets;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::rule::Optimizer;
use crate::plan::stage::{Optimize, Stage};
use crate::plan::storage::{StorageKey, StorageSpec};
use crate::plan::value::Plan;

/// Puts the tensors of all parameters of one dtype into common buffers, in plan order.
///
/// Every list gets the same element offsets, so a place in the gradients' buffer is the same place
/// in the moments', and a collective or a kernel can take a range of it.
#[derive(Clone, Copy, Debug)]
pub struct CoalesceGradients;

impl Rewrite for CoalesceGradients {
    const NAME: &'static str = "coalesce_gradients";

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        if plan.storages.len() < 2 {
            let reason =
                format!("{} storage has nothing to be put together with", plan.storages.len());
            plan.note(Self::NAME, Verdict::Refused, reason);
            return Ok(());
        }
        let mut groups: BTreeMap<StorageKey, Vec<u32>> = BTreeMap::new();
        for storage in &plan.storages {
            for &member in &storage.members {
                groups.entry(plan.storage_key(member as usize)).or_default().push(member);
            }
        }
        let mut dtypes: Vec<&str> = groups.keys().map(|key| key.dtype.name()).collect();
        dtypes.dedup();
        let mut rules: Vec<(DType, u32)> = groups.keys().map(|key| (key.dtype, key.rule)).collect();
        rules.dedup();
        if rules.len() > dtypes.len() {
            let rules: Vec<String> = plan.rules.iter().map(Optimizer::to_string).collect();
            let reason =
                format!("a launch has one rule, so parameters of {} lie apart", rules.join("; "));
            plan.note(Self::NAME, Verdict::Split, reason);
        }
        if dtypes.len() > 1 {
            let reason = format!("a buffer holds one dtype, so {} lie apart", dtypes.join(", "));
            plan.note(Self::NAME, Verdict::Split, reason);
        }
        let mut storages = Vec::with_capacity(groups.len());
        for (StorageKey { rule, .. }, mut members) in groups {
            members.sort_unstable();
            let kernel = plan.kernel_of(members[0])?;
            let lists = Plan::kept_lists(plan.tensors, kernel.as_ref());
            let spec = StorageSpec::of(&plan.params, kernel.entry(), rule, members, lists)?;
            storages.push(spec);
        }
        let before = std::mem::replace(&mut plan.storages, storages);
        plan.index_places();
        let stages = moved_stages(plan, &before);
        plan.stages.retain(|stage| !matches!(stage, Stage::Optimize(_)));
        plan.stages.extend(stages);
        buckets::make(plan)?;
        let padded: u64 = plan.storages.iter().map(|s| s.layout.total_numel()).sum();
        let elements = plan.elements();
        let reason = format!(
            "tensors of {} lie in {} ({} of {} are padding of 256-byte slots)",
            counted(before.len() as u64, "storage"),
            plan.storages.len(),
            grouped(padded - elements),
            counted(padded, "element"),
        );
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}

/// Points each stage to its tensors' new places.
fn moved_stages(plan: &Plan, before: &[StorageSpec]) -> Vec<Stage> {
    let moved = plan.optimize_stages().flat_map(|stage| {
        let members = &before[stage.storage].members;
        let places = stage.tensors.iter().map(|&t| plan.places[members[t as usize] as usize]);
        // Naive stages hold one tensor each; their batches keep their shape and only the tensor's
        // number changes.
        places.map(|(storage, tensor)| {
            let tensor = tensor as u32;
            let mut batches = stage.batches.clone();
            for record in batches.iter_mut().flat_map(|batch| &mut batch.records) {
                record.tensor = tensor;
            }
            Stage::Optimize(Optimize {
                storage,
                bucket: None,
                size_class: stage.size_class,
                tensors: vec![tensor],
                elements: 0..plan.storages[storage].layout.total_numel(),
                batches,
            })
        })
    });
    moved.collect()
}

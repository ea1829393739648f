//! Tensors that a plan's checkpoint has.

use std::collections::BTreeMap;

use fusestep_tensor::{DType, Role};

use super::manifest::TensorSpec;
use super::progress::{self, OpenRun};
use crate::{Plan, Result};

/// A tensor's name in a checkpoint, which ends in the rank if each rank has values of its own.
pub(super) fn key(plan: &Plan, param: usize, role: Role, rank: usize) -> String {
    let name = &plan.params()[param].name;
    if plan.has_own(param) {
        format!("{name}@{}#{rank}", role.name())
    } else {
        format!("{name}@{}", role.name())
    }
}

/// Lists that are saved, as role and dtype: all but the gradient's, the parameter's first.
pub(super) fn saved_lists(plan: &Plan, param: usize) -> Result<Vec<(Role, DType)>> {
    let kernel = plan.kernel_of(param as u32)?;
    let mut lists: Vec<_> = kernel.lists().iter().map(|list| (list.role, list.dtype)).collect();
    lists.retain(|(role, _)| role.is_state() || *role == Role::Param);
    lists.sort_by_key(|(role, _)| *role != Role::Param);
    Ok(lists)
}

/// All tensors of a checkpoint, by name.
pub(super) fn tensors_of_checkpoint(
    plan: &Plan,
    open: Option<&OpenRun>,
) -> Result<BTreeMap<String, TensorSpec>> {
    let mut tensors = BTreeMap::new();
    if let Some(open) = open {
        tensors.extend(progress::open_tensors(plan, open)?);
    }
    for param in 0..plan.params().len() {
        for (role, dtype) in saved_lists(plan, param)? {
            let ranks = match (plan.has_own(param), open) {
                (false, _) => 0..1,
                (true, Some(open)) => 0..open.ranks,
                (true, None) => 0..plan.topology().world,
            };
            for rank in ranks {
                let spec = TensorSpec { dtype, shape: plan.shape_on(rank, param).clone() };
                tensors.insert(key(plan, param, role, rank), spec);
            }
        }
    }
    Ok(tensors)
}

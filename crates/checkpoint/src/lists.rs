//! Tensors that a run's checkpoint has, and their names.

use std::collections::BTreeMap;

use fusestep_planner::{List, RunImage};
use fusestep_tensor::Role;

use crate::Result;
use crate::manifest::TensorSpec;
use crate::open_run::OpenRun;
use crate::own_values;

/// Name of a part's tensor in a checkpoint of rank `rank`.
pub(crate) fn key_of(image: &RunImage, param: usize, list: List, rank: usize) -> String {
    match list {
        List::Role(role) => key(image, param, role, rank),
        List::Sums => own_values::window_key(image, param, rank),
        List::Lanes(part) => match &image.counts.lanes {
            Some(lanes) => own_values::lanes_key(image, param, lanes, part),
            None => String::new(),
        },
    }
}

/// A tensor's name in a checkpoint, which ends in the rank if each rank has values of its own.
pub(crate) fn key(image: &RunImage, param: usize, role: Role, rank: usize) -> String {
    let param = &image.params[param];
    if param.own {
        format!("{}@{}#{rank}", param.name, role.name())
    } else {
        format!("{}@{}", param.name, role.name())
    }
}

/// All tensors of a checkpoint, by name.
pub(crate) fn tensors_of_checkpoint(
    image: &RunImage,
    open: Option<&OpenRun>,
) -> Result<BTreeMap<String, TensorSpec>> {
    let mut tensors = BTreeMap::new();
    if let Some(open) = open {
        tensors.extend(own_values::open_tensors(image, open)?);
    }
    for (param, desc) in image.params.iter().enumerate() {
        for list in &desc.lists {
            let ranks = match (desc.own, open) {
                (false, _) => 0..1,
                (true, Some(open)) => 0..open.ranks,
                (true, None) => 0..image.topology.world,
            };
            for rank in ranks {
                let shape = list.shape(image.shape_on(rank, param));
                let spec = TensorSpec { dtype: list.dtype, shape };
                tensors.insert(key(image, param, list.role, rank), spec);
            }
        }
    }
    Ok(tensors)
}

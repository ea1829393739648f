//! Batches of a plan's stages; a batch is the tensors and chunks of one launch.

use std::ops::Range;

use fusestep_amp::norm_kernel;
use fusestep_launch::{
    Batch, Batchable, LaunchError, LaunchLimits, MAX_LAUNCHES, MultiTensorReduction, batches,
};
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::group::{ParameterGroups, SizeClass};
use crate::plan::stage::{GradientRead, Optimize, Stage};
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;

/// A stage over whole tensors of a storage, with its batches.
pub(crate) fn update_stage(
    plan: &Plan,
    storage: usize,
    size_class: SizeClass,
    tensors: Vec<u32>,
) -> Result<Optimize> {
    let mut optimize = Optimize {
        storage,
        bucket: None,
        size_class,
        tensors,
        elements: 0..plan.storages[storage].layout.total_numel(),
        batches: Vec::new(),
    };
    optimize.batches = of_update(plan, &optimize, |_| true, &plan.groups)?;
    Ok(optimize)
}

/// The batches of a stage's tensors that take part, within the stage's elements.
pub(crate) fn of_update(
    plan: &Plan,
    stage: &Optimize,
    takes_part: impl Fn(usize) -> bool,
    groups: &ParameterGroups,
) -> Result<Vec<Batch>> {
    let spec = &plan.storages[stage.storage];
    let Some(&member) = spec.members.first() else {
        return Ok(Vec::new());
    };
    let kernel = plan.kernel_of(member)?;
    let members = &spec.members;
    let present = |tensor: &&u32| takes_part(members[**tensor as usize] as usize);
    let batchable = stage.tensors.iter().filter(present).map(|&tensor| {
        let group = groups.of_param[members[tensor as usize] as usize];
        within(spec, tensor, &stage.elements, group)
    });
    let layout = kernel.argument_layout();
    let limits = plan.batch_limits(plan.limits_of(kernel.as_ref()));
    Ok(batches(kernel.entry(), batchable, layout, limits)?)
}

/// The batches of a read, of those parameters that take part.
pub(crate) fn of_read(
    plan: &Plan,
    read: &GradientRead,
    takes_part: impl Fn(usize) -> bool,
) -> Result<Vec<Batch>> {
    let spec = &plan.storages[read.storage];
    let Some(kernel) = reader_of(plan, read.storage)? else {
        return Ok(Vec::new());
    };
    let members = spec.members.iter().enumerate();
    let tensors = members.filter(|&(_, &member)| takes_part(member as usize));
    let batchable = tensors.map(|(tensor, _)| within(spec, tensor as u32, &read.elements, 0));
    let limits =
        plan.batch_limits(LaunchLimits { chunk_elements: kernel.chunk_elements(), ..plan.limits });
    let layout = kernel.argument_layout();
    Ok(batches(kernel.entry(), batchable, layout, limits)?)
}

/// Makes all batches, for the stages and tables as they are.
pub(crate) fn make_anew(plan: &mut Plan) -> Result<()> {
    let mut stages = std::mem::take(&mut plan.stages);
    for stage in &mut stages {
        match stage {
            Stage::Norm(norm) => {
                for read in &mut norm.reads {
                    read.batches = of_read(plan, read, |_| true)?;
                }
            }
            Stage::Optimize(stage) | Stage::ReduceUpdate(stage) => {
                stage.batches = of_update(plan, stage, |_| true, &plan.groups)?;
            }
            _ => {}
        }
    }
    plan.stages = stages;
    Ok(())
}

/// The kernel that reads a storage's gradients; `None` for a storage without tensors.
pub(crate) fn reader_of(
    plan: &Plan,
    storage: usize,
) -> Result<Option<Box<dyn MultiTensorReduction>>> {
    let Some(&first) = plan.storages[storage].members.first() else {
        return Ok(None);
    };
    // Borrowed gradients are in no list of the storage, but in the kernel's they are.
    let kernel = plan.kernel_of(first)?;
    let grads = kernel.lists().iter().find(|list| list.role == Role::Grad);
    let dtype = grads.map_or(plan.params[first as usize].dtype, |list| list.dtype);
    Ok(Some(norm_kernel(dtype)?))
}

/// The range of a tensor that lies in some elements of its storage.
pub(crate) fn within(
    spec: &StorageSpec,
    tensor: u32,
    elements: &Range<u64>,
    group: u32,
) -> Batchable {
    let own = spec.layout.range(tensor as usize);
    let start = own.start.max(elements.start).min(own.end);
    let end = own.end.min(elements.end).max(start);
    Batchable { tensor, first_element: start - own.start, numel: end - start, group }
}

/// Launches of a plan's stages behind the first of each: a stage is bounded by itself, but there
/// may be one for every tensor.
#[derive(Debug, Default)]
pub(crate) struct LaunchCount(usize);

impl LaunchCount {
    /// Adds the launches of one more stage.
    ///
    /// # Errors
    /// [`LaunchError::TooMany`] beyond [`MAX_LAUNCHES`] of all stages together.
    pub(crate) fn add(&mut self, batches: &[Batch], kernel: &str) -> Result<()> {
        self.0 += batches.len().saturating_sub(1);
        if self.0 < MAX_LAUNCHES {
            return Ok(());
        }
        Err(PlanError::Launch(LaunchError::TooMany {
            kernel: kernel.to_owned(),
            expected: MAX_LAUNCHES,
        }))
    }
}

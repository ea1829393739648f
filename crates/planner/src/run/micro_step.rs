//! Step of a rank: micro-steps, the update that ends them, and agreement between ranks.

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_launch::{Accumulate, Buffer};
use fusestep_tensor::Role;

use crate::error::Result;
use crate::plan::segments::{keeps_segments, sum_width};
use crate::plan::storage::{Extent, Part};
use crate::run::executor::Executor;
use crate::run::memory::absorb::{Absorb, Addend, Divisor, absorb};
use crate::run::memory::device;
use crate::run::memory::segment_state::SegmentState;
use crate::run::rank_step::RankStep;
use crate::run::report::{MicroStepReport, StepReport};
use crate::run::stages::{average, give, reduce};
use crate::run::step;
use crate::run::units::update_rest;

pub(crate) fn end_micro_step(step: &mut RankStep<'_, '_>, weight: f64) -> Result<()> {
    step.comms.set_plan(step.plan.hash());
    if step.plan.reduces_each() {
        let given_weight = step.state.arena.weight;
        give::complete(step.plan, step.state, step.backend, Divisor(1.0))?;
        reduce_and_add(step, given_weight)?;
    } else {
        give::add_views(step.plan, step.state, step.backend)?;
    }
    let arena = &mut step.state.arena;
    arena.micro_steps += 1;
    arena.weights += weight;
    arena.forget_given();
    arena.ready.again();
    Ok(())
}

/// Reduces the gradients of one micro-step and adds them to the sums of all.
fn reduce_and_add(step: &mut RankStep<'_, '_>, weight: Option<f64>) -> Result<()> {
    if step.plan.reduces() {
        reduce::reduce_all(step)?;
    }
    let how = Absorb { first: step.state.arena.micro_steps == 0, weight, last: None };
    each_reduced(step, how)?;
    let mut bytes = step.state.arena.weights_hash.to_le_bytes().to_vec();
    bytes.extend(weight.unwrap_or(1.0).to_le_bytes());
    step.state.arena.weights_hash = xxhash_rust::xxh3::xxh3_64(&bytes);
    if step.plan.reduces() {
        let peak = step.state.arena.settle(keeps_segments(step.plan));
        step.state.arena.seen_peak(peak);
    }
    Ok(())
}

/// Adds the reduced gradients of this rank's shard to their sums, or puts what the sums come to
/// in their place.
fn each_reduced(step: &mut RankStep<'_, '_>, how: Absorb) -> Result<()> {
    let backend = step.backend;
    for (storage, spec) in step.plan.storages.iter().enumerate() {
        let dtype = spec.grad_dtype();
        let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
        let Some(mut sums) = step.state.arena.reduced_sums[storage].take() else {
            continue;
        };
        for part in &spec.shard {
            let numel = (part.elements.end - part.elements.start) as usize;
            let at = part.at as usize * sum_width;
            let Some(all) = sums.host_mut() else {
                add_on_device(step, storage, part, sums.as_mut(), at, how)?;
                continue;
            };
            let sums = &mut all[at..at + numel * sum_width];
            // Aligned for elements of any type, also where it is empty.
            let mut own = HostMemory::zeroed(numel * width)?;
            let own = own.bytes_mut();
            if how.last.is_some() {
                absorb(dtype, own, Some(sums), None, how);
                each_buffer(step, storage, part, |buffer, at, range| {
                    Ok(backend.write(buffer, at, &own[range])?)
                })?;
            } else {
                each_buffer(step, storage, part, |buffer, at, range| {
                    Ok(backend.read(buffer, at, &mut own[range])?)
                })?;
                absorb(dtype, &mut [], Some(sums), Some(own), how);
            }
            step.state.arena.copied_bytes += own.len() as u64;
        }
        step.state.arena.reduced_sums[storage] = Some(sums);
    }
    Ok(())
}

pub(crate) fn update(
    step: &mut RankStep<'_, '_>,
    divisor: Divisor,
    pending: Pending,
) -> Result<MicroStepReport> {
    step.comms.set_plan(step.plan.hash());
    if step.plan.reduces_each() {
        if pending == Pending::MicroStep {
            let weight = step.state.arena.weight;
            give::complete(step.plan, step.state, step.backend, Divisor(1.0))?;
            reduce_and_add(step, weight)?;
        }
    } else {
        give::complete(step.plan, step.state, step.backend, divisor)?;
        if give::reduces_when_full(step.plan, step.comms) {
            // Ranks that have given everything are in these calls already.
            reduce::reduce_all(step)?;
        }
    }
    let report =
        if step.plan.in_backward { update_rest(step)? } else { update_all(step, divisor)? };
    let averaged = average::average_if_due(step)?;
    step.comms.finish_on_device()?;
    let peak = step.state.arena.settle(keeps_segments(step.plan));
    step.state.arena.seen_peak(peak);
    let micro_steps = step.state.arena.micro_steps + u32::from(pending == Pending::MicroStep);
    step.state.arena.clear();
    Ok(MicroStepReport {
        update: Some(report),
        dropped_micro_steps: if report.skipped { micro_steps } else { 0 },
        averaged,
        exposed_ns: std::mem::take(&mut step.state.arena.exposed_ns),
        segment_peak_bytes: std::mem::take(&mut step.state.arena.seen_peak_bytes),
        gradient_bytes_copied: std::mem::take(&mut step.state.arena.copied_bytes),
    })
}

fn update_all(step: &mut RankStep<'_, '_>, divisor: Divisor) -> Result<StepReport> {
    let given = reduce::agree_on_given(step)?;
    if step.plan.reduces_each() {
        let how = Absorb { first: false, weight: None, last: Some(divisor) };
        each_reduced(step, how)?;
    }
    for (param, _) in given.iter().enumerate().filter(|(_, given)| **given == 0) {
        step.state.set_without_gradient_at(param);
    }
    let mut executor = Executor::Backend(step.backend);
    let comms_of_stages = (step.plan.topology.world > 1).then_some(&mut *step.comms);
    let report = step::run_update(step.plan, step.state, &mut executor, comms_of_stages)?;
    Ok(StepReport {
        without_gradient: given.iter().filter(|&&given| given == 0).count() as u64,
        ..report
    })
}

/// Gradients that have not been added yet when an update begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pending {
    /// The gradients of the last micro-step.
    MicroStep,
    /// Nothing: the update follows a micro-step that has ended.
    Nothing,
}

/// Adds the reduced gradients of a part of this rank's shard to sums on a device that begin at a
/// byte, or puts what these come to in their place.
fn add_on_device(
    step: &mut RankStep<'_, '_>,
    storage: usize,
    part: &Part,
    sums: &mut dyn Buffer,
    sums_at: usize,
    how: Absorb,
) -> Result<()> {
    let device = device::of_sums(step.backend)?;
    let dtype = step.plan.storages[storage].grad_dtype();
    let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
    let addend = if how.last.is_none() { Addend::Given } else { Addend::Missing };
    each_buffer(step, storage, part, |buffer, place, range| {
        let done = how.on_device(addend, |what| {
            device.add_gradients(Accumulate {
                dtype,
                sums: (&mut *sums, sums_at + range.start / width * sum_width),
                grads: (&mut *buffer, place),
                numel: (range.len() / width) as u64,
                what,
            })
        });
        Ok(done?)
    })
}

/// Does something with each buffer that has reduced gradients of a part of this rank's shard, the
/// place in it, and which bytes of the part lie there.
fn each_buffer(
    step: &mut RankStep<'_, '_>,
    storage: usize,
    part: &Part,
    mut with: impl FnMut(&mut dyn Buffer, usize, Range<usize>) -> Result<()>,
) -> Result<()> {
    let plan = step.plan;
    let spec = &plan.storages[storage];
    let width = spec.grad_dtype().len_bytes();
    let Some(list) = spec.list(Role::Grad) else {
        return Ok(());
    };
    let numel = (part.elements.end - part.elements.start) as usize;
    let at = match spec.extents[list] {
        Extent::Whole => part.elements.start,
        Extent::Shard => part.at,
        Extent::Segments => {
            for (index, segment) in plan.segments.iter().enumerate() {
                let start = segment.elements.start.max(part.elements.start);
                let end = segment.elements.end.min(part.elements.end);
                if segment.storage != storage || start >= end {
                    continue;
                }
                if let SegmentState::Here(Some(memory)) = &mut step.state.arena.segments[index] {
                    let place = (start - segment.elements.start) as usize * width;
                    let from = (start - part.elements.start) as usize * width;
                    let to = (end - part.elements.start) as usize * width;
                    with(memory.as_mut(), place, from..to)?;
                }
            }
            return Ok(());
        }
    };
    let buffer = step.state.storages[storage].lists[list].buffer.as_mut();
    with(buffer, at as usize * width, 0..numel * width)
}

//! Step of a rank: micro-steps, the update that ends them, and agreement between ranks.

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_collective::Divisor;
use fusestep_launch::{Accumulate, Buffer};
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::segments::{keeps_segments, sum_width};
use crate::plan::storage::{Extent, Part};
use crate::run::clock::StepPart;
use crate::run::executor::Executor;
use crate::run::memory::absorb::{Absorb, Addend, absorb};
use crate::run::memory::device;
use crate::run::memory::lanes::mean;
use crate::run::memory::segment_state::SegmentState;
use crate::run::report::{MicroStepReport, StepReport};
use crate::run::run::Run;
use crate::run::stages::{average, give, reduce};
use crate::run::step;
use crate::run::units::update_rest;

/// Ends a micro-step, and at the last one makes the update.
pub(crate) fn step(run: &mut Run<'_, '_>) -> Result<MicroStepReport> {
    run.check()?;
    let weight = run.state.arena.weight.unwrap_or(1.0);
    let (done, steps) = (run.state.arena.micro_steps, run.state.arena.steps_of_window(run.plan));
    if let Some(window) = &mut run.state.arena.window {
        window.weigh(done as usize, weight);
    }
    let done = if done + 1 >= steps {
        let divisor = give::divisor(run.plan, run.state, weight);
        update(run, divisor, Pending::MicroStep)
    } else {
        end_micro_step(run, weight).map(|()| MicroStepReport::default())
    };
    run.state.arena.weight = None;
    run.state.or_poison(done)
}

/// Makes the update of the micro-steps that have ended, if there are any.
pub(crate) fn flush(run: &mut Run<'_, '_>) -> Result<MicroStepReport> {
    run.check()?;
    run.state.check_between_steps("flush")?;
    if run.state.arena.window.is_some() {
        return flush_lanes(run);
    }
    if run.state.arena.micro_steps == 0 {
        return Ok(MicroStepReport::default());
    }
    let divisor = give::divisor(run.plan, run.state, 0.0);
    let done = update(run, divisor, Pending::Nothing);
    run.state.or_poison(done)
}

/// Makes the update of the micro-batches that any rank has given. Lanes without samples leave sums
/// as they are.
fn flush_lanes(run: &mut Run<'_, '_>) -> Result<MicroStepReport> {
    let alone = !run.plan.reduces();
    let micro_steps = run.state.arena.micro_steps;
    let window = run.state.arena.window.as_ref();
    if alone && !window.is_some_and(|window| window.has_begun(micro_steps)) {
        return Ok(MicroStepReport::default());
    }
    let early = reduce::starts_on_streams(run) || give::reduces_when_full(run.plan, run.comms);
    if !alone && (early || run.plan.in_backward) {
        return Err(PlanError::Conflict {
            first: "`flush` of lanes on several ranks".to_owned(),
            second: "gradients that are reduced before the step".to_owned(),
            why: "do not go together, since a rank that has all of its micro-batches does not \
                  wait; say by `State::set_micro_batches` before the first gradient how many \
                  there are",
        });
    }
    let mut divisor = Divisor::ONE;
    if let Some(window) = &mut run.state.arena.window {
        window.is_cut_short = true;
        window.given_steps = run.state.arena.micro_steps as usize;
        if alone {
            divisor = mean(run.plan, window.total());
        }
    }
    let done = update(run, divisor, Pending::Nothing);
    run.state.or_poison(done)
}

fn end_micro_step(run: &mut Run<'_, '_>, weight: f64) -> Result<()> {
    run.comms.set_plan(run.plan.hash());
    if run.plan.reduces_each() {
        let given_weight = run.state.arena.weight;
        give::complete(run.plan, run.state, run.backend, Divisor::ONE)?;
        reduce_and_add(run, given_weight)?;
    } else {
        give::add_views(run.plan, run.state, run.backend)?;
    }
    let arena = &mut run.state.arena;
    arena.micro_steps += 1;
    arena.weights += weight;
    arena.forget_given();
    arena.ready.again();
    Ok(())
}

/// Reduces the gradients of one micro-step and adds them to the sums of all.
fn reduce_and_add(run: &mut Run<'_, '_>, weight: Option<f64>) -> Result<()> {
    if run.plan.reduces() {
        let begun = run.state.clock.begin(StepPart::Reduce);
        reduce::reduce_all(run)?;
        run.state.clock.end(begun);
    }
    let how = Absorb { first: run.state.arena.micro_steps == 0, weight, last: None };
    each_reduced(run, how)?;
    let mut bytes = run.state.arena.weights_hash.to_le_bytes().to_vec();
    bytes.extend(weight.unwrap_or(1.0).to_le_bytes());
    run.state.arena.weights_hash = xxhash_rust::xxh3::xxh3_64(&bytes);
    if run.plan.reduces() {
        let peak = run.state.arena.settle(keeps_segments(run.plan));
        run.state.arena.seen_peak(peak);
    }
    Ok(())
}

/// Adds the reduced gradients of this rank's shard to their sums, or puts what the sums come to
/// in their place.
fn each_reduced(run: &mut Run<'_, '_>, how: Absorb) -> Result<()> {
    let backend = run.backend;
    for (storage, spec) in run.plan.storages.iter().enumerate() {
        let dtype = spec.grad_dtype();
        let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
        let Some(mut sums) = run.state.arena.reduced_sums[storage].take() else {
            continue;
        };
        for part in &spec.shard {
            let numel = (part.elements.end - part.elements.start) as usize;
            let at = part.at as usize * sum_width;
            let Some(all) = sums.host_mut() else {
                add_on_device(run, storage, part, sums.as_mut(), at, how)?;
                continue;
            };
            let sums = &mut all[at..at + numel * sum_width];
            // Aligned for elements of any type, also where it is empty.
            let mut own = HostMemory::zeroed(numel * width)?;
            let own = own.bytes_mut();
            if how.last.is_some() {
                absorb(dtype, own, Some(sums), None, how);
                each_buffer(run, storage, part, |buffer, at, range| {
                    Ok(backend.write(buffer, at, &own[range])?)
                })?;
            } else {
                each_buffer(run, storage, part, |buffer, at, range| {
                    Ok(backend.read(buffer, at, &mut own[range])?)
                })?;
                absorb(dtype, &mut [], Some(sums), Some(own), how);
            }
            run.state.arena.copied_bytes += own.len() as u64;
        }
        run.state.arena.reduced_sums[storage] = Some(sums);
    }
    Ok(())
}

fn update(run: &mut Run<'_, '_>, divisor: Divisor, pending: Pending) -> Result<MicroStepReport> {
    run.comms.set_plan(run.plan.hash());
    if run.plan.reduces_each() {
        if pending == Pending::MicroStep {
            let weight = run.state.arena.weight;
            give::complete(run.plan, run.state, run.backend, Divisor::ONE)?;
            reduce_and_add(run, weight)?;
        }
    } else {
        let begun = run.state.clock.begin(StepPart::Give);
        give::complete(run.plan, run.state, run.backend, divisor)?;
        run.state.clock.end(begun);
        if give::reduces_when_full(run.plan, run.comms) && !reduce::waits_for_weights(run.state) {
            // Ranks that have given everything are in these calls already.
            let begun = run.state.clock.begin(StepPart::Reduce);
            reduce::reduce_all(run)?;
            run.state.clock.end(begun);
        }
    }
    let report =
        if run.plan.in_backward { Some(update_rest(run)?) } else { update_all(run, divisor)? };
    let averages = run.plan.averaging().is_some();
    let begun = averages.then(|| run.state.clock.begin(StepPart::Average));
    let averaged = average::average_if_due(run)?;
    if let Some(begun) = begun {
        run.state.clock.end(begun);
    }
    run.comms.finish_on_device()?;
    let peak = run.state.arena.settle(keeps_segments(run.plan));
    run.state.arena.seen_peak(peak);
    let micro_steps = run.state.arena.micro_steps + u32::from(pending == Pending::MicroStep);
    run.state.arena.clear();
    Ok(MicroStepReport {
        update: report,
        dropped_micro_steps: report.filter(|own| own.skipped).map_or(0, |_| micro_steps),
        averaged,
        exposed_ns: std::mem::take(&mut run.state.arena.exposed_ns),
        segment_peak_bytes: std::mem::take(&mut run.state.arena.seen_peak_bytes),
        gradient_bytes_copied: std::mem::take(&mut run.state.arena.copied_bytes),
    })
}

/// Makes the update, unless no rank has given a micro-batch.
fn update_all(run: &mut Run<'_, '_>, divisor: Divisor) -> Result<Option<StepReport>> {
    let begun = run.state.clock.begin(StepPart::Agree);
    let given = reduce::agree_on_given(run)?;
    run.state.clock.end(begun);
    if run.state.arena.window.as_ref().is_some_and(|window| window.is_empty()) {
        return Ok(None);
    }
    if run.plan.reduces_each() {
        let how = Absorb { first: false, weight: None, last: Some(divisor) };
        each_reduced(run, how)?;
    }
    for (param, _) in given.iter().enumerate().filter(|(_, given)| **given == 0) {
        run.state.set_without_gradient_at(param);
    }
    let mut executor = Executor::Backend(run.backend);
    let comms_of_stages = (run.plan.topology.world > 1).then_some(&mut *run.comms);
    let report = step::run_update(run.plan, run.state, &mut executor, comms_of_stages)?;
    Ok(Some(StepReport {
        without_gradient: given.iter().filter(|&&given| given == 0).count() as u64,
        ..report
    }))
}

/// Gradients that have not been added yet when an update begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    /// The gradients of the last micro-step.
    MicroStep,
    /// Nothing: the update follows a micro-step that has ended.
    Nothing,
}

/// Adds the reduced gradients of a part of this rank's shard to sums on a device that begin at a
/// byte, or puts what these come to in their place.
fn add_on_device(
    run: &mut Run<'_, '_>,
    storage: usize,
    part: &Part,
    sums: &mut dyn Buffer,
    sums_at: usize,
    how: Absorb,
) -> Result<()> {
    let device = device::of_sums(run.backend)?;
    let dtype = run.plan.storages[storage].grad_dtype();
    let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
    let addend = if how.last.is_none() { Addend::InPlace } else { Addend::Missing };
    each_buffer(run, storage, part, |buffer, place, range| {
        let done = how.on_device(&addend, |what| {
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
    run: &mut Run<'_, '_>,
    storage: usize,
    part: &Part,
    mut with: impl FnMut(&mut dyn Buffer, usize, Range<usize>) -> Result<()>,
) -> Result<()> {
    let plan = run.plan;
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
                if let SegmentState::Here(Some(memory)) = &mut run.state.arena.segments[index] {
                    let place = (start - segment.elements.start) as usize * width;
                    let from = (start - part.elements.start) as usize * width;
                    let to = (end - part.elements.start) as usize * width;
                    with(memory.as_mut(), place, from..to)?;
                }
            }
            return Ok(());
        }
    };
    let buffer = run.state.storages[storage].lists[list].buffer.as_mut();
    with(buffer, at as usize * width, 0..numel * width)
}

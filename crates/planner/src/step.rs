//! One step of a rank: micro-steps, the update that ends them, and what ranks agree on.

use fusestep_coalesce::HostMemory;
use fusestep_launch::Backend;

use crate::absorb::{Absorb, Divisor, absorb};
use crate::arena::{Given, keeps_segments, sum_width};
use crate::comms::Comms;
use crate::in_backward::{check_between_steps, update_rest};
use crate::run::Executor;
use crate::{
    MicroStepReport, Plan, PlanError, State, StepReport, Topology, average, gradients, reduce, run,
};

/// [`Plan::step`].
pub(crate) fn step(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
) -> Result<MicroStepReport, PlanError> {
    check_comms(plan, state, comms)?;
    let weight = state.arena.weight.unwrap_or(1.0);
    let last = state.arena.micro_steps + 1 == plan.micro_steps();
    let done = if last {
        let divisor = gradients::divisor(plan, state, weight);
        update(plan, state, backend, comms, (divisor, Pending::MicroStep))
    } else {
        end_micro_step(plan, state, backend, comms, weight).map(|()| MicroStepReport::default())
    };
    state.arena.weight = None;
    if done.is_err() {
        run::poison(state);
    }
    done
}

/// [`Plan::flush`].
pub(crate) fn flush(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
) -> Result<MicroStepReport, PlanError> {
    check_comms(plan, state, comms)?;
    check_between_steps(state, "flush")?;
    if state.arena.micro_steps == 0 {
        return Ok(MicroStepReport::default());
    }
    let divisor = gradients::divisor(plan, state, 0.0);
    let done = update(plan, state, backend, comms, (divisor, Pending::Nothing));
    if done.is_err() {
        run::poison(state);
    }
    done
}

pub(crate) fn check_comms(plan: &Plan, state: &State, comms: &Comms<'_>) -> Result<(), PlanError> {
    run::check_state(plan, state)?;
    let (expected, found) = (plan.topology(), (comms.rank(), comms.world()));
    let text = |rank: usize, world: usize| format!("rank {rank} of {world}");
    if (expected.rank, expected.world) != found {
        return Err(PlanError::Topology {
            expected: text(expected.rank, expected.world),
            found: text(found.0, found.1),
        });
    }
    let (group, found) = (plan.shard_group, comms.group_size());
    if group == found {
        return Ok(());
    }
    Err(PlanError::Topology {
        expected: format!(
            "calls within shard groups of {group} ranks; make them by `Comms::in_groups`"
        ),
        found: format!("groups of {found}"),
    })
}

/// Ends a micro-step that is not the last.
fn end_micro_step(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    weight: f64,
) -> Result<(), PlanError> {
    comms.set_plan(plan.hash());
    if plan.reduces_each() {
        let given_weight = state.arena.weight;
        gradients::complete(plan, state, backend, Divisor(1.0))?;
        reduce_and_add(plan, state, backend, comms, given_weight)?;
    } else {
        gradients::add_views(plan, state, backend)?;
    }
    let arena = &mut state.arena;
    arena.micro_steps += 1;
    arena.weights += weight;
    arena.now.fill(Given::No);
    arena.ready.again();
    Ok(())
}

/// Reduces the gradients of one micro-step and adds them to the sums of all.
fn reduce_and_add(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    weight: Option<f64>,
) -> Result<(), PlanError> {
    if plan.reduces() {
        reduce::reduce_all(plan, state, backend, comms)?;
    }
    let how = Absorb {
        first: state.arena.micro_steps == 0,
        weight,
        last: None,
    };
    each_reduced(plan, state, backend, how)?;
    let mut bytes = state.arena.weights_hash.to_le_bytes().to_vec();
    bytes.extend(weight.unwrap_or(1.0).to_le_bytes());
    state.arena.weights_hash = xxhash_rust::xxh3::xxh3_64(&bytes);
    if plan.reduces() {
        let peak = state.arena.settle(keeps_segments(plan));
        state.arena.seen_peak(peak);
    }
    Ok(())
}

/// Adds the reduced gradients of this rank's shard to their sums, or puts what the sums come to
/// in their place.
fn each_reduced(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    how: Absorb,
) -> Result<(), PlanError> {
    for (storage, spec) in plan.storages.iter().enumerate() {
        let dtype = spec.grad_dtype();
        let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
        let Some(mut sums) = state.arena.reduced_sums[storage].take() else {
            continue;
        };
        for part in &spec.shard {
            let numel = (part.elements.end - part.elements.start) as usize;
            let at = part.at as usize * sum_width;
            let place = (storage, part);
            let Some(all) = sums.host_mut() else {
                state.add_reduced(plan, backend, place, (sums.as_mut(), at, how))?;
                continue;
            };
            let sums = &mut all[at..at + numel * sum_width];
            // Aligned for elements of any type, also where it is empty.
            let mut own = HostMemory::zeroed(numel * width)?;
            let own = own.bytes_mut();
            if how.last.is_some() {
                absorb(dtype, own, Some(sums), None, how);
                state.write_reduced(plan, backend, place, own)?;
            } else {
                state.read_reduced(plan, backend, place, own)?;
                absorb(dtype, &mut [], Some(sums), Some(own), how);
            }
            state.arena.copied_bytes += own.len() as u64;
        }
        state.arena.reduced_sums[storage] = Some(sums);
    }
    Ok(())
}

fn update(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    (divisor, pending): (Divisor, Pending),
) -> Result<MicroStepReport, PlanError> {
    comms.set_plan(plan.hash());
    if plan.reduces_each() {
        if pending == Pending::MicroStep {
            let weight = state.arena.weight;
            gradients::complete(plan, state, backend, Divisor(1.0))?;
            reduce_and_add(plan, state, backend, comms, weight)?;
        }
    } else {
        gradients::complete(plan, state, backend, divisor)?;
    }
    let report = if plan.in_backward {
        update_rest(plan, state, backend, comms)?
    } else {
        update_all(plan, state, backend, comms, divisor)?
    };
    let averaged = average::average_if_due(plan, state, backend, comms)?;
    comms.finish_on_device()?;
    let peak = state.arena.settle(keeps_segments(plan));
    state.arena.seen_peak(peak);
    state.arena.clear();
    Ok(MicroStepReport {
        update: Some(report),
        averaged,
        exposed_ns: std::mem::take(&mut state.arena.exposed_ns),
        segment_peak_bytes: std::mem::take(&mut state.arena.seen_peak_bytes),
        gradient_bytes_copied: std::mem::take(&mut state.arena.copied_bytes),
    })
}

/// Agrees on which gradients there are and runs all stages.
fn update_all(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    divisor: Divisor,
) -> Result<StepReport, PlanError> {
    let given = reduce::agree_on_given(plan, state, comms)?;
    if plan.reduces_each() {
        let how = Absorb {
            first: false,
            weight: None,
            last: Some(divisor),
        };
        each_reduced(plan, state, backend, how)?;
    }
    for (param, _) in given.iter().enumerate().filter(|(_, given)| **given == 0) {
        state.set_without_gradient_at(param);
    }
    let mut executor = Executor::Backend(backend);
    let comms_of_stages = (plan.topology.world > 1).then_some(&mut *comms);
    let report = run::run_update(plan, state, &mut executor, comms_of_stages)?;
    Ok(StepReport {
        without_gradient: given.iter().filter(|&&given| given == 0).count() as u64,
        ..report
    })
}

/// What has not been added yet when an update begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    /// The gradients of the last micro-step.
    MicroStep,
    /// Nothing: the update follows a micro-step that has ended.
    Nothing,
}

/// This rank among those of its plan, in errors.
impl std::fmt::Display for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}

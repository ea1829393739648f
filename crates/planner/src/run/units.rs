//! Updates before the step is run ([`crate::UpdateInBackward`]): which are due, and the step that
//! they belong to.
//!
//! ```text
//! push_grad ─► last of its bucket ─► ranks agree who has gradients ─► Reduce ─► Optimize ─► Gather
//! step      ─► what is left, bucket by bucket ─► the report of all of them
//! ```
//! Ranks make these calls in the order of buckets, in backward or in the step, so one that lacks a
//! gradient is waited for and never met by another call.

use crate::error::Result;
use crate::plan::batches;
use crate::plan::value::Plan;
use crate::run::comms::handshake;
use crate::run::executor::Executor;
use crate::run::memory::state::State;
use crate::run::memory::units::Unit;
use crate::run::rank_step::RankStep;
use crate::run::report::StepReport;
use crate::run::stages::reduce;
use crate::run::step;

/// Forgets a step that has begun or failed, once everything that it may have changed is loaded.
pub(crate) fn forget(state: &mut State) {
    if state.in_backward.under_way.take().is_some() || state.poisoned.is_some() {
        state.in_backward.again();
        state.arena.restore();
        state.arena.clear();
        state.forget_without_gradient();
    }
}

/// Updates parameters that can be updated now that one more gradient of the last micro-step is
/// given.
pub(crate) fn update_ready(step: &mut RankStep<'_, '_>, param: usize) -> Result<()> {
    if step.state.arena.regions[param].segment.is_some() {
        return update_segments(step);
    }
    let Some(unit) = step.state.in_backward.alone[param] else {
        return Ok(());
    };
    let waiting = &mut step.state.in_backward.units[unit];
    waiting.missing = waiting.missing.saturating_sub(1);
    if waiting.missing > 0 {
        return Ok(());
    }
    update_unit(step, unit)
}

/// Updates the next segments that are full or, with communication streams, through.
fn update_segments(step: &mut RankStep<'_, '_>) -> Result<()> {
    if step.comms.has_streams() && step.state.arena.starts_early {
        while let Some(segment) = step.state.arena.ready.full() {
            reduce::start_segment(step, segment)?;
        }
        let mut next = step.state.in_backward.next;
        while next < step.state.arena.ready.started() && reduce::is_through(step.state, next)? {
            update_unit(step, next)?;
            next = step.state.in_backward.next;
        }
        return Ok(());
    }
    while let Some(segment) = step.state.arena.ready.full() {
        update_unit(step, segment)?;
    }
    Ok(())
}

/// Updates all remaining parameters, and ends the step.
pub(crate) fn update_rest(step: &mut RankStep<'_, '_>) -> Result<StepReport> {
    begin(step)?;
    for segment in step.state.in_backward.next..step.plan.segments.len() {
        update_unit(step, segment)?;
    }
    let rest = std::mem::take(&mut step.state.in_backward.rest);
    let agreed = agree(step, &rest);
    step.state.in_backward.rest = rest;
    agreed?;
    for unit in step.plan.segments.len()..step.state.in_backward.units.len() {
        if !step.state.in_backward.units[unit].updated {
            update_unit(step, unit)?;
        }
    }
    let given = step.state.in_backward.given.iter();
    let without_gradient = given.filter(|&&given| given == 0).count() as u64;
    let Some(begun) = step.state.in_backward.under_way.take() else {
        return Err(step.state.poison());
    };
    step.state.in_backward.again();
    let report = step::end_update(step.state, &Executor::Backend(step.backend), begun)?;
    Ok(StepReport { without_gradient, ..report })
}

/// Begins a step, unless it has begun: settings are those of this moment for all of its updates.
fn begin(step: &mut RankStep<'_, '_>) -> Result<()> {
    if step.state.in_backward.under_way.is_none() {
        step.comms.set_plan(step.plan.hash());
        let begun = step::begin_update(step.plan, step.state, &Executor::Backend(step.backend))?;
        step.state.in_backward.under_way = Some(begun);
    }
    Ok(())
}

/// Reduces, updates and gathers the parameters of one unit.
fn update_unit(step: &mut RankStep<'_, '_>, index: usize) -> Result<()> {
    begin(step)?;
    // Taken out, so that its stages can borrow the rest of the state.
    let mut unit = std::mem::take(&mut step.state.in_backward.units[index]);
    let is_segment = index < step.plan.segments.len();
    let agreed = if is_segment { agree(step, &unit.params) } else { Ok(()) };
    let done = agreed.and_then(|()| run_unit(step, &unit));
    unit.updated = done.is_ok();
    step.state.in_backward.units[index] = unit;
    done?;
    if is_segment {
        step.state.in_backward.next = index + 1;
        if !step.state.arena.starts_early {
            step.state.arena.ready.start();
        }
    }
    Ok(())
}

fn run_unit(step: &mut RankStep<'_, '_>, unit: &Unit) -> Result<()> {
    leave_out(step.plan, step.state, unit)?;
    let mut executor = Executor::Backend(step.backend);
    for &(at, update) in &unit.stages {
        let comms = (step.plan.topology.world > 1).then_some(&mut *step.comms);
        // A step that may be skipped has all its gradients first, and is never here.
        let (plan, state, stage) = (step.plan, &mut *step.state, &step.plan.stages[at]);
        let done = step::run_stage(plan, state, &mut executor, comms, stage, update, &mut false)?;
        if let Some(begun) = &mut step.state.in_backward.under_way {
            begun.report.launches += done.launches;
            begun.report.elements += done.elements;
        }
    }
    Ok(())
}

/// Makes the batches of a unit anew if some of its parameters are left out of this step.
fn leave_out(plan: &Plan, state: &mut State, unit: &Unit) -> Result<()> {
    let without_gradient = &state.without_gradient;
    if !unit.params.iter().any(|&p| without_gradient[p as usize]) {
        return Ok(());
    }
    for &(at, update) in &unit.stages {
        if let Some(stage) = plan.stages[at].update() {
            let schedule = &mut state.schedule;
            schedule.batches[update] = batches::of_update(
                plan,
                stage,
                |param| !without_gradient[param],
                &schedule.groups,
            )?;
        }
    }
    Ok(())
}

/// Agrees with all ranks which of these parameters have a gradient on any rank, and leaves the
/// others out of the step. Fails on all ranks if their rules or parameters differ.
fn agree(step: &mut RankStep<'_, '_>, params: &[u32]) -> Result<()> {
    let own = params.iter().map(|&param| step.state.arena.given[param as usize]);
    let mut given: Vec<u8> = own.map(|given| u8::from(given > 0)).collect();
    if step.plan.reduces() && !given.is_empty() {
        let hash = handshake::take_compared(step.state);
        let [alike] = handshake::largest(step.comms, &mut given, [hash])?;
        handshake::check_alike(step, alike)?;
    }
    for (&param, given) in params.iter().zip(given) {
        step.state.in_backward.given[param as usize] = given;
        if given == 0 {
            step.state.set_without_gradient_at(param as usize);
        }
    }
    Ok(())
}

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
use crate::run::clock::StepPart;
use crate::run::comms::handshake;
use crate::run::executor::Executor;
use crate::run::memory::state::State;
use crate::run::memory::units::Unit;
use crate::run::report::StepReport;
use crate::run::run::Run;
use crate::run::stages::reduce;
use crate::run::step;
use crate::run::step::Due;

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
pub(crate) fn update_ready(run: &mut Run<'_, '_>, param: usize) -> Result<()> {
    if run.state.arena.regions[param].segment.is_some() {
        return update_segments(run);
    }
    let Some(unit) = run.state.in_backward.alone[param] else {
        return Ok(());
    };
    let waiting = &mut run.state.in_backward.units[unit];
    waiting.missing = waiting.missing.saturating_sub(1);
    if waiting.missing > 0 {
        return Ok(());
    }
    update_unit(run, unit)
}

/// Updates the next segments that are full or, with communication streams, through.
fn update_segments(run: &mut Run<'_, '_>) -> Result<()> {
    if reduce::starts_on_streams(run) {
        while let Some(segment) = run.state.arena.ready.full() {
            reduce::start_segment(run, segment)?;
        }
        let mut next = run.state.in_backward.next;
        while next < run.state.arena.ready.started() && reduce::is_through(run.state, next)? {
            update_unit(run, next)?;
            next = run.state.in_backward.next;
        }
        return Ok(());
    }
    while let Some(segment) = run.state.arena.ready.full() {
        update_unit(run, segment)?;
    }
    Ok(())
}

/// Updates all remaining parameters, and ends the step.
pub(crate) fn update_rest(run: &mut Run<'_, '_>) -> Result<StepReport> {
    begin(run)?;
    for segment in run.state.in_backward.next..run.plan.segments.len() {
        update_unit(run, segment)?;
    }
    let rest = std::mem::take(&mut run.state.in_backward.rest);
    let agreed = agree(run, &rest);
    run.state.in_backward.rest = rest;
    agreed?;
    for unit in run.plan.segments.len()..run.state.in_backward.units.len() {
        if !run.state.in_backward.units[unit].updated {
            update_unit(run, unit)?;
        }
    }
    let given = run.state.in_backward.given.iter();
    let without_gradient = given.filter(|&&given| given == 0).count() as u64;
    let Some(begun) = run.state.in_backward.under_way.take() else {
        return Err(run.state.poison());
    };
    run.state.in_backward.again();
    let report = step::end_update(run.state, &Executor::Backend(run.backend), begun)?;
    Ok(StepReport { without_gradient, ..report })
}

/// Begins a step, unless it has begun: settings are those of this moment for all of its updates.
fn begin(run: &mut Run<'_, '_>) -> Result<()> {
    if run.state.in_backward.under_way.is_none() {
        run.comms.set_plan(run.plan.hash());
        let begun = step::begin_update(run.plan, run.state, &Executor::Backend(run.backend))?;
        run.state.in_backward.under_way = Some(begun);
    }
    Ok(())
}

/// Reduces, updates and gathers the parameters of one unit.
fn update_unit(run: &mut Run<'_, '_>, index: usize) -> Result<()> {
    begin(run)?;
    // Taken out, so that its stages can borrow the rest of the state.
    let mut unit = std::mem::take(&mut run.state.in_backward.units[index]);
    let is_segment = index < run.plan.segments.len();
    let agreed = if is_segment { agree(run, &unit.params) } else { Ok(()) };
    let done = agreed.and_then(|()| run_unit(run, &unit));
    unit.updated = done.is_ok();
    run.state.in_backward.units[index] = unit;
    done?;
    if is_segment {
        run.state.in_backward.next = index + 1;
        if !run.state.arena.starts_early {
            run.state.arena.ready.start();
        }
    }
    Ok(())
}

fn run_unit(run: &mut Run<'_, '_>, unit: &Unit) -> Result<()> {
    leave_out(run.plan, run.state, unit)?;
    let mut executor = Executor::Backend(run.backend);
    let comms = (run.plan.topology.world > 1).then_some(&mut *run.comms);
    let stages = unit.stages.iter();
    let due = stages.map(|&(at, update)| Due { stage: &run.plan.stages[at], update });
    let mut done = StepReport::default();
    // A step that may be skipped has all its gradients first, and is never here.
    step::run_due(run.plan, run.state, &mut executor, comms, due, &mut done)?;
    if let Some(begun) = &mut run.state.in_backward.under_way {
        begun.report.launches += done.launches;
        begun.report.elements += done.elements;
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
fn agree(run: &mut Run<'_, '_>, params: &[u32]) -> Result<()> {
    let own = params.iter().map(|&param| run.state.arena.given[param as usize]);
    let mut given: Vec<u8> = own.map(|given| u8::from(given > 0)).collect();
    if run.plan.reduces() && !given.is_empty() {
        let hash = handshake::take_compared(run.state);
        let begun = run.state.clock.begin(StepPart::Agree);
        let [alike] = reduce::largest_of_step(run, &mut given, [hash])?;
        run.state.clock.end(begun);
        handshake::check_alike(run, alike)?;
    }
    for (&param, given) in params.iter().zip(given) {
        run.state.in_backward.given[param as usize] = given;
        if given == 0 {
            run.state.set_without_gradient_at(param as usize);
        }
    }
    Ok(())
}

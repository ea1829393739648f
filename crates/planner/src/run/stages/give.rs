//! Gradients on their way: given by the backward pass, added over micro-steps, completed before an
//! update.
//!
//! ```text
//! push_grad, grad_mut ─► segment ─► Reduce, in place ─► Norm, Optimize read it there
//! ```

use fusestep_launch::Backend;
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::segments::{keeps_segments, starts_early};
use crate::plan::settings::Accumulated;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::memory::absorb::{Absorb, Divisor};
use crate::run::memory::segment_state::Given;
use crate::run::memory::state::State;
use crate::run::memory::storage::check_len;
use crate::run::run::Run;
use crate::run::stages::reduce;
use crate::run::units::update_ready;

pub(crate) fn push_grad(run: &mut Run<'_, '_>, name: &str, bytes: &[u8]) -> Result<()> {
    run.state.check_plan(run.plan)?;
    let param = run.state.find(name)?;
    let (storage, _) = run.state.places[param];
    let dtype = run.plan.storages[storage].grad_dtype();
    let len_bytes = run.plan.params[param].numel() as usize * dtype.len_bytes();
    check_len(Role::Grad, name, len_bytes, bytes.len())?;
    if run.state.arena.now[param] != Given::No {
        return Err(PlanError::GradientTwice { name: name.to_owned() });
    }
    let how = how_to_absorb(run.plan, run.state, param);
    run.state.absorb(run.backend, param, Some(bytes), how)?;
    run.state.arena.now[param] = Given::Pushed;
    run.state.arena.given[param] += 1;
    start_full(run, param)
}

pub(crate) fn give_view(run: &mut Run<'_, '_>, name: &str) -> Result<()> {
    run.state.check_plan(run.plan)?;
    let param = run.state.find(name)?;
    if !run.state.arena.on_host && run.state.arena.now[param] == Given::Viewed {
        run.state.take_view_back(run.backend, param)?;
    } else if run.state.grad_view(param)?.is_none() {
        return Err(run.state.not_on_host(Role::Grad, name));
    }
    if run.plan.micro_steps() > 1 {
        return Ok(());
    }
    run.state.arena.now[param] = Given::Pushed;
    run.state.arena.given[param] += 1;
    start_full(run, param)
}

/// Counts a parameter's gradient in its segment and starts every segment that is full, or
/// updates it if the plan does so in backward.
fn start_full(run: &mut Run<'_, '_>, param: usize) -> Result<()> {
    let segment = run.state.arena.regions[param].segment;
    if let Some(segment) = segment.filter(|_| run.plan.params[param].numel() > 0) {
        run.state.arena.ready.given(segment);
    }
    let last = run.state.arena.micro_steps + 1 == run.plan.micro_steps();
    if run.plan.in_backward {
        let done = if last && run.plan.params[param].numel() > 0 {
            update_ready(run, param)
        } else {
            Ok(())
        };
        return run.state.or_poison(done);
    }
    let at_once = reduces_when_full(run.plan, run.comms);
    let early = run.state.arena.starts_early && run.comms.has_streams() || at_once;
    if early && (last || run.plan.reduces_each()) {
        reduce::take_reduced(run.plan, run.state, run.backend)?;
        while let Some(segment) = run.state.arena.ready.full() {
            reduce::start_segment(run, segment)?;
        }
        if at_once {
            reduce::take_reduced(run.plan, run.state, run.backend)?;
        }
    }
    Ok(())
}

/// Whether the call that gives a segment's last gradient reduces the segment and updates nothing.
pub(crate) fn reduces_when_full(plan: &Plan, comms: &Comms<'_>) -> bool {
    let asked = comms.reduces_when_full() && !plan.in_backward;
    asked && !keeps_segments(plan) && starts_early(plan)
}

/// The way in which a gradient of the micro-step under way is added to the sums.
fn how_to_absorb(plan: &Plan, state: &State, param: usize) -> Absorb {
    let arena = &state.arena;
    if plan.micro_steps() == 1 || plan.reduces_each() {
        return Absorb {
            first: true,
            weight: None,
            last: (plan.micro_steps() == 1).then_some(Divisor(1.0)),
        };
    }
    let last = arena.micro_steps + 1 == plan.micro_steps();
    let weight = arena.weight.unwrap_or(1.0);
    Absorb {
        first: arena.given[param] == 0,
        weight: arena.weight,
        last: last.then(|| divisor(plan, state, weight)),
    }
}

/// The number that the sum over micro-steps is divided by, with the weight of the micro-step under
/// way.
pub(crate) fn divisor(plan: &Plan, state: &State, weight: f64) -> Divisor {
    match plan.accumulation().map(|rule| rule.accumulated) {
        Some(Accumulated::Mean) => Divisor(state.arena.weights + weight),
        Some(Accumulated::Sum) | None => Divisor(1.0),
    }
}

/// Finishes gradients that were not pushed in the last micro-step. Adds gradients that were written
/// through views, divides sums of earlier micro-steps, and writes zeros where there is no gradient.
pub(crate) fn complete(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    divisor: Divisor,
) -> Result<()> {
    let sums = plan.micro_steps() > 1 && !plan.reduces_each();
    for param in 0..plan.params.len() {
        match state.arena.now[param] {
            Given::Pushed => continue,
            Given::Viewed => {
                state.take_view_back(backend, param)?;
                let how = Absorb { last: Some(divisor), ..how_to_absorb(plan, state, param) };
                if sums {
                    state.absorb_view(backend, param, how)?;
                }
                state.arena.given[param] += 1;
            }
            Given::No if sums && state.arena.given[param] > 0 => {
                let how = Absorb { first: false, weight: None, last: Some(divisor) };
                state.absorb(backend, param, None, how)?;
            }
            // What nobody has given is left out; what other ranks or micro-steps have is zero
            // here.
            Given::No if plan.reduces() || plan.reduces_each() => {
                state.write_zeros(backend, param)?
            }
            Given::No => {}
        }
    }
    Ok(())
}

/// Ends a micro-step that is not the last: adds gradients that were written through views.
pub(crate) fn add_views(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<()> {
    for param in 0..plan.params.len() {
        if state.arena.now[param] == Given::Viewed {
            state.take_view_back(backend, param)?;
            let how = how_to_absorb(plan, state, param);
            if !plan.reduces_each() {
                state.absorb_view(backend, param, how)?;
            }
            state.arena.given[param] += 1;
        }
    }
    Ok(())
}

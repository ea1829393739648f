//! How gradients come: given by the backward pass, added over micro-steps, completed before an
//! update.
//!
//! ```text
//! push_grad, grad_mut ─► segment ─► Reduce, in place ─► Norm, Optimize read it there
//! ```

use fusestep_launch::Backend;
use fusestep_tensor::Role;

use crate::absorb::{Absorb, Divisor};
use crate::arena::Given;
use crate::comms::Comms;
use crate::in_backward::update_ready;
use crate::passes::Accumulated;
use crate::tensors::check_len;
use crate::{Plan, PlanError, State, reduce, run};

/// [`Plan::push_grad`].
pub(crate) fn push_grad(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    name: &str,
    bytes: &[u8],
) -> Result<(), PlanError> {
    run::check_state(plan, state)?;
    let param = state.find(name)?;
    let (storage, _) = state.places[param];
    let dtype = plan.storages[storage].grad_dtype();
    let len_bytes = plan.params[param].numel() as usize * dtype.len_bytes();
    check_len(Role::Grad, name, len_bytes, bytes.len())?;
    if state.arena.now[param] != Given::No {
        return Err(PlanError::GradientTwice {
            name: name.to_owned(),
        });
    }
    let how = how_to_absorb(plan, state, param);
    state.absorb(plan, backend, param, Some(bytes), how)?;
    state.arena.now[param] = Given::Pushed;
    state.arena.given[param] += 1;
    start_full(plan, state, backend, comms, param)
}

/// [`Plan::give_view`].
pub(crate) fn give_view(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    name: &str,
) -> Result<(), PlanError> {
    run::check_state(plan, state)?;
    let param = state.find(name)?;
    if !state.arena.on_host && state.arena.now[param] == Given::Viewed {
        state.take_view_back(backend, param)?;
    } else if state.grad_view(param)?.is_none() {
        return Err(state.not_on_host(Role::Grad, name));
    }
    if plan.micro_steps() > 1 {
        return Ok(());
    }
    state.arena.now[param] = Given::Pushed;
    state.arena.given[param] += 1;
    start_full(plan, state, backend, comms, param)
}

/// Counts a parameter's gradient in its segment and starts every segment that is full, or
/// updates it if the plan does so in backward.
fn start_full(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    param: usize,
) -> Result<(), PlanError> {
    let segment = state.arena.regions[param].segment;
    if let Some(segment) = segment.filter(|_| plan.params[param].numel() > 0) {
        state.arena.ready.given(segment);
    }
    let last = state.arena.micro_steps + 1 == plan.micro_steps();
    if plan.in_backward {
        let done = if last && plan.params[param].numel() > 0 {
            update_ready(plan, state, backend, comms, param)
        } else {
            Ok(())
        };
        if done.is_err() {
            run::poison(state);
        }
        return done;
    }
    let early = comms.has_streams() && state.arena.starts_early;
    if early && (last || plan.reduces_each()) {
        plan.take_reduced(state, backend)?;
        while let Some(segment) = state.arena.ready.full() {
            reduce::start_segment(plan, state, backend, comms, segment)?;
        }
    }
    Ok(())
}

/// What a gradient of the micro-step under way does to the sums.
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

/// What the sum over micro-steps is divided by, with the weight of the micro-step under way.
pub(crate) fn divisor(plan: &Plan, state: &State, weight: f64) -> Divisor {
    match plan.accumulation().map(|rule| rule.accumulated) {
        Some(Accumulated::Mean) => Divisor(state.arena.weights + weight),
        Some(Accumulated::Sum) | None => Divisor(1.0),
    }
}

/// Finishes gradients that were not pushed in the last micro-step: adds those that were written
/// through views, divides what earlier micro-steps have added, and writes zeros where there
/// is nothing.
pub(crate) fn complete(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    divisor: Divisor,
) -> Result<(), PlanError> {
    let sums = plan.micro_steps() > 1 && !plan.reduces_each();
    for param in 0..plan.params.len() {
        match state.arena.now[param] {
            Given::Pushed => continue,
            Given::Viewed => {
                state.take_view_back(backend, param)?;
                let how = Absorb {
                    last: Some(divisor),
                    ..how_to_absorb(plan, state, param)
                };
                if sums {
                    state.absorb_view(plan, backend, param, how)?;
                }
                state.arena.given[param] += 1;
            }
            Given::No if sums && state.arena.given[param] > 0 => {
                let how = Absorb {
                    first: false,
                    weight: None,
                    last: Some(divisor),
                };
                state.absorb(plan, backend, param, None, how)?;
            }
            // What nobody has given is left out; what other ranks or micro-steps have is zero
            // here.
            Given::No if plan.reduces() || plan.reduces_each() => {
                state.write_zeros(plan, backend, param)?
            }
            Given::No => {}
        }
    }
    Ok(())
}

/// Ends a micro-step that is not the last: what was written through views is added.
pub(crate) fn add_views(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
) -> Result<(), PlanError> {
    for param in 0..plan.params.len() {
        if state.arena.now[param] == Given::Viewed {
            state.take_view_back(backend, param)?;
            let how = how_to_absorb(plan, state, param);
            if !plan.reduces_each() {
                state.absorb_view(plan, backend, param, how)?;
            }
            state.arena.given[param] += 1;
        }
    }
    Ok(())
}

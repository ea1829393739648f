//! Gradients on their way: given by the backward pass, added over micro-steps, completed before an
//! update.
//!
//! ```text
//! push_grad, grad_mut ─► segment ─► Reduce, in place ─► Norm, Optimize read it there
//! ```

use fusestep_coalesce::HostMemory;
use fusestep_collective::Divisor;
use fusestep_launch::Backend;
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::segments::{keeps_segments, starts_early};
use crate::plan::settings::Accumulated;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::memory::absorb::{Absorb, Addend, widen_all};
use crate::run::memory::lane_views;
use crate::run::memory::lanes;
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
    let numel = run.plan.params[param].numel() as usize;
    let widened = widen_given(run, param, bytes)?;
    let bytes = widened.as_ref().map_or(bytes, |wide| &wide.bytes()[..numel * dtype.len_bytes()]);
    check_len(Role::Grad, name, numel * dtype.len_bytes(), bytes.len())?;
    if run.state.arena.now[param] != Given::No {
        return Err(PlanError::GradientTwice { name: name.to_owned() });
    }
    if run.state.arena.adds_lanes() {
        let divisor = own_divisor(run.plan, run.state);
        lane_views::absorb_lane(run.state, run.backend, param, Addend::Given(bytes), divisor)?;
    } else {
        let how = how_to_absorb(run.plan, run.state, param);
        run.state.absorb(run.backend, param, Some(bytes), how)?;
    }
    run.state.arena.widened = widened.or(run.state.arena.widened.take());
    run.state.arena.now[param] = Given::Pushed;
    run.state.arena.given[param] += 1;
    start_full(run, param)
}

/// A gradient as long as its parameter where gradients are kept wider, at the start of memory that
/// the next one uses again; `None` of any other gradient.
fn widen_given(run: &mut Run<'_, '_>, param: usize, bytes: &[u8]) -> Result<Option<HostMemory>> {
    let desc = &run.plan.params[param];
    let (grad, numel) = (run.plan.grad_dtype(param), desc.numel() as usize);
    if desc.dtype == grad || numel == 0 || bytes.len() != numel * desc.dtype.len_bytes() {
        return Ok(None);
    }
    let len_bytes = numel * grad.len_bytes();
    let kept = run.state.arena.widened.take().filter(|kept| kept.bytes().len() >= len_bytes);
    let mut wide = match kept {
        Some(kept) => kept,
        None => HostMemory::zeroed(len_bytes)?,
    };
    widen_all(desc.dtype, bytes, &mut wide.bytes_mut()[..len_bytes]);
    Ok(Some(wide))
}

pub(crate) fn give_view(run: &mut Run<'_, '_>, name: &str) -> Result<()> {
    run.state.check_plan(run.plan)?;
    let param = run.state.find(name)?;
    if !run.state.arena.on_host && run.state.arena.now[param] == Given::Viewed {
        run.state.take_view_back(run.backend, param)?;
    } else if run.state.grad_view(param)?.is_none() {
        return Err(run.state.not_on_host(Role::Grad, name));
    }
    if run.plan.adds_micro_steps() || run.state.arena.adds_lanes() {
        return Ok(());
    }
    weigh_view(run.plan, run.state, run.backend, param)?;
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
    let last = run.state.arena.micro_steps + 1 == run.state.arena.steps_of_window(run.plan);
    if run.plan.in_backward {
        let done = if last && run.plan.params[param].numel() > 0 {
            update_ready(run, param)
        } else {
            Ok(())
        };
        return run.state.or_poison(done);
    }
    let at_once = reduces_when_full(run.plan, run.comms) && !reduce::waits_for_weights(run.state);
    let early = reduce::starts_on_streams(run) || at_once;
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
    let asked = comms.reduces_when_full() && !plan.in_backward && !lanes::wait_for_step(plan);
    asked && !keeps_segments(plan) && starts_early(plan)
}

/// The way in which a gradient of the micro-step under way is added to the sums.
fn how_to_absorb(plan: &Plan, state: &State, param: usize) -> Absorb {
    let arena = &state.arena;
    if let Some(window) = &arena.window {
        // The mean of one micro-batch is its gradient, whatever its weight.
        let weight = arena.weight.filter(|_| window.is_weighted && plan.reduces());
        return Absorb { first: true, weight, last: Some(Divisor::ONE) };
    }
    if plan.micro_steps() == 1 || plan.reduces_each() {
        return Absorb {
            first: true,
            weight: None,
            last: (plan.micro_steps() == 1).then_some(Divisor::ONE),
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
        Some(Accumulated::Mean) => Divisor::of(state.arena.weights + weight),
        Some(Accumulated::Sum) | None => Divisor::ONE,
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
    if state.arena.window.is_some() {
        return complete_lanes(plan, state, backend);
    }
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
    if state.arena.window.is_some() {
        return end_of_micro_batch(plan, state, backend, None);
    }
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

/// The divisor of a sum that needs nothing of other ranks, in the window's last micro-step: that of
/// the mean on one rank, none where ranks exchange sums as they are.
fn own_divisor(plan: &Plan, state: &mut State) -> Option<Divisor> {
    let arena = &mut state.arena;
    let weight = arena.weight.unwrap_or(1.0);
    let window = arena.window.as_mut().filter(|window| !window.exchanges)?;
    let step = arena.micro_steps as usize;
    if step + 1 < window.given_steps {
        return None;
    }
    if plan.reduces() {
        return Some(Divisor::ONE);
    }
    window.weigh(step, weight);
    Some(lanes::mean(plan, window.total()))
}

/// Adds to lanes what was written through views, and goes on in the lanes of parameters without a
/// gradient in this micro-batch.
pub(crate) fn end_of_micro_batch(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    divisor: Option<Divisor>,
) -> Result<()> {
    for param in 0..plan.params.len() {
        match state.arena.now[param] {
            Given::Viewed => {
                state.take_view_back(backend, param)?;
                if state.arena.adds_lanes() {
                    lane_views::absorb_lane(state, backend, param, Addend::InPlace, divisor)?;
                } else {
                    weigh_view(plan, state, backend, param)?;
                }
                state.arena.given[param] += 1;
            }
            Given::No if state.arena.adds_lanes() && state.arena.given[param] > 0 => {
                lane_views::absorb_lane(state, backend, param, Addend::Missing, divisor)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Ends the last micro-step of a window of lanes.
fn complete_lanes(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<()> {
    let window = state.arena.window.as_ref();
    let steps = window.map_or(0, |window| window.schedule.steps.len());
    if (state.arena.micro_steps as usize) < steps {
        let divisor = own_divisor(plan, state);
        end_of_micro_batch(plan, state, backend, divisor)?;
    }
    if !plan.reduces() {
        return Ok(());
    }
    // What other ranks have been given leaves their sums as they are here.
    for param in 0..plan.params.len() {
        if state.arena.given[param] == 0 {
            lane_views::clear_lanes(state, backend, param)?;
        } else {
            lane_views::make_room(state, backend, param)?;
        }
    }
    Ok(())
}

/// Multiplies a gradient that lies where it is reduced with the weight of its micro-batch.
fn weigh_view(plan: &Plan, state: &mut State, backend: &dyn Backend, param: usize) -> Result<()> {
    let weighted = state.arena.window.as_ref().is_some_and(|window| window.is_weighted);
    match state.arena.weight.filter(|_| weighted && plan.reduces()) {
        Some(weight) => lane_views::weigh_gradient(state, backend, param, weight),
        None => Ok(()),
    }
}

//! Values of files, written to a run.

use std::sync::Arc;

use fusestep_amp::LossScale;
use fusestep_launch::Backend;
use fusestep_tensor::Role;

use crate::error::Result;
use crate::plan::segments::sum_stride;
use crate::plan::storage::Extent;
use crate::plan::value::Plan;
use crate::run::image::borrowed::RunToLoad;
use crate::run::image::counts::RunCounts;
use crate::run::image::value::{List, RunImage};
use crate::run::memory::lane_views;
use crate::run::memory::lanes::LaneWindow;
use crate::run::memory::state::State;
use crate::run::units::forget;

impl RunToLoad<'_> {
    /// Describes the run that is written to.
    ///
    /// # Errors
    /// As [`RunImage::describe`].
    pub fn describe(&self) -> Result<RunImage> {
        RunImage::describe(self.plan, self.state)
    }

    /// Writes counts and whole tensors to the run, which `image` describes. `tensor` has the bytes
    /// of a parameter's list as this rank takes them over, or none of sums that are not there.
    ///
    /// # Errors
    /// Errors of the backend and of the caller's parameters; lengths that are not the tensors'.
    pub fn restore<'t>(
        self,
        image: &RunImage,
        counts: &RunCounts,
        tensor: impl Fn(usize, List) -> Option<&'t [u8]>,
    ) -> Result<()> {
        let RunToLoad { plan, state, backend, params } = self;
        for (param, desc) in image.params.iter().enumerate() {
            // Parameters first: a master that is written after its parameter keeps its own bits.
            for list in &desc.lists {
                let bytes = tensor(param, List::Role(list.role)).unwrap_or_default();
                match params.filter(|_| list.role == Role::Param) {
                    Some(params) => params.write(param, bytes)?,
                    None => state.write_all(backend, list.role, &desc.name, bytes)?,
                }
            }
        }
        state.written.release();
        forget(state);
        restore_counts(state, backend, counts)?;
        restore_place(state, counts);
        restore_lanes(plan, state, backend, counts, &tensor)?;
        if counts.micro_steps > 0 && plan.lanes.is_none() {
            for param in 0..image.params.len() {
                if let Some(bytes) = tensor(param, List::Sums) {
                    restore_sums(plan, state, backend, param, bytes)?;
                }
            }
        }
        state.poisoned = None;
        Ok(())
    }
}

impl RunImage {
    /// Writes a file's tensors of rules and counts of steps to the state that this image describes.
    /// `tensor` has the bytes of a parameter's list, and `scale` comes with the steps skipped so
    /// far, where both sides scale the loss.
    ///
    /// # Errors
    /// Errors of the backend; lengths that are not the tensors'.
    pub fn restore_state<'t>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        counts: &RunCounts,
        scale: Option<LossScale>,
        tensor: impl Fn(usize, Role) -> &'t [u8],
    ) -> Result<()> {
        state.settle(backend)?;
        for (param, desc) in self.params.iter().enumerate() {
            for list in &desc.lists {
                state.write(backend, list.role, &desc.name, tensor(param, list.role))?;
            }
        }
        restore_steps(state, counts)?;
        if let (Some(norm), Some(scale)) = (&mut state.norm, scale) {
            norm.restore(backend, scale, counts.skipped)?;
        }
        forget(state);
        state.poisoned = None;
        Ok(())
    }
}

fn restore_steps(state: &mut State, counts: &RunCounts) -> Result<()> {
    state.set_step(counts.step);
    let params = Arc::clone(&state.params);
    for (desc, &step) in params.iter().zip(&counts.steps_of) {
        if step != counts.step {
            state.set_step_of(&desc.name, step)?;
        }
    }
    Ok(())
}

/// Restores steps, skipped steps and the loss scale.
fn restore_counts(state: &mut State, backend: &dyn Backend, counts: &RunCounts) -> Result<()> {
    restore_steps(state, counts)?;
    let scaled = state.scaled;
    let Some(norm) = &mut state.norm else {
        return Ok(());
    };
    let scale = norm.loss_scale();
    let scale = match counts.loss_scale.filter(|_| scaled) {
        // Checked before: a scale that does not fit the policy was refused.
        Some((value, good, bad)) => scale.restored(value, good, bad).unwrap_or(scale),
        None => scale,
    };
    norm.restore(backend, scale, counts.skipped)
}

/// Restores the place between two updates and between two averages.
fn restore_place(state: &mut State, counts: &RunCounts) {
    let arena = &mut state.arena;
    arena.restore();
    arena.micro_steps = counts.micro_steps as u32;
    arena.weights = counts.weights;
    arena.weights_hash = counts.weights_hash;
    for (own, &given) in arena.given.iter_mut().zip(&counts.given) {
        *own = given as u32;
    }
    state.since_average = counts.since_average;
    state.adapting.loss = counts.loss;
    state.adapting.first = counts.first;
    state.adapting.every = counts.every;
}

/// Goes on in a window of lanes that has begun: this rank takes its share of the sums and of the
/// lanes that are left.
fn restore_lanes<'t>(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    counts: &RunCounts,
    tensor: &impl Fn(usize, List) -> Option<&'t [u8]>,
) -> Result<()> {
    let window = counts.lanes.as_ref().and_then(|begun| LaneWindow::resumed(plan, begun));
    let Some((window, parts)) = window else {
        state.arena.window = LaneWindow::of(plan);
        return Ok(());
    };
    let most = window.contributions.iter().map(|own| own.slot + 1).max().unwrap_or(1);
    let slots = window.schedule.slots.max(most) + usize::from(!state.arena.on_host);
    state.arena.hold_slots(plan, slots, |len_bytes, _| Ok(backend.allocate(len_bytes)?))?;
    state.arena.window = Some(window);
    state.arena.micro_steps = 0;
    for param in 0..plan.params.len() {
        for (slot, &part) in parts.iter().enumerate() {
            if let Some(bytes) = tensor(param, List::Lanes(part)) {
                lane_views::restore_lane_sum(state, backend, param, slot, bytes)?;
            }
        }
    }
    Ok(())
}

/// Restores the sums of a parameter's gradients.
fn restore_sums(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    param: usize,
    bytes: &[u8],
) -> Result<()> {
    if !plan.reduces_each() {
        return state.restore_sums(backend, param, bytes);
    }
    let (storage, tensor) = plan.places[param];
    let spec = &plan.storages[storage];
    let stride = sum_stride(spec.grad_dtype());
    if let Some(sums) = &mut state.arena.reduced_sums[storage] {
        for held in spec.held_of_shard(tensor, Extent::Shard) {
            let own = &bytes[held.within(stride)];
            backend.write(sums.as_mut(), held.place(stride).start, own)?;
        }
    }
    Ok(())
}

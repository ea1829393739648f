//! Places of a gradient's sums of lanes: where they are added, saved and restored.

use fusestep_coalesce::HostMemory;
use fusestep_collective::Divisor;
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::Role;
use smallvec::SmallVec;

use crate::error::Result;
use crate::plan::lanes::LaneStep;
use crate::run::memory::absorb::{Absorb, Addend, Addition, SumMemory, absorb, clear, sum_dtype};
use crate::run::memory::device_lanes;
use crate::run::memory::gradient_views::Place;
use crate::run::memory::segment_state::SegmentState;
use crate::run::memory::state::State;

/// Adds a gradient to its lane, and the lane to others once it is complete. With a divisor, the
/// result is the gradient of the update.
pub(crate) fn absorb_lane(
    state: &mut State,
    backend: &dyn Backend,
    param: usize,
    grad: Addend<'_>,
    divisor: Option<Divisor>,
) -> Result<()> {
    let at = state.arena.micro_steps as usize;
    let Some(window) = &state.arena.window else {
        return Ok(());
    };
    // Behind the last micro-batch of a short window, lanes go on without gradients.
    let end = if at + 1 >= window.given_steps { window.schedule.steps.len() } else { at + 1 };
    let steps: SmallVec<[LaneStep; 1]> = match window.schedule.steps.get(at..end) {
        Some(steps) => steps.iter().cloned().collect(),
        None => return Err(state.poison()),
    };
    // Memory that nothing has been added to yet may hold sums of an earlier update.
    let holds = window.schedule.begins_with.iter().any(Option::is_some);
    if state.arena.given[param] == 0 && (at > 0 || holds) {
        clear_sums(state, backend, param)?;
    }
    let weight = state.arena.weight;
    if !state.arena.on_host {
        return device_lanes::absorb(state, backend, param, grad, &steps, divisor);
    }
    let dtype = state.place_of(param).dtype;
    let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
    let Some(mut memory) = lanes_of(state, param, allocate)? else {
        return Ok(());
    };
    let mut grad = grad;
    for (at, step) in steps.iter().enumerate() {
        let divisor = divisor.filter(|_| at + 1 == steps.len());
        let (slot, begins, ends) = (step.slot, step.begins(), step.ends.as_ref());
        memory.absorb(dtype, grad, Addition { weight, slot, begins, ends, last: divisor });
        grad = Addend::Missing;
    }
    Ok(())
}

/// Memory of a gradient's sums on the host, and of the gradient where it lies apart.
fn lanes_of(
    state: &mut State,
    param: usize,
    allocate: impl FnMut(usize) -> Result<Box<dyn Buffer>>,
) -> Result<Option<SumMemory<'_>>> {
    let place = state.place_of(param);
    let region = place.region;
    state.memory_of(&place, allocate)?;
    let own = match region.segment {
        Some(segment) => match &mut state.arena.segments[segment] {
            SegmentState::Here(Some(memory)) => memory.host_mut(),
            _ => None,
        },
        None => {
            let storage = &mut state.storages[region.storage];
            let list = storage.spec.list(Role::Grad);
            list.and_then(|list| storage.lists[list].buffer.host_mut())
        }
    };
    let Some(own) = own.and_then(|own| own.get_mut(place.bytes)) else {
        return Ok(None);
    };
    let mut memory = SumMemory { out: None, slots: SmallVec::new() };
    match state.arena.sums[region.index].as_mut().and_then(|sums| sums.host_mut()) {
        Some(sums) => {
            memory.out = Some(own);
            memory.slots.push(&mut sums[place.sums.clone()]);
        }
        None => memory.slots.push(own),
    }
    for slot in &mut state.arena.slots[region.index] {
        if let Some(slot) = slot.host_mut() {
            memory.slots.push(&mut slot[place.sums.clone()]);
        }
    }
    Ok(Some(memory))
}

/// Makes sure that a gradient has its memory, where the sum over ranks is written.
pub(crate) fn make_room(state: &mut State, backend: &dyn Backend, param: usize) -> Result<()> {
    let place = state.place_of(param);
    let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
    state.memory_of(&place, allocate).map(|_| ())
}

/// Writes what leaves a sum as it is to a parameter's sums.
fn clear_sums(state: &mut State, backend: &dyn Backend, param: usize) -> Result<()> {
    if !state.arena.on_host {
        return device_lanes::clear(state, backend, param);
    }
    let dtype = state.place_of(param).dtype;
    let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
    if let Some(mut memory) = lanes_of(state, param, allocate)? {
        memory.clear(dtype);
    }
    Ok(())
}

/// Writes what leaves a sum as it is in place of a gradient that this rank has not been given, and
/// of its sums.
pub(crate) fn clear_lanes(state: &mut State, backend: &dyn Backend, param: usize) -> Result<()> {
    clear_sums(state, backend, param)?;
    if !state.arena.on_host {
        return make_room(state, backend, param);
    }
    let dtype = state.place_of(param).dtype;
    let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
    let memory = lanes_of(state, param, allocate)?;
    if let Some(out) = memory.and_then(|memory| memory.out) {
        clear(dtype, out);
    }
    Ok(())
}

/// Multiplies a gradient that lies where it is reduced.
pub(crate) fn weigh_gradient(
    state: &mut State,
    backend: &dyn Backend,
    param: usize,
    weight: f64,
) -> Result<()> {
    let place = state.place_of(param);
    // Aligned for elements of any type.
    let mut memory = HostMemory::zeroed(place.bytes.len())?;
    let (bytes, at) = (memory.bytes_mut(), place.bytes.start);
    let Some(buffer) = state.grad_buffer(backend, &place)? else {
        return Ok(());
    };
    backend.read(buffer.as_ref(), at, bytes)?;
    let given = bytes.to_vec();
    let how = Absorb { first: true, weight: Some(weight), last: None };
    absorb(place.dtype, bytes, None, Some(&given), how);
    Ok(backend.write(buffer.as_mut(), at, bytes)?)
}

/// A parameter's sum of lanes, as a checkpoint keeps it.
pub(crate) fn lane_sum(
    state: &State,
    backend: &dyn Backend,
    param: usize,
    slot: usize,
) -> Result<Vec<u8>> {
    let place = state.place_of(param);
    // Aligned for elements of any type.
    let mut memory = HostMemory::zeroed(place.sums.len())?;
    let bytes = memory.bytes_mut();
    if state.arena.given[param] == 0 {
        clear(sum_dtype(place.dtype), bytes);
    } else if let Some(sums) = lane_memory(state, &place, slot) {
        backend.read(sums, place.sums.start, bytes)?;
    }
    Ok(bytes.to_vec())
}

/// The memory of a region's sums in one of its slots.
fn lane_memory<'s>(state: &'s State, place: &Place, slot: usize) -> Option<&'s dyn Buffer> {
    let region = place.region;
    if let Some(at) = slot.checked_sub(1) {
        return state.arena.slots[region.index].get(at).map(|slot| slot.as_ref());
    }
    if let Some(sums) = &state.arena.sums[region.index] {
        return Some(sums.as_ref());
    }
    match region.segment {
        Some(segment) => match &state.arena.segments[segment] {
            SegmentState::Here(memory) => memory.as_deref(),
            _ => None,
        },
        None => {
            let storage = &state.storages[region.storage];
            let list = storage.spec.list(Role::Grad)?;
            Some(storage.lists[list].buffer.as_ref())
        }
    }
}

/// Writes a parameter's sum of lanes back.
pub(crate) fn restore_lane_sum(
    state: &mut State,
    backend: &dyn Backend,
    param: usize,
    slot: usize,
    bytes: &[u8],
) -> Result<()> {
    let place = state.place_of(param);
    if slot == 0 && state.arena.sums[place.region.index].is_none() {
        return state.write_gradient(backend, param, bytes);
    }
    let memory = match slot.checked_sub(1) {
        Some(at) => state.arena.slots[place.region.index].get_mut(at),
        None => state.arena.sums[place.region.index].as_mut(),
    };
    match memory {
        Some(memory) => Ok(backend.write(memory.as_mut(), place.sums.start, bytes)?),
        None => Ok(()),
    }
}

//! Sums of lanes in memory of a device.

use fusestep_collective::Divisor;
use fusestep_launch::{Accumulate, Accumulation, Backend, Buffer};

use crate::error::Result;
use crate::plan::lanes::LaneStep;
use crate::run::memory::absorb::{Addend, clear as clear_bytes, sum_dtype};
use crate::run::memory::device;
use crate::run::memory::gradient_views::Place;
use crate::run::memory::state::State;

/// Adds a gradient to its lane, and the lane to others once it is complete.
pub(crate) fn absorb(
    state: &mut State,
    backend: &dyn Backend,
    param: usize,
    grad: Addend<'_>,
    steps: &[LaneStep],
    divisor: Option<Divisor>,
) -> Result<()> {
    if let Addend::Given(bytes) = grad {
        state.write_gradient(backend, param, bytes)?;
    }
    let is_given = !matches!(grad, Addend::Missing);
    let place = state.place_of(param);
    let mut slots = take_slots(state, &place);
    let mut done = Ok(());
    for (at, step) in steps.iter().enumerate() {
        let divisor = divisor.filter(|_| at + 1 == steps.len());
        let addition = Addition { is_given: is_given && at == 0, step, divisor };
        done = done.and_then(|()| addition.make(state, backend, &place, &mut slots));
    }
    put_back(state, &place, slots);
    done
}

/// Addition of a gradient in device memory.
struct Addition<'a> {
    /// Whether there is a gradient in this micro-batch.
    is_given: bool,
    step: &'a LaneStep,
    divisor: Option<Divisor>,
}

impl Addition<'_> {
    fn make(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        place: &Place,
        slots: &mut [Box<dyn Buffer>],
    ) -> Result<()> {
        let Self { is_given, step, divisor } = *self;
        let weight = state.arena.weight.unwrap_or(1.0);
        let device = device::of_sums(backend)?;
        let (dtype, wide) = (place.dtype, sum_dtype(place.dtype));
        let numel = (place.bytes.len() / dtype.len_bytes()) as u64;
        let at = place.sums.start;
        if is_given && let Some(grads) = state.grad_buffer(backend, place)? {
            let what = if step.begins() {
                Accumulation::First { weight }
            } else {
                Accumulation::Add { weight }
            };
            device.add_gradients(Accumulate {
                dtype,
                sums: (slots[step.slot].as_mut(), at),
                grads: (grads.as_mut(), place.bytes.start),
                numel,
                what,
            })?;
        } else if step.begins() {
            fill(backend, place, slots[step.slot].as_mut())?;
        }
        let mut into = step.slot;
        if let Some(end) = &step.ends {
            for &added in &end.adds {
                let [sums, grads] = two(slots, step.slot, added);
                let what = Accumulation::Add { weight: 1.0 };
                device.add_gradients(Accumulate {
                    dtype: wide,
                    sums: (sums, at),
                    grads: (grads, at),
                    numel,
                    what,
                })?;
            }
            into = end.into;
            if into != step.slot {
                let [from, to] = two(slots, step.slot, into);
                backend.copy(from, at, to, at, place.sums.len())?;
            }
        }
        if let (Some(divisor), Some(grads)) = (divisor, state.grad_buffer(backend, place)?) {
            let what = Accumulation::Mean { divisor: divisor.value() };
            device.add_gradients(Accumulate {
                dtype,
                sums: (slots[into].as_mut(), at),
                grads: (grads.as_mut(), place.bytes.start),
                numel,
                what,
            })?;
        }
        Ok(())
    }
}

/// Writes what leaves a sum as it is to all sums of a parameter; to its gradient where that is the
/// one sum.
pub(crate) fn clear(state: &mut State, backend: &dyn Backend, param: usize) -> Result<()> {
    let place = state.place_of(param);
    let mut slots = take_slots(state, &place);
    if slots.is_empty() {
        let mut zeros = fusestep_coalesce::HostMemory::zeroed(place.bytes.len())?;
        clear_bytes(place.dtype, zeros.bytes_mut());
        return state.write_gradient(backend, param, zeros.bytes());
    }
    let filled = slots.iter_mut().try_for_each(|slot| fill(backend, &place, slot.as_mut()));
    put_back(state, &place, slots);
    filled
}

fn fill(backend: &dyn Backend, place: &Place, slot: &mut dyn Buffer) -> Result<()> {
    // Aligned for elements of any type.
    let mut zeros = fusestep_coalesce::HostMemory::zeroed(place.sums.len())?;
    clear_bytes(sum_dtype(place.dtype), zeros.bytes_mut());
    Ok(backend.write(slot, place.sums.start, zeros.bytes())?)
}

/// Takes the memory of all sums of a region, to be put back.
fn take_slots(state: &mut State, place: &Place) -> Vec<Box<dyn Buffer>> {
    let arena = &mut state.arena;
    let first = arena.sums[place.region.index].take();
    first.into_iter().chain(std::mem::take(&mut arena.slots[place.region.index])).collect()
}

fn put_back(state: &mut State, place: &Place, slots: Vec<Box<dyn Buffer>>) {
    let mut slots = slots.into_iter();
    state.arena.sums[place.region.index] = slots.next();
    state.arena.slots[place.region.index] = slots.collect();
}

/// Two different buffers.
fn two(slots: &mut [Box<dyn Buffer>], one: usize, other: usize) -> [&mut dyn Buffer; 2] {
    let (low, high) = slots.split_at_mut(one.max(other));
    let (low, high) = (low[one.min(other)].as_mut(), high[0].as_mut());
    if one < other { [low, high] } else { [high, low] }
}

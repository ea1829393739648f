//! The reduced gradients of a part of a rank's shard, wherever they lie.

use std::ops::Range;

use fusestep_launch::{Accumulate, Backend, Buffer};
use fusestep_tensor::Role;

use crate::absorb::Absorb;
use crate::arena::SegmentState;
use crate::region::sum_width;
use crate::stage::{Extent, Part};
use crate::{Plan, Result, State};

/// Adds the reduced gradients of a part of this rank's shard to sums on a device that begin at a
/// byte, or puts what these come to in their place.
pub(crate) fn add(
    state: &mut State,
    plan: &Plan,
    backend: &dyn Backend,
    (storage, part): (usize, &Part),
    (sums, sums_at, how): (&mut dyn Buffer, usize, Absorb),
) -> Result<()> {
    let dtype = plan.storages[storage].grad_dtype();
    let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
    let is_given = how.last.is_none();
    each_buffer(state, plan, (storage, part), |buffer, place, range| {
        let done = how.on_device(is_given, |what| {
            backend.accumulate(Accumulate {
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
pub(crate) fn each_buffer(
    state: &mut State,
    plan: &Plan,
    (storage, part): (usize, &Part),
    mut with: impl FnMut(&mut dyn Buffer, usize, Range<usize>) -> Result<()>,
) -> Result<()> {
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
                if let SegmentState::Here(Some(memory)) = &mut state.arena.segments[index] {
                    let place = (start - segment.elements.start) as usize * width;
                    let from = (start - part.elements.start) as usize * width;
                    let to = (end - part.elements.start) as usize * width;
                    with(memory.as_mut(), place, from..to)?;
                }
            }
            return Ok(());
        }
    };
    let buffer = state.storages[storage].lists[list].buffer.as_mut();
    with(buffer, at as usize * width, 0..numel * width)
}

//! Bytes of lists, by the elements of the storage that they hold.

use std::ops::Range;

use fusestep_launch::{Access, BackendError, Batch, HostList, ListBuffer, Stride};

use crate::errors::{FOREIGN, out_of_bounds};

/// The range of storage elements from the first record's start to the last one's end; records are
/// in storage order.
pub(crate) fn covered(batches: &[Batch], offsets: &[u64]) -> Range<u64> {
    let start = |tensor: u32, first_element| offsets[tensor as usize] + first_element;
    let first = batches.iter().find_map(|batch| batch.records.first());
    let last = batches.iter().rev().find_map(|batch| batch.records.last());
    let (Some(first), Some(last)) = (first, last) else {
        return 0..0;
    };
    let end = start(last.tensor, last.first_element) + last.numel;
    start(first.tensor, first.first_element)..end
}

/// The range of bytes that hold `elements`, in memory of `len_bytes` bytes that begins with element
/// `first` of the storage.
///
/// # Errors
/// [`BackendError::OutOfBounds`] if the memory does not hold all elements.
pub(crate) fn place(
    elements: &Range<u64>,
    first: u64,
    stride: Stride,
    len_bytes: usize,
) -> Result<Range<usize>, BackendError> {
    let numel = elements.end - elements.start;
    if numel == 0 {
        return Ok(0..0);
    }
    let bytes = |elements: u64| usize::try_from(stride.bytes(elements)).unwrap_or(usize::MAX);
    let start = elements.start.wrapping_sub(first);
    let end = start.saturating_add(numel);
    if bytes(end) > len_bytes {
        return Err(out_of_bounds(bytes(start), bytes(numel), len_bytes));
    }
    Ok(bytes(start)..bytes(end))
}

/// The given elements of a list whose memory begins with element `first` of the storage.
///
/// # Errors
/// [`BackendError::ForeignBuffer`] if the list's memory is not the host's; those of [`place`].
pub(crate) fn window<'a>(
    list: &'a mut ListBuffer,
    first: u64,
    elements: &Range<u64>,
) -> Result<HostList<'a>, BackendError> {
    let bytes = place(elements, first, list.stride(), list.buffer.len_bytes())?;
    Ok(match list.access() {
        Access::Read => HostList::Read(&list.buffer.host().ok_or(FOREIGN)?[bytes]),
        Access::ReadWrite | Access::Write => {
            HostList::ReadWrite(&mut list.buffer.host_mut().ok_or(FOREIGN)?[bytes])
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fusestep_tensor::{DType, Role};

    #[test]
    fn memory_may_begin_before_behind_or_within_what_is_asked_for() {
        for (elements, first, expected) in [
            (4..8, 0, Ok(16..32)),
            (4..8, 4, Ok(0..16)),
            // The shard lies behind 6 elements of others.
            (4..8, 4u64.wrapping_sub(6), Ok(24..40)),
            (9..9, 77, Ok(0..0)),
            (4..8, 5, Err((usize::MAX, 16))),
            (4..15, 4, Err((0, 44))),
        ] {
            let stride = Stride::of(Role::Param, DType::F32);
            let found = place(&elements, first, stride, 40);
            let expected = expected.map_err(|(at, len)| out_of_bounds(at, len, 40));
            assert_eq!(found, expected, "{elements:?} from {first}");
        }
    }
}

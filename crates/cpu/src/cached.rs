//! Sums over parameters, kept from one step to the next.
//!
//! LARS needs the norm of every parameter before it updates it. The last update had the parameter
//! at hand and has already taken its sum ([`fusestep_launch::NormedKernel::param_sum`]). Using this
//! sum saves a read of all parameters, if nobody has written them in between. Each buffer counts
//! how often it was borrowed for writing, which tells.

use fusestep_launch::{CHUNK_ELEMENTS, Launch, ListBuffer};
use fusestep_tensor::Role;

use crate::buffer::HostBuffer;
use crate::param_sums::{ParamSums, Written};

impl ParamSums {
    /// The sums that the launch's parameters carry; [`ParamSums::keep`] gives them back after the
    /// update. `None` if the kernel has no use for sums, or if the parameters are not kept here.
    /// Sums over parameters that have changed since are marked as not valid.
    pub(crate) fn take(launch: &mut Launch<'_>) -> Option<Self> {
        launch.kernel.normed()?.param_sum()?;
        let written = Written::of(launch.lists)?;
        let list = launch.lists.iter().find(|list| list.role() == Role::Param)?;
        let end = (list.buffer.len_bytes() / list.dtype().len_bytes()) as u64;
        let starts = || starts(launch.offsets, end);
        let sums = param(launch.lists)?.sums.take();
        let mut sums = match sums.filter(|sums| starts().eq(sums.starts.iter().copied())) {
            Some(sums) => sums,
            None => Self::new(starts().collect()),
        };
        if sums.of.take() != Some(written) {
            for valid in &mut sums.valid {
                *valid.get_mut() = false;
            }
        }
        Some(sums)
    }

    /// Leaves the sums with the parameters. Only the launch may have written the parameters since
    /// the sums were taken.
    pub(crate) fn keep(mut self, lists: &mut [ListBuffer]) {
        self.of = Written::of(lists);
        if let Some(buffer) = param(lists) {
            buffer.sums = Some(self);
        }
    }
}

/// The places where the sums of each tensor start. Tensors lie at these `offsets` of a storage that
/// ends at `end`, padding included.
fn starts(offsets: &[u64], end: u64) -> impl Iterator<Item = usize> {
    let ends = offsets.iter().skip(1).copied().chain([end]);
    let chunks = offsets.iter().zip(ends).map(|(&start, end)| {
        // The storage lies in host memory, so its element counts fit a usize.
        end.saturating_sub(start).div_ceil(u64::from(CHUNK_ELEMENTS)) as usize
    });
    std::iter::once(0).chain(chunks.scan(0, |start, chunks| {
        *start += chunks;
        Some(*start)
    }))
}

impl Written {
    /// The counts of these lists at this moment; `None` if a list is not memory of this backend.
    fn of(lists: &[ListBuffer]) -> Option<Self> {
        let mut param = None;
        let mut beside = None;
        for list in lists {
            let place = match list.role() {
                Role::Param => &mut param,
                Role::Master | Role::Remainder => &mut beside,
                _ => continue,
            };
            let buffer = list.buffer.as_any().downcast_ref::<HostBuffer>()?;
            *place = Some(buffer.times_borrowed());
        }
        Some(Self { param: param?, beside })
    }
}

fn param(lists: &mut [ListBuffer]) -> Option<&mut HostBuffer> {
    let list = lists.iter_mut().find(|list| list.role() == Role::Param)?;
    list.buffer.as_any_mut().downcast_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tensor_goes_on_to_the_end_of_its_storage() {
        for (offsets, end, expected) in [
            (&[0, 64, 128][..], 128 + 65_537, &[0, 1, 2, 4][..]),
            (&[0, 64, 70_000], 70_000, &[0, 1, 3, 3]),
            (&[0], 65_536, &[0, 1]),
            (&[], 0, &[0]),
        ] {
            let starts: Vec<usize> = starts(offsets, end).collect();
            assert_eq!(starts, expected);
            let sums = ParamSums::new(starts);
            let numel = |tensor: usize| offsets.get(tensor + 1).unwrap_or(&end) - offsets[tensor];
            for tensor in 0..offsets.len() {
                let cached = sums.of(tensor, numel(tensor)).map(|sums| sums.chunks.len());
                assert_eq!(cached, Some(numel(tensor).div_ceil(65_536) as usize));
            }
            assert!(sums.of(offsets.len(), 1).is_none());
        }
    }
}

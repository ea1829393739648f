//! Records of all batches as one piece of work. It can be cut at any element, or only between
//! chunks if sums are taken over the changes.

use fusestep_elementwise::Tensor;
use fusestep_launch::{
    BackendError, Batch, CHUNK_ELEMENTS, HostCall, HostList, HostRun, HostSpan, HostSpans, Launch,
    MAX_LISTS, MultiTensorKernel, Places, Stride,
};
use fusestep_simd::Split;

use crate::update_sums::{Rows, rows};
use crate::window::{covered, window};

/// Unit of cuts: they lie on multiples of this many elements, so that two threads never write one
/// cache line, whatever the dtype.
pub(crate) const CUT_ELEMENTS: u64 = 1024;

/// Part of a launch with the elements `first..end` of the storage.
pub(crate) struct Pieces<'a> {
    kernel: &'a dyn MultiTensorKernel,
    call: HostCall<'a>,
    batches: &'a [Batch],
    places: Places<'a>,
    /// Each list's elements `first..end`.
    lists: [HostList<'a>; MAX_LISTS],
    /// The way in which elements lie in each list.
    strides: [Stride; MAX_LISTS],
    first: u64,
    end: u64,
    /// Rows of sums for the chunks in `first..end`.
    sums: Option<Rows<'a>>,
}

impl<'a> Pieces<'a> {
    /// All elements of a launch.
    ///
    /// # Errors
    /// [`BackendError::ForeignBuffer`] if a list's memory is not the host's,
    /// [`BackendError::OutOfBounds`] if a list is shorter than the batches need.
    pub(crate) fn new(launch: Launch<'a>, call: HostCall<'a>) -> Result<Self, BackendError> {
        let (batches, offsets, firsts) = (launch.batches, launch.offsets, launch.firsts);
        let records = batches.iter().flat_map(|batch| &batch.records);
        let starts = records.map(|record| record.first_element);
        let sums = rows(launch.update_sums, offsets, starts)?;
        // Only elements that the batches cover count as work: one small tensor must not wake the
        // pool.
        let elements = covered(batches, offsets);
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        let mut strides = [Stride::default(); MAX_LISTS];
        let buffers = launch.lists.iter_mut().enumerate();
        for ((list, stride), (index, buffer)) in lists.iter_mut().zip(&mut strides).zip(buffers) {
            *stride = buffer.stride();
            let first = firsts.get(index).copied().unwrap_or(0);
            *list = window(buffer, first, &elements)?;
        }
        let sums = sums.map(|sums| sums.cut(offsets, elements.start).1);
        Ok(Self {
            kernel: launch.kernel,
            call,
            batches,
            places: Places { offsets, members: launch.members },
            lists,
            strides,
            first: elements.start,
            end: elements.end,
            sums,
        })
    }

    /// Cuts at element `at` of the storage, which lies in `first..=end`.
    fn cut(mut self, at: u64) -> (Self, Self) {
        let at = at.clamp(self.first, self.end);
        let mut right_lists: [HostList<'a>; MAX_LISTS] = Default::default();
        let rights = right_lists.iter_mut().zip(self.strides);
        for (list, (right, stride)) in self.lists.iter_mut().zip(rights) {
            // The buffers' lengths fit a usize, and `at` lies within them.
            let len_bytes = stride.len_bytes((at - self.first) as usize);
            (*list, *right) = std::mem::take(list).split_at(len_bytes);
        }
        let offsets = self.places.offsets;
        let (left_sums, right_sums) = match self.sums.take() {
            Some(sums) => {
                let (left, right) = sums.cut(offsets, at);
                (Some(left), Some(right))
            }
            None => (None, None),
        };
        let right = Self {
            sums: right_sums,
            lists: right_lists,
            first: at,
            kernel: self.kernel,
            call: self.call,
            batches: self.batches,
            places: self.places,
            strides: self.strides,
            end: self.end,
        };
        let left = Self { end: at, sums: left_sums, ..self };
        (left, right)
    }
}

impl Split for Pieces<'_> {
    fn elements(&self) -> u64 {
        self.end - self.first
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let at = self.first + elements;
        match self.sums {
            Some(_) => {
                let at = end_of_chunk(self.places.offsets, at);
                self.cut(at)
            }
            None => self.cut(at.next_multiple_of(CUT_ELEMENTS)),
        }
    }

    fn run(mut self) {
        let spans = HostSpans::of(self.batches, self.places, self.first, self.end);
        match self.sums {
            Some(sums) => {
                let (mut lists, mut sums) = (self.lists, sums);
                for span in spans {
                    let mut own: [HostList<'_>; MAX_LISTS] = Default::default();
                    for ((own, list), stride) in own.iter_mut().zip(&mut lists).zip(self.strides) {
                        *own = list.part(stride.place(span.start..span.start + span.numel));
                    }
                    let HostSpan { numel, group, parameter, first_element, .. } = span;
                    let first = self.first + span.start as u64;
                    let tensor = Tensor {
                        kernel: self.kernel,
                        call: self.call,
                        group,
                        numel,
                        parameter,
                        first_element,
                        lists: own,
                        cached: None,
                        grad_sum: None,
                        sums: None,
                        update_sums: sums.of(self.places.offsets, first, numel),
                    };
                    tensor.run();
                }
            }
            None => {
                let run = HostRun::new(self.call, &mut self.lists, spans);
                self.kernel.run_host(run)
            }
        }
    }
}

/// The end of the chunk that contains storage element `at` or ends there. It may lie behind the
/// tensor's last element.
fn end_of_chunk(offsets: &[u64], at: u64) -> u64 {
    let tensor = offsets.partition_point(|&offset| offset < at);
    let start = tensor.checked_sub(1).and_then(|tensor| offsets.get(tensor));
    let start = start.copied().unwrap_or(0);
    let end = start + (at - start).next_multiple_of(u64::from(CHUNK_ELEMENTS));
    let next = offsets.get(tensor).copied();
    end.min(next.unwrap_or(u64::MAX))
}

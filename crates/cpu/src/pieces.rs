//! The records of all batches as one piece of work that can be cut at any element, or at any chunk if sums are taken over what it
//! changes.

use fusestep_elementwise::Tensor;
use fusestep_launch::{
    Access, Batch, CHUNK_ELEMENTS, HostCall, HostList, HostSpan, HostSpans, ListBuffer, MAX_LISTS,
    MultiTensorKernel, Places, Record,
};
use fusestep_simd::Split;

use crate::update_sums::Slots;

/// Cuts lie on multiples of this many elements, so that two threads never write one cache line of any dtype.
const CUT_ELEMENTS: u64 = 1024;

/// The part of a launch whose elements lie in `first..end` of the storage.
pub(crate) struct Pieces<'a> {
    kernel: &'a dyn MultiTensorKernel,
    call: HostCall<'a>,
    batches: &'a [Batch],
    places: Places<'a>,
    /// Each list's elements `first..end`.
    lists: [HostList<'a>; MAX_LISTS],
    /// Bytes of one element of each list.
    widths: [usize; MAX_LISTS],
    first: u64,
    end: u64,
    /// Of the chunks in `first..end`.
    sums: Option<Slots<'a>>,
}

impl<'a> Pieces<'a> {
    /// All of a launch; `None` if a list's memory is not the host's.
    pub(crate) fn new(
        kernel: &'a dyn MultiTensorKernel,
        call: HostCall<'a>,
        batches: &'a [Batch],
        places: Places<'a>,
        buffers: &'a mut [ListBuffer],
        sums: Option<Slots<'a>>,
    ) -> Option<Self> {
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        let mut widths = [0; MAX_LISTS];
        let mut end = u64::MAX;
        for ((list, width), buffer) in lists.iter_mut().zip(&mut widths).zip(buffers) {
            *width = buffer.dtype().len_bytes();
            end = end.min((buffer.buffer.len_bytes() / *width) as u64);
            *list = match buffer.access() {
                Access::Read => HostList::Read(buffer.buffer.host()?),
                Access::ReadWrite | Access::Write => HostList::ReadWrite(buffer.buffer.host_mut()?),
            };
        }
        let whole = Self {
            kernel,
            call,
            batches,
            places,
            lists,
            widths,
            first: 0,
            end,
            sums,
        };
        // Only what the batches cover counts as work: a launch of one small tensor must not wake the team.
        let (start, stop) = (whole.start_of_first()?, whole.end_of_last()?);
        Some(whole.cut(start).1.cut(stop).0)
    }

    fn start_of_first(&self) -> Option<u64> {
        let first = self.batches.first().and_then(|batch| batch.records.first());
        Some(first.map_or(0, |record| self.span(record).0))
    }

    fn end_of_last(&self) -> Option<u64> {
        let last = self.batches.last().and_then(|batch| batch.records.last());
        Some(last.map_or(0, |record| self.span(record).1))
    }

    /// The storage elements of a record.
    fn span(&self, record: &Record) -> (u64, u64) {
        let start = self.places.offsets[record.tensor as usize] + record.first_element;
        (start, start + record.numel)
    }

    /// Cuts at element `at` of the storage, which lies in `first..=end`.
    fn cut(mut self, at: u64) -> (Self, Self) {
        let at = at.clamp(self.first, self.end);
        let mut right_lists: [HostList<'a>; MAX_LISTS] = Default::default();
        for ((list, right), width) in self.lists.iter_mut().zip(&mut right_lists).zip(self.widths) {
            // The buffers' lengths fit a usize, and `at` lies within them.
            let len_bytes = (at - self.first) as usize * width;
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
            widths: self.widths,
            end: self.end,
        };
        let left = Self {
            end: at,
            sums: left_sums,
            ..self
        };
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

    fn run(self) {
        let spans = HostSpans::of(self.batches, self.places, self.first, self.end);
        match self.sums {
            Some(sums) => {
                let (mut lists, mut sums) = (self.lists, sums);
                for span in spans {
                    let mut own: [HostList<'_>; MAX_LISTS] = Default::default();
                    for ((own, list), width) in own.iter_mut().zip(&mut lists).zip(self.widths) {
                        *own = list.part(span.start * width..(span.start + span.numel) * width);
                    }
                    let HostSpan {
                        numel,
                        class,
                        parameter,
                        first_element,
                        ..
                    } = span;
                    let first = self.first + span.start as u64;
                    let tensor = Tensor {
                        kernel: self.kernel,
                        call: self.call,
                        class,
                        numel,
                        parameter,
                        first_element,
                        lists: own,
                        carried: None,
                        grad_sum: None,
                        update_sums: sums.of(self.places.offsets, first, numel),
                    };
                    tensor.run();
                }
            }
            None => self.kernel.run_host(self.call, self.lists, spans),
        }
    }
}

/// The end of the chunk of a tensor that has storage element `at`, or that ends there; it may lie behind the tensor's last element.
fn end_of_chunk(offsets: &[u64], at: u64) -> u64 {
    let tensor = offsets.partition_point(|&offset| offset < at);
    let start = tensor.checked_sub(1).and_then(|tensor| offsets.get(tensor));
    let start = start.copied().unwrap_or(0);
    let end = start + (at - start).next_multiple_of(u64::from(CHUNK_ELEMENTS));
    let next = offsets.get(tensor).copied();
    end.min(next.unwrap_or(u64::MAX))
}

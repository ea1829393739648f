//! Tensors in host memory, as one thread updates them.

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use bytemuck::Pod;
use fusestep_simd::Level;

use crate::{Batch, CHUNK_ELEMENTS, Record};

/// Most tensor lists of one kernel: AMSGrad with codes, units and masters has as many.
pub const MAX_LISTS: usize = 9;

/// The settings and scalars that all parts of one launch share.
#[derive(Clone, Copy, Debug)]
pub struct HostCall<'a> {
    /// The instruction set to use.
    pub level: Level,
    /// The kernel's scalars, as it wrote them.
    pub scalars: &'a [u8],
    /// Factor on every gradient, rounded once to the compute type: loss scaling and clipping; 1
    /// changes nothing.
    pub grad_factor: f64,
    /// The kernel's step scalars, group after group, as it wrote them; a tensor names its own by
    /// [`HostSpan::group`].
    pub step_scalars: &'a [u8],
    /// Places for Σ (new − old)² over each leaf of the fixed tree, as the bits of an f64; `None` if
    /// nobody asks. With places the call has one span, which begins with a chunk of its tensor and
    /// is no longer than that.
    pub changes: Option<&'a LeafSums>,
    /// Places for Σ p² over each leaf of the new parameters, or of their masters where there are
    /// some. Otherwise as `changes`. These are the sums of [`crate::NormedKernel::param_sum`].
    pub squares: Option<&'a LeafSums>,
}

impl<'a> HostCall<'a> {
    /// The bytes of step scalars from a group's first on, if each group has `len_bytes` of them.
    #[inline(always)]
    pub fn step_scalars_of(&self, group: u32, len_bytes: usize) -> &'a [u8] {
        match self.step_scalars.get(group as usize * len_bytes..) {
            Some(bytes) => bytes,
            None => unknown(),
        }
    }
}

/// The sums over the leaves of a chunk.
pub type LeafSums = [AtomicU64; CHUNK_LEAVES];

/// Leaves of a chunk.
pub const CHUNK_LEAVES: usize = 64;

/// Elements of a leaf of the fixed tree, counted from the start of its tensor.
pub const LEAF_ELEMENTS: u64 = CHUNK_ELEMENTS as u64 / CHUNK_LEAVES as u64;

/// The bytes of one list.
#[derive(Debug, Default)]
pub enum HostList<'a> {
    /// The kernel has no such list.
    #[default]
    Absent,
    /// Read only.
    Read(&'a [u8]),
    /// Read and written.
    ReadWrite(&'a mut [u8]),
}

/// Bytes of gradients that an update asks [`AcrossRanks`] for at a time: as many as a reduction
/// takes in one go. They lie in the first-level cache between reduction, update and copy, and are
/// so few that the memory serves all streams alike: a step of two ranks takes 5 to 8 % longer with
/// 1,024 in place of 512, and half as long again with 32 KiB.
pub const ACROSS_BYTES: usize = 512;

/// The other ranks, as an update that reduces its own gradients needs them.
pub trait AcrossRanks: std::fmt::Debug {
    /// The average over all ranks of these elements of the lists, of at most
    /// [`ACROSS_BYTES`] bytes.
    fn gradients(&mut self, elements: Range<usize>) -> &[u8];

    /// Takes the new values of list `list` from element `start` on to the ranks that keep them,
    /// too.
    fn updated(&mut self, list: usize, start: usize, values: &[u8]);
}

impl<'a> HostList<'a> {
    /// Bytes of the list, for reading; empty if the list is absent.
    pub fn bytes(&self) -> &[u8] {
        match self {
            HostList::Absent => &[],
            HostList::Read(bytes) => bytes,
            HostList::ReadWrite(bytes) => bytes,
        }
    }

    /// Elements of the list as a slice of `T`, for reading.
    ///
    /// # Panics
    /// If the list is absent, or its bytes are not aligned elements of `T`. Backends bring lists of
    /// the dtypes that the kernel declares.
    pub fn elements<T: Pod>(self) -> &'a [T] {
        match self {
            HostList::Read(bytes) => bytemuck::cast_slice(bytes),
            HostList::ReadWrite(bytes) => bytemuck::cast_slice(bytes),
            HostList::Absent => panic!("the kernel asked for a list that it did not declare"),
        }
    }

    /// Elements of the list as a mutable slice of `T`, for updates in place.
    ///
    /// # Panics
    /// If the list is absent, read only, or its bytes are not aligned elements of `T`.
    pub fn elements_mut<T: Pod>(self) -> &'a mut [T] {
        match self {
            HostList::ReadWrite(bytes) => bytemuck::cast_slice_mut(bytes),
            _ => panic!("the kernel asked to write a list that it declared as read only"),
        }
    }

    /// [`HostList::elements_mut`] of the next of a kernel's lists, which is taken.
    ///
    /// # Panics
    /// As [`HostList::elements_mut`], and if there is no list left.
    // One for each type: within a kernel's loop it would be compiled for every rule and format.
    #[inline(never)]
    pub fn take_mut<T: Pod>(lists: &mut std::slice::IterMut<'_, HostList<'a>>) -> &'a mut [T] {
        lists.next().map(std::mem::take).unwrap_or_default().elements_mut()
    }

    /// Part of the list: its bytes in `range`, with the same access. An absent list gives an absent
    /// part.
    ///
    /// # Panics
    /// If `range` reaches beyond the list's end.
    pub fn part(&mut self, range: Range<usize>) -> HostList<'_> {
        match self {
            HostList::Absent => HostList::Absent,
            HostList::Read(bytes) => HostList::Read(&bytes[range]),
            HostList::ReadWrite(bytes) => HostList::ReadWrite(&mut bytes[range]),
        }
    }

    /// Cuts the list into its first `len_bytes` bytes and the rest. An absent list gives two absent
    /// ones.
    ///
    /// # Panics
    /// If the list is shorter.
    #[inline]
    pub fn split_at(self, len_bytes: usize) -> (Self, Self) {
        match self {
            HostList::Absent => (HostList::Absent, HostList::Absent),
            HostList::Read(bytes) => {
                let (left, right) = bytes.split_at(len_bytes);
                (HostList::Read(left), HostList::Read(right))
            }
            HostList::ReadWrite(bytes) => {
                let (left, right) = bytes.split_at_mut(len_bytes);
                (HostList::ReadWrite(left), HostList::ReadWrite(right))
            }
        }
    }
}

/// Tensors, or parts of them, that one thread updates.
#[derive(Debug)]
pub struct HostRun<'a, 'b> {
    /// The settings and scalars that all parts of the launch share.
    pub call: HostCall<'b>,
    /// The kernel's lists, in its order and of one numel, which it takes. They stay where they are
    /// from caller to kernel: a small tensor feels every copy of all of them.
    pub lists: &'b mut [HostList<'a>; MAX_LISTS],
    /// The places of the tensors in the lists. How tensors were cut into spans changes no bit.
    pub spans: HostSpans<'b>,
    /// The other ranks, if gradients are reduced here; then the list of gradients is not read.
    pub across: Option<&'b mut (dyn AcrossRanks + 'a)>,
}

impl<'a, 'b> HostRun<'a, 'b> {
    /// An update from gradients in their list.
    pub fn new(
        call: HostCall<'b>,
        lists: &'b mut [HostList<'a>; MAX_LISTS],
        spans: HostSpans<'b>,
    ) -> Self {
        Self { call, lists, spans, across: None }
    }
}

/// Consecutive elements of one tensor, at the same place in every list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSpan {
    /// First element within the lists.
    pub start: usize,
    /// Element count, at least 1.
    pub numel: usize,
    /// Index of the tensor's group in [`HostCall::step_scalars`].
    pub group: u32,
    /// The tensor's position among the caller's parameters.
    pub parameter: u32,
    /// The parameter's elements before these.
    pub first_element: u64,
}

impl HostSpan {
    /// At most `most` elements of this span, from its element `first` on.
    #[inline(always)]
    pub fn part(&self, first: usize, most: usize) -> Self {
        Self {
            start: self.start + first,
            numel: most.min(self.numel - first),
            first_element: self.first_element + first as u64,
            ..*self
        }
    }
}

/// The tensors, or parts of them, that a host call updates, in the order they lie in the lists.
///
/// A type of its own and not any iterator: the kernel's loop inlines it, which a small tensor
/// feels.
#[derive(Clone, Debug)]
pub struct HostSpans<'a> {
    /// A tensor by itself.
    single: Option<HostSpan>,
    batches: std::slice::Iter<'a, Batch>,
    records: std::slice::Iter<'a, Record>,
    groups: &'a [u32],
    offsets: &'a [u64],
    members: &'a [u32],
    /// The storage elements that the lists hold.
    first: u64,
    end: u64,
}

/// The places of tensors in a storage, and their positions among the parameters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Places<'a> {
    /// First element of each tensor.
    pub offsets: &'a [u64],
    /// Each tensor's position among the caller's parameters.
    pub members: &'a [u32],
}

impl<'a> HostSpans<'a> {
    /// One tensor, parameter 0, that fills the lists.
    pub fn one(numel: usize, group: u32) -> Self {
        Self::part(numel, group, 0, 0)
    }

    /// A part of one tensor that fills the lists: which parameter it belongs to and how many of its
    /// elements come before.
    pub fn part(numel: usize, group: u32, parameter: u32, first_element: u64) -> Self {
        let span = HostSpan { start: 0, numel, group, parameter, first_element };
        Self { single: (numel > 0).then_some(span), ..Self::of(&[], Places::default(), 0, 0) }
    }

    /// The elements of these batches in `first..end` of the storage, for lists that hold exactly
    /// this range. Elements between tensors are passed over.
    pub fn of(batches: &'a [Batch], places: Places<'a>, first: u64, end: u64) -> Self {
        let Places { offsets, members } = places;
        let behind = |record: &Record| span(offsets, record).1 <= first;
        let skipped = batches.partition_point(|batch| batch.records.last().is_none_or(behind));
        let mut batches = batches[skipped..].iter();
        let (records, groups) = match batches.next() {
            Some(batch) => {
                let skipped = batch.records.partition_point(behind);
                (batch.records[skipped..].iter(), batch.groups.as_slice())
            }
            None => ([].iter(), [].as_slice()),
        };
        Self { single: None, batches, records, groups, offsets, members, first, end }
    }
}

impl Iterator for HostSpans<'_> {
    type Item = HostSpan;

    #[inline(always)]
    fn next(&mut self) -> Option<HostSpan> {
        if let Some(single) = self.single.take() {
            return Some(single);
        }
        let record = match self.records.next() {
            Some(record) => record,
            None => self.next_batch()?,
        };
        let (Some(&offset), Some(&group), Some(&parameter)) = (
            self.offsets.get(record.tensor as usize),
            self.groups.get(usize::from(record.group)),
            self.members.get(record.tensor as usize),
        ) else {
            unknown()
        };
        let start = offset + record.first_element;
        let stop = (start + record.numel).min(self.end);
        let start = start.max(self.first);
        if start >= stop {
            return None;
        }
        Some(HostSpan {
            // The lists lie in memory, so their element counts fit a usize.
            start: (start - self.first) as usize,
            numel: (stop - start) as usize,
            group,
            parameter,
            first_element: start - offset,
        })
    }
}

impl<'a> HostSpans<'a> {
    /// The first record of the next batch that has any.
    ///
    /// Not part of the loops that all rules have for all formats.
    #[inline(never)]
    fn next_batch(&mut self) -> Option<&'a Record> {
        loop {
            let batch = self.batches.next()?;
            self.records = batch.records.iter();
            self.groups = &batch.groups;
            if let Some(record) = self.records.next() {
                return Some(record);
            }
        }
    }
}

/// The panic of all places: a loop has one call of it.
#[cold]
#[inline(never)]
fn unknown() -> ! {
    panic!("expected records of tensors and groups that the call knows");
}

/// First and one past last storage element of a record.
#[inline(always)]
fn span(offsets: &[u64], record: &Record) -> (u64, u64) {
    let start = offsets[record.tensor as usize] + record.first_element;
    (start, start + record.numel)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches() -> Vec<Batch> {
        let record =
            |tensor, numel| Record { tensor, first_element: 0, numel, first_chunk: 0, group: 0 };
        let batch = |records, group| Batch { records, groups: vec![group], chunks: 1 };
        vec![batch(vec![record(0, 5), record(2, 3)], 7), batch(vec![record(3, 10)], 8)]
    }

    #[test]
    fn spans_cover_what_lies_in_the_range_and_nothing_else() {
        let (batches, offsets) = (batches(), [0, 64, 64, 128, 192]);
        let places = Places { offsets: &offsets, members: &[9, 4, 6, 5] };
        let spans = |first, end| -> Vec<(usize, usize, u32)> {
            HostSpans::of(&batches, places, first, end)
                .map(|span| (span.start, span.numel, span.group))
                .collect()
        };
        assert_eq!(spans(0, 192), [(0, 5, 7), (64, 3, 7), (128, 10, 8)]);
        assert_eq!(spans(2, 65), [(0, 3, 7), (62, 1, 7)]);
        assert_eq!(spans(65, 130), [(0, 2, 7), (63, 2, 8)]);
        assert_eq!(spans(5, 64), []);
        assert_eq!(spans(138, 192), []);
        let origins = |places| -> Vec<(u32, u64)> {
            HostSpans::of(&batches, places, 65, 130)
                .map(|span| (span.parameter, span.first_element))
                .collect()
        };
        assert_eq!(origins(places), [(6, 1), (5, 0)]);
        assert_eq!(HostSpans::one(0, 0).count(), 0);
        assert_eq!(HostSpans::one(9, 4).next().map(|span| span.group), Some(4));
    }
}

//! Tensors of a launch: whole tensors, or their parts that lie in the launch's batches.

use std::ops::Range;

use fusestep_elementwise::Cached;
use fusestep_launch::{Batch, Record, UnitSums};

use crate::param_sums::ParamSums;
use crate::update_sums::Rows;

/// Least elements for the pool to work on one tensor together, if other threads have tensors of
/// their own. Below that, waking the pool costs more than it saves.
const LARGE_ELEMENTS: u64 = 128 * 1024;

/// Least elements for the pool to work on a tensor that is more than a thread's fair share of all,
/// for example the only tensor. Other threads would do nothing meanwhile. From Python, a step of
/// AdamW on 100,000 elements and two threads takes 0.85 of the time (`python step.py turns`).
const LARGE_ALONE_ELEMENTS: u64 = 32 * 1024;

/// Divisor of a thread's share of the work: a tensor with more elements than the quotient would
/// keep other threads waiting at the end. Work of the whole pool costs two hand-overs, at which all
/// threads wait for the last. With 16 in place of 5, LARS took a tenth longer on ResNet-50.
const TENSORS_PER_THREAD: u64 = 5;

/// A tensor of a launch, or the part of it in the launch, put together from the records into which
/// batches cut it.
#[derive(Clone, Copy)]
pub(crate) struct Whole {
    pub(crate) tensor: u32,
    /// Number of the tensor's elements before this part; 0 unless the launch holds only a part of
    /// the tensor.
    pub(crate) first_element: u64,
    pub(crate) numel: u64,
    pub(crate) group: u32,
}

impl Whole {
    /// Whether the pool works on this tensor together; `large` is the element count from which on
    /// it does.
    pub(crate) fn is_large(&self, large: u64) -> bool {
        self.numel >= large
    }

    pub(crate) fn cached<'a>(&self, sums: Option<&'a ParamSums>) -> Option<Cached<'a>> {
        sums?.of(self.tensor as usize, self.numel)
    }

    pub(crate) fn update_sums<'a>(
        &self,
        rows: &'a mut Option<Rows<'_>>,
    ) -> Option<&'a mut [UnitSums]> {
        let rows = rows.as_mut()?;
        rows.of_part(self.tensor, self.first_element, self.numel)
    }

    /// The elements of the storage that the tensor occupies.
    pub(crate) fn span(&self, offsets: &[u64]) -> Range<u64> {
        let start = offsets[self.tensor as usize] + self.first_element;
        start..start + self.numel
    }
}

/// Tensors of consecutive batches, in order.
#[derive(Clone, Copy)]
pub(crate) struct Tensors<'a> {
    batches: &'a [Batch],
    /// Number of records of the first batch that are already over.
    gone: usize,
    /// Number of records left in all batches.
    left: usize,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(batches: &'a [Batch]) -> Self {
        Self { batches, gone: 0, left: batches.iter().map(|batch| batch.records.len()).sum() }
    }

    /// These tensors without `rest`, which is their end.
    pub(crate) fn before(self, rest: Self) -> Self {
        Self { left: self.left - rest.left, ..self }
    }

    fn record(&mut self) -> Option<(&'a Batch, &'a Record)> {
        if self.left == 0 {
            return None;
        }
        loop {
            let (batch, rest) = self.batches.split_first()?;
            if let Some(record) = batch.records.get(self.gone) {
                self.gone += 1;
                self.left -= 1;
                return Some((batch, record));
            }
            self.batches = rest;
            self.gone = 0;
        }
    }
}

impl Iterator for Tensors<'_> {
    type Item = Whole;

    fn next(&mut self) -> Option<Whole> {
        let (batch, record) = self.record()?;
        let mut whole = Whole {
            tensor: record.tensor,
            first_element: record.first_element,
            numel: record.numel,
            group: batch.groups[usize::from(record.group)],
        };
        // Most tensors are one record, with a record of another tensor behind it.
        let next = batch.records.get(self.gone);
        if next.is_some_and(|next| next.tensor != whole.tensor) {
            return Some(whole);
        }
        let mut ahead = *self;
        while let Some((_, more)) = ahead.record()
            && more.tensor == whole.tensor
            && more.first_element == whole.first_element + whole.numel
        {
            whole.numel += more.numel;
            *self = ahead;
        }
        Some(whole)
    }
}

/// Division of tensors into large and small ones.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Element count from which on the whole pool works on one tensor. Each smaller tensor belongs
    /// to one thread, so no thread waits for another between the sums of a tensor and its update.
    /// There are enough small tensors to keep all threads busy.
    pub(crate) large: u64,
    /// Number of elements of all small tensors.
    pub(crate) small: u64,
    pub(crate) has_large: bool,
    /// The first part of a tensor that lacks the tensor's beginning, if there is one.
    pub(crate) part: Option<Whole>,
}

impl Sizes {
    /// Divides tensors, of which there may be thousands; it looks at each only once if none is
    /// large.
    pub(crate) fn of(tensors: Tensors<'_>, threads: usize) -> Self {
        let (mut total, mut largest, mut part) = (0, 0, None);
        for whole in tensors {
            total += whole.numel;
            largest = largest.max(whole.numel);
            if whole.first_element > 0 {
                part = part.or(Some(whole));
            }
        }
        let threads = threads as u64;
        let is_most = threads > 1 && largest.saturating_mul(threads) > total;
        let least = if is_most { LARGE_ALONE_ELEMENTS } else { LARGE_ELEMENTS };
        let large = (total / (threads * TENSORS_PER_THREAD)).max(least);
        let has_large = largest >= large;
        let small = if has_large {
            let small = tensors.filter(|whole| !whole.is_large(large));
            small.map(|whole| whole.numel).sum()
        } else {
            total
        };
        Self { large, small, has_large, part }
    }

    /// The large tensors among `tensors`, which must be those that were divided.
    pub(crate) fn large_ones<'a>(&self, tensors: Tensors<'a>) -> impl Iterator<Item = Whole> + 'a {
        let large = self.large;
        let all = self.has_large.then_some(tensors).into_iter().flatten();
        all.filter(move |whole| whole.is_large(large))
    }
}

//! The tensors of a launch, whole or what of them lies in its batches.

use std::ops::Range;

use fusestep_elementwise::Cached;
use fusestep_launch::{Batch, Record, UnitSums};

use crate::cached::ParamSums;
use crate::update_sums::Rows;

/// Below this many elements the pool never works on one tensor together: waking it costs more than
/// it saves.
const LARGE_ELEMENTS: u64 = 128 * 1024;

/// A tensor of more than a thread's work divided by this would leave the other threads waiting for
/// its own at the end. What the pool does together costs two hand-overs, at which all wait for the
/// last: with 16 here LARS took a tenth longer on ResNet-50.
const TENSORS_PER_THREAD: u64 = 5;

/// A tensor of a launch, or the part of it that lies there, put together from the records that its
/// batches cut it into.
#[derive(Clone, Copy)]
pub(crate) struct Whole {
    pub(crate) tensor: u32,
    /// Elements of the tensor before these: 0 unless the launch holds only a part of it.
    pub(crate) first_element: u64,
    pub(crate) numel: u64,
    pub(crate) group: u32,
}

impl Whole {
    /// Whether the pool works on it together, where tensors from `large` elements on are.
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

    /// The elements of the storage.
    pub(crate) fn span(&self, offsets: &[u64]) -> Range<u64> {
        let start = offsets[self.tensor as usize] + self.first_element;
        start..start + self.numel
    }
}

/// Tensors of consecutive batches, in order.
#[derive(Clone, Copy)]
pub(crate) struct Tensors<'a> {
    batches: &'a [Batch],
    /// Records of the first batch that are already gone.
    gone: usize,
    /// Records there are left, of all batches.
    left: usize,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(batches: &'a [Batch]) -> Self {
        Self { batches, gone: 0, left: batches.iter().map(|batch| batch.records.len()).sum() }
    }

    /// These tensors without those of `rest`, their end.
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
        // Most tensors are one record, with another tensor's behind it.
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

/// How the elements of some tensors are shared out.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// The elements from which on the whole pool works on one tensor. Smaller ones are one thread's
    /// each: nobody waits for another between the sums of a tensor and its update, and there are
    /// enough of them to leave no thread without work.
    pub(crate) large: u64,
    /// Elements of the small ones together.
    pub(crate) small: u64,
    pub(crate) has_large: bool,
    /// A part of a tensor, without its beginning, if there is one.
    pub(crate) part: Option<Whole>,
}

impl Sizes {
    /// Looks at all tensors once where none is large, of which there may be thousands.
    pub(crate) fn of(tensors: Tensors<'_>, threads: usize) -> Self {
        let (mut total, mut largest, mut part) = (0, 0, None);
        for whole in tensors {
            total += whole.numel;
            largest = largest.max(whole.numel);
            if whole.first_element > 0 {
                part = part.or(Some(whole));
            }
        }
        let large = (total / (threads as u64 * TENSORS_PER_THREAD)).max(LARGE_ELEMENTS);
        let has_large = largest >= large;
        let small = if has_large {
            let small = tensors.filter(|whole| !whole.is_large(large));
            small.map(|whole| whole.numel).sum()
        } else {
            total
        };
        Self { large, small, has_large, part }
    }

    /// The large ones among the tensors that these are the sizes of.
    pub(crate) fn large_ones<'a>(&self, tensors: Tensors<'a>) -> impl Iterator<Item = Whole> + 'a {
        let large = self.large;
        let all = self.has_large.then_some(tensors).into_iter().flatten();
        all.filter(move |whole| whole.is_large(large))
    }
}

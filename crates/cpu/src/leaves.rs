//! Leaves of batches as one piece of work that can be cut between any two of them.

use std::ops::Range;

use fusestep_launch::{
    BackendError, Batch, Gate, LEAF_ELEMENTS, Launch, LeafSquares, MAX_LISTS, MAX_SUMS, Record,
    SquareSum, Stride,
};
use fusestep_simd::{Level, Pool, Split};

use crate::call::{gate, host_call};
use crate::errors::{FOREIGN, NAME, out_of_bounds};
use crate::window::{covered, place};

/// A leaf of a tensor; the last one of a tensor may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leaf {
    /// First element of the storage.
    element: u64,
    numel: u64,
    /// The group of its tensor.
    group: u32,
}

/// The leaves of batches in order, from a certain record on.
#[derive(Clone, Copy)]
struct Leaves<'a> {
    batches: &'a [Batch],
    offsets: &'a [u64],
    /// Number of the record in the first batch, and how many of its elements are over.
    record: usize,
    gone: u64,
}

impl<'a> Leaves<'a> {
    fn new(batches: &'a [Batch], offsets: &'a [u64]) -> Self {
        Self { batches, offsets, record: 0, gone: 0 }
    }

    /// The number of leaves in all batches.
    fn count(batches: &[Batch]) -> usize {
        let records = batches.iter().flat_map(|batch| &batch.records);
        // Lists lie in host memory, so their element counts fit a usize.
        let leaves = records.map(|record| record.numel.div_ceil(LEAF_ELEMENTS) as usize);
        leaves.sum()
    }

    /// The record in which the next leaf lies.
    fn current(&mut self) -> Option<(&'a Batch, &'a Record)> {
        loop {
            let (batch, rest) = self.batches.split_first()?;
            match batch.records.get(self.record) {
                Some(record) if self.gone < record.numel => return Some((batch, record)),
                Some(_) => self.record += 1,
                None => (self.batches, self.record) = (rest, 0),
            }
            self.gone = 0;
        }
    }

    /// Passes over `leaves` leaves, record by record.
    fn pass(&mut self, mut leaves: u64) {
        while leaves > 0 {
            let Some((_, record)) = self.current() else {
                return;
            };
            let passed = leaves.min((record.numel - self.gone).div_ceil(LEAF_ELEMENTS));
            self.gone += passed * LEAF_ELEMENTS;
            leaves -= passed;
        }
    }
}

impl Iterator for Leaves<'_> {
    type Item = Leaf;

    fn next(&mut self) -> Option<Leaf> {
        let (batch, record) = self.current()?;
        let start = self.offsets[record.tensor as usize] + record.first_element;
        let leaf = Leaf {
            element: start + self.gone,
            numel: LEAF_ELEMENTS.min(record.numel - self.gone),
            group: batch.groups[usize::from(record.group)],
        };
        self.gone += leaf.numel;
        Some(leaf)
    }
}

/// Consecutive leaves, the places of their sums, and the function that takes a sum.
struct LeafPieces<'a, T, F> {
    leaves: Leaves<'a>,
    sums: &'a mut [T],
    sum: &'a F,
}

impl<T: Send, F: Fn(Leaf) -> T + Sync> Split for LeafPieces<'_, T, F> {
    fn elements(&self) -> u64 {
        self.sums.len() as u64 * LEAF_ELEMENTS
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let count = elements.div_ceil(LEAF_ELEMENTS);
        let count = count.min(self.sums.len() as u64);
        let mut rest = self.leaves;
        rest.pass(count);
        let (left, right) = self.sums.split_at_mut(count as usize);
        let left = LeafPieces { sums: left, ..self };
        let right = LeafPieces { leaves: rest, sums: right, sum: left.sum };
        (left, right)
    }

    fn run(self) {
        for (place, leaf) in self.sums.iter_mut().zip(self.leaves) {
            *place = (self.sum)(leaf);
        }
    }
}

/// Refuses a number of places that differs from the number of leaves.
fn check_count<T>(batches: &[Batch], sums: &[T]) -> Result<(), BackendError> {
    let count = Leaves::count(batches);
    if count == sums.len() {
        return Ok(());
    }
    let expected = count.saturating_mul(size_of::<T>());
    Err(out_of_bounds(0, expected, size_of_val(sums)))
}

/// Elements of a list that begins with element `start` of the storage.
#[derive(Clone, Copy, Default)]
struct Part<'a> {
    bytes: &'a [u8],
    start: u64,
    stride: Stride,
}

impl<'a> Part<'a> {
    /// The `elements` of a list; `bytes` is the whole list, which begins with element `first` of
    /// the storage.
    fn of(
        bytes: &'a [u8],
        first: u64,
        stride: Stride,
        elements: &Range<u64>,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            bytes: &bytes[place(elements, first, stride, bytes.len())?],
            start: elements.start,
            stride,
        })
    }

    fn leaf(&self, leaf: Leaf) -> &'a [u8] {
        if self.bytes.is_empty() {
            return &[];
        }
        let at = (leaf.element - self.start) as usize;
        &self.bytes[self.stride.place(at..at + leaf.numel as usize)]
    }
}

/// Takes the sum of squares of every leaf of a list in host memory.
///
/// # Errors
/// Those of [`fusestep_launch::Launches::leaf_squares`].
pub(crate) fn leaf_squares(
    pool: &Pool,
    level: Level,
    leaves: LeafSquares<'_>,
    sums: &mut [SquareSum],
) -> Result<(), BackendError> {
    let LeafSquares { kernel, batches, offsets, list, first } = leaves;
    check_count(batches, sums)?;
    let bytes = list.buffer.host().ok_or(FOREIGN)?;
    let elements = covered(batches, offsets);
    let list = Part::of(bytes, first, list.stride(), &elements)?;
    pool.run(LeafPieces {
        leaves: Leaves::new(batches, offsets),
        sums,
        sum: &|leaf| kernel.run_host(level, list.leaf(leaf)),
    });
    Ok(())
}

/// Takes the sums that the launch's kernel defines over every leaf; 0 if the control block stops
/// the step.
///
/// # Errors
/// Those of [`fusestep_launch::Launches::leaf_sums`]; [`BackendError::Unavailable`] for a kernel
/// that takes no sums.
pub(crate) fn leaf_sums(
    pool: &Pool,
    level: Level,
    launch: &Launch<'_>,
    sums: &mut [[f64; MAX_SUMS]],
) -> Result<(), BackendError> {
    let Some(normed) = launch.kernel.normed() else {
        let entry = launch.kernel.entry();
        return Err(BackendError::Unavailable {
            backend: NAME,
            reason: format!("expected a kernel that takes sums over tensors, found `{entry}`"),
        });
    };
    let (batches, offsets) = (launch.batches, launch.offsets);
    check_count(batches, sums)?;
    let Gate::Open(grad_factor) = gate(launch)? else {
        sums.fill([0.0; MAX_SUMS]);
        return Ok(());
    };
    let call = host_call(level, launch, grad_factor);
    let elements = covered(batches, offsets);
    let mut lists = [Part::default(); MAX_LISTS];
    for (index, (part, list)) in lists.iter_mut().zip(launch.lists.iter()).enumerate() {
        let bytes = list.buffer.host().ok_or(FOREIGN)?;
        *part = Part::of(bytes, launch.first(index), list.stride(), &elements)?;
    }
    pool.run(LeafPieces {
        leaves: Leaves::new(batches, offsets),
        sums,
        sum: &|leaf| {
            let lists = lists.each_ref().map(|list| list.leaf(leaf));
            normed.chunk_sums(call, leaf.group, lists, [true; MAX_SUMS])
        },
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_go_on_within_their_record_and_can_be_passed_over() {
        let record = |tensor, first_element, numel| Record {
            tensor,
            first_element,
            numel,
            first_chunk: 0,
            group: 0,
        };
        let batch = |records, group| Batch { records, groups: vec![group], chunks: 0 };
        let batches = [
            batch(vec![record(0, 1024, 2049), record(1, 0, 5)], 7),
            batch(vec![], 8),
            batch(vec![record(3, 0, 1024)], 9),
        ];
        let leaves = Leaves::new(&batches, &[0, 4096, 4160, 4160]);
        let leaf = |element, numel, group| Leaf { element, numel, group };
        let expected = [
            leaf(1024, 1024, 7),
            leaf(2048, 1024, 7),
            leaf(3072, 1, 7),
            leaf(4096, 5, 7),
            leaf(4160, 1024, 9),
        ];
        assert_eq!(leaves.collect::<Vec<_>>(), expected);
        assert_eq!(Leaves::count(&batches), expected.len());
        for passed in 0..=6 {
            let mut rest = leaves;
            rest.pass(passed as u64);
            let expected = &expected[passed.min(5)..];
            assert_eq!(rest.collect::<Vec<_>>(), expected, "{passed}");
        }
    }
}

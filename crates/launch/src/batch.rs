//! The only batching loop of the project.

use std::collections::HashMap;

use crate::{ArgumentLayout, LaunchError, LaunchLimits};

/// A tensor that is to be put into a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batchable {
    /// Index of the tensor in its storage.
    pub tensor: u32,
    /// First element that takes part; 0 unless only a part of the tensor does.
    pub first_element: u64,
    /// Count of elements that take part; empty tensors take no place.
    pub numel: u64,
    /// Index of the tensor's hyper-parameters; tensors of one group share step scalars.
    pub group: u32,
}

/// Consecutive elements of one tensor in one launch; a whole tensor unless the launch's chunks ran
/// out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Record {
    /// Index of the tensor in its storage.
    pub tensor: u32,
    /// First element within the tensor; a multiple of the chunk's elements.
    pub first_element: u64,
    /// Element count, at least 1.
    pub numel: u64,
    /// Chunks of this launch before this record.
    pub first_chunk: u32,
    /// Index into [`Batch::groups`].
    // The name of the field when plans were first written out.
    #[cfg_attr(feature = "serde", serde(rename = "set"))]
    pub group: u16,
}

/// The records and groups of one launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Batch {
    /// The tensors, in storage order.
    pub records: Vec<Record>,
    /// The groups of hyper-parameters that the records refer to.
    // The name of the field when plans were first written out.
    #[cfg_attr(feature = "serde", serde(rename = "classes"))]
    pub groups: Vec<u32>,
    /// Chunks of all records together: the launch's grid.
    pub chunks: u32,
}

impl Batch {
    /// Elements of all records together.
    pub fn elements(&self) -> u64 {
        self.records.iter().map(|record| record.numel).sum()
    }
}

/// All records of a launch's batches in one batch, for a table that no limit of arguments cuts. A
/// tensor that goes on in the next batch has one record again.
///
/// # Errors
/// [`LaunchError::TooMany`] for more chunks than a batch counts.
pub fn merged(kernel: &str, batches: &[Batch], chunk_elements: u32) -> Result<Batch, LaunchError> {
    let mut whole = Batch::default();
    let mut groups = HashMap::new();
    let too_many = || LaunchError::TooMany { kernel: kernel.to_owned(), expected: MAX_LAUNCHES };
    for batch in batches {
        for record in &batch.records {
            let chunks = record.numel.div_ceil(u64::from(chunk_elements));
            let chunks = u32::try_from(chunks).ok().and_then(|own| whole.chunks.checked_add(own));
            let first_chunk = std::mem::replace(&mut whole.chunks, chunks.ok_or_else(too_many)?);
            let given = batch.groups[usize::from(record.group)];
            let next = u16::try_from(whole.groups.len()).map_err(|_| too_many())?;
            let group = *groups.entry(given).or_insert_with(|| {
                whole.groups.push(given);
                next
            });
            match whole.records.last_mut() {
                Some(last)
                    if last.tensor == record.tensor
                        && last.first_element + last.numel == record.first_element =>
                {
                    last.numel += record.numel;
                }
                _ => whole.records.push(Record { first_chunk, group, ..*record }),
            }
        }
    }
    Ok(whole)
}

/// Most launches that tensors are put into at once.
pub const MAX_LAUNCHES: usize = 1 << 20;

/// Puts tensors into as few launches as the limits allow, in the given order.
///
/// Empty tensors are left out wherever they stand. A tensor with more chunks than a launch has left
/// goes on in the next one.
///
/// # Errors
/// [`LaunchError::LimitTooSmall`] if not even one tensor fits, [`LaunchError::ZeroLimit`] for a
/// limit of 0, [`LaunchError::TooMany`] beyond [`MAX_LAUNCHES`].
/// # Cost
/// Linear in the number of tensors.
pub fn batches(
    kernel: &str,
    tensors: impl IntoIterator<Item = Batchable>,
    layout: ArgumentLayout,
    limits: LaunchLimits,
) -> Result<Vec<Batch>, LaunchError> {
    limits.validate()?;
    let needed = layout.bytes(1, 1);
    if limits.argument_bytes < needed {
        return Err(LaunchError::LimitTooSmall {
            kernel: kernel.to_owned(),
            expected: needed,
            found: limits.argument_bytes,
        });
    }
    let too_many = || LaunchError::TooMany { kernel: kernel.to_owned(), expected: MAX_LAUNCHES };
    let launch_elements = u64::from(limits.chunk_elements) * u64::from(limits.chunks_per_launch);
    let mut filling = Filling::new(layout, limits);
    for tensor in tensors {
        let mut rest = tensor;
        // Before the loop, so that a tensor that is far too large is refused at once.
        if rest.numel / launch_elements > MAX_LAUNCHES as u64 {
            return Err(too_many());
        }
        while rest.numel > 0 {
            let added = filling.add(rest);
            rest.first_element += added;
            rest.numel -= added;
            if filling.full.len() >= MAX_LAUNCHES {
                return Err(too_many());
            }
        }
    }
    Ok(filling.finish())
}

/// The batch being filled and those already full.
struct Filling {
    layout: ArgumentLayout,
    limits: LaunchLimits,
    full: Vec<Batch>,
    batch: Batch,
    /// Group → index into `batch.groups`.
    groups: HashMap<u32, u16>,
}

impl Filling {
    fn new(layout: ArgumentLayout, limits: LaunchLimits) -> Self {
        Self { layout, limits, full: Vec::new(), batch: Batch::default(), groups: HashMap::new() }
    }

    /// Adds as much of `tensor` as one launch can still take; returns the elements added, at least
    /// 1.
    fn add(&mut self, tensor: Batchable) -> u64 {
        if !self.has_room(tensor.group) {
            self.close();
        }
        let next_group = self.batch.groups.len() as u16;
        let group = *self.groups.entry(tensor.group).or_insert_with(|| {
            self.batch.groups.push(tensor.group);
            next_group
        });
        let chunk_elements = u64::from(self.limits.chunk_elements);
        let chunks_left = u64::from(self.limits.chunks_per_launch - self.batch.chunks);
        let chunks = tensor.numel.div_ceil(chunk_elements).min(chunks_left);
        let numel = tensor.numel.min(chunks.saturating_mul(chunk_elements));
        self.batch.records.push(Record {
            tensor: tensor.tensor,
            first_element: tensor.first_element,
            numel,
            first_chunk: self.batch.chunks,
            group,
        });
        // At most `chunks_left`, which is a u32.
        self.batch.chunks += chunks as u32;
        numel
    }

    fn has_room(&self, group: u32) -> bool {
        let known = self.groups.contains_key(&group);
        let groups = self.batch.groups.len() + usize::from(!known);
        let bytes = self.layout.bytes(self.batch.records.len() + 1, groups);
        bytes <= self.limits.argument_bytes
            && groups <= usize::from(u16::MAX)
            && self.batch.chunks < self.limits.chunks_per_launch
    }

    fn close(&mut self) {
        self.full.push(std::mem::take(&mut self.batch));
        self.groups.clear();
    }

    fn finish(mut self) -> Vec<Batch> {
        // The last batch is closed here and not in the loop: an empty last tensor must not lose it.
        if !self.batch.records.is_empty() {
            self.close();
        }
        self.full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: ArgumentLayout =
        ArgumentLayout { lists: 4, scalar_bytes: 24, step_scalar_bytes: 16 };

    fn run(numels: &[u64], groups: &[u32], limits: LaunchLimits) -> Vec<Batch> {
        let tensors = numels.iter().enumerate().map(|(i, &numel)| Batchable {
            tensor: i as u32,
            first_element: 0,
            numel,
            group: groups[i % groups.len()],
        });
        batches("test", tensors, LAYOUT, limits).unwrap()
    }

    fn assert_covered_once(numels: &[u64], batches: &[Batch], limits: LaunchLimits) {
        let mut next = vec![0u64; numels.len()];
        for batch in batches {
            let mut chunks = 0u64;
            for record in &batch.records {
                assert_eq!(record.first_element, next[record.tensor as usize]);
                assert_eq!(u64::from(record.first_chunk), chunks);
                assert!(record.numel > 0 && usize::from(record.group) < batch.groups.len());
                next[record.tensor as usize] += record.numel;
                chunks += record.numel.div_ceil(u64::from(limits.chunk_elements));
            }
            assert_eq!(u64::from(batch.chunks), chunks);
            assert!(chunks <= u64::from(limits.chunks_per_launch));
            let bytes = LAYOUT.bytes(batch.records.len(), batch.groups.len());
            assert!(bytes <= limits.argument_bytes);
        }
        assert_eq!(next, numels);
    }

    #[test]
    fn caps_are_filled_exactly() {
        let limits = LaunchLimits::with_argument_bytes(4096);
        for (count, launches) in [(0, 0), (1, 1), (83, 1), (84, 1), (85, 2), (168, 2), (169, 3)] {
            let numels = vec![7; count];
            let batches = run(&numels, &[0], limits);
            assert_eq!(batches.len(), launches, "{count} tensors");
            assert_covered_once(&numels, &batches, limits);
        }
    }

    #[test]
    fn an_empty_tensor_anywhere_loses_nothing() {
        let limits = LaunchLimits::with_argument_bytes(LAYOUT.bytes(2, 1));
        for numels in
            [[0, 5, 6, 7], [5, 0, 6, 7], [5, 6, 7, 0], [0, 0, 0, 9], [9, 0, 0, 0], [0, 0, 0, 0]]
        {
            assert_covered_once(&numels, &run(&numels, &[0], limits), limits);
        }
    }

    #[test]
    fn a_tensor_goes_on_in_the_next_launch_when_chunks_run_out() {
        let limits = LaunchLimits {
            argument_bytes: 4096,
            chunk_elements: 4,
            chunks_per_launch: 3,
            ..LaunchLimits::default()
        };
        let numels = [1, 4, 5, 100, 0, 13];
        let batches = run(&numels, &[0], limits);
        assert_covered_once(&numels, &batches, limits);
        assert_eq!(batches.len(), (1 + 1 + 2 + 25 + 4usize).div_ceil(3));
    }

    #[test]
    fn tensors_of_a_group_share_step_scalars_and_distinct_groups_cost_bytes() {
        let limits = LaunchLimits::with_argument_bytes(4096);
        let numels = vec![3; 161];
        let two = run(&numels, &[7, 9], limits);
        assert_eq!(two.len(), 2);
        assert_eq!(two[0].groups, [7, 9]);
        let all: Vec<u32> = (0..161).collect();
        let distinct = run(&numels, &all, limits);
        assert_covered_once(&numels, &distinct, limits);
        assert_eq!(distinct.len(), 161usize.div_ceil((4096 - 48) / 64));
    }

    #[test]
    fn lengths_beyond_32_bits_are_not_truncated() {
        let limits = LaunchLimits::default();
        let numels = [(1u64 << 31) - 1, 1 << 31, (1 << 31) + 1, 1 << 50];
        let batches = run(&numels, &[0], limits);
        assert_covered_once(&numels, &batches, limits);
        assert!(batches.len() > 1);
    }

    #[test]
    fn batches_of_any_limits_are_those_without_a_limit_once_they_are_one() {
        let most = LaunchLimits {
            argument_bytes: usize::MAX,
            chunk_elements: 4,
            chunks_per_launch: u32::MAX,
            ..LaunchLimits::default()
        };
        let numels = [1, 4, 5, 100, 0, 13, 8, 3, 3];
        for groups in [&[7][..], &[7, 9], &[4, 3, 2, 1]] {
            let whole = run(&numels, groups, most);
            for (tensors, chunks_per_launch) in [(1, 1), (2, 3), (3, 100), (9, 5)] {
                let argument_bytes = LAYOUT.bytes(tensors, 1);
                let limits = LaunchLimits { argument_bytes, chunks_per_launch, ..most };
                let cut = run(&numels, groups, limits);
                assert_eq!(merged("test", &cut, 4).unwrap(), whole[0], "{groups:?}, {limits:?}");
            }
        }
        assert_eq!(merged("test", &[], 4).unwrap(), Batch::default());
    }

    #[test]
    fn a_limit_too_small_for_one_tensor_is_an_error() {
        let tensor = Batchable { tensor: 0, first_element: 0, numel: 1, group: 0 };
        let limits = LaunchLimits::with_argument_bytes(LAYOUT.bytes(1, 1) - 1);
        let error = batches("adam", [tensor], LAYOUT, limits).unwrap_err();
        assert!(error.to_string().contains("expected at least 112 bytes"));
    }
}

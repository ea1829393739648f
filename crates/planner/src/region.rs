//! The memory that holds a gradient: a segment, or the list of a storage, and the place in it.

use std::ops::Range;

use fusestep_tensor::DType;

use crate::{Plan, StorageSpec};

/// The memory that holds some gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) index: usize,
    pub(crate) storage: usize,
    /// `None` for a storage whose gradients lie in its list.
    pub(crate) segment: Option<usize>,
    /// Element of the storage that it begins with, and element count.
    pub(crate) first: u64,
    pub(crate) numel: u64,
}

/// One gradient in its region.
pub(crate) struct Target<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) sums: Option<&'a mut [u8]>,
}

/// The region of each parameter, and how many there are.
pub(crate) fn regions(plan: &Plan) -> (Vec<Region>, usize) {
    let mut regions: Vec<Option<Region>> = vec![None; plan.params.len()];
    for (index, segment) in plan.segments.iter().enumerate() {
        let spec = &plan.storages[segment.storage];
        for tensor in segment.tensors.clone() {
            regions[spec.members[tensor as usize] as usize] = Some(Region {
                index,
                storage: segment.storage,
                segment: Some(index),
                first: segment.elements.start,
                numel: segment.elements.end - segment.elements.start,
            });
        }
    }
    let count = plan.segments.len();
    let mut segmented = vec![false; plan.storages.len()];
    for segment in &plan.segments {
        segmented[segment.storage] = true;
    }
    let whole = |param: usize| {
        let (storage, _) = plan.places[param];
        // Beside segments only empty tensors are left, which need no memory.
        let numel =
            if segmented[storage] { 0 } else { plan.storages[storage].layout.total_numel() };
        Region { index: count + storage, storage, segment: None, first: 0, numel }
    };
    let regions = regions.into_iter().enumerate();
    let regions = regions.map(|(param, region)| region.unwrap_or_else(|| whole(param)));
    (regions.collect(), count + plan.storages.len())
}

/// A tensor's bytes in its region.
pub(crate) fn place_in(
    spec: &StorageSpec,
    region: &Region,
    tensor: usize,
    width: usize,
) -> Range<usize> {
    let range = spec.layout.range(tensor);
    if range.is_empty() {
        return 0..0;
    }
    let place = |element: u64| (element - region.first) as usize * width;
    place(range.start)..place(range.end)
}

pub(crate) fn sum_width(dtype: DType) -> usize {
    dtype.len_bytes().max(4)
}

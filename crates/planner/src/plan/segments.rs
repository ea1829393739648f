//! Places of gradients, in a segment or in the list of a storage, and the memory of segments.

use std::ops::Range;

use fusestep_launch::Stride;
use fusestep_tensor::{DType, Role};

use crate::plan::settings::ZeroStage;
use crate::plan::stage::Stage;
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;

/// The memory that holds some gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) index: usize,
    pub(crate) storage: usize,
    /// Index of the segment; `None` for a storage whose gradients lie in its list.
    pub(crate) segment: Option<usize>,
    /// First element of the region in the storage, and the region's element count.
    pub(crate) first: u64,
    pub(crate) numel: u64,
}

/// One gradient in its region.
pub(crate) struct Target<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) sums: Option<&'a mut [u8]>,
}

/// The region of each parameter, and the number of regions.
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

/// Stride of sums of gradients of this dtype.
pub(crate) fn sum_stride(dtype: DType) -> Stride {
    let wide = if dtype.len_bytes() < 4 { DType::F32 } else { dtype };
    Stride::of(Role::Grad, wide)
}

/// Whether segments keep their memory once they are reduced. From ZeRO stage 2 on a rank needs no
/// more than its shard.
pub(crate) fn keeps_segments(plan: &Plan) -> bool {
    plan.zero < ZeroStage::Two
}

/// Whether segments may be reduced before the step is run: not where an update reduces them.
pub(crate) fn starts_early(plan: &Plan) -> bool {
    plan.stages.iter().any(|s| matches!(s, Stage::Reduce(_)))
}

/// Bytes of the longest segment of several tensors, which is no longer than the cap of buckets: one
/// arena of so many stays from step to step where segments do not, so that most steps need no new
/// memory, and calls find it where ranks see each other's.
pub(crate) fn usual_bytes(plan: &Plan) -> usize {
    let several = plan.segments.iter().filter(|s| s.tensors.len() > 1);
    several.map(|s| len_bytes(plan, s)).max().unwrap_or(0)
}

/// Bytes of the arena that [`usual_bytes`] sizes; 0 if segments keep their memory.
pub(crate) fn kept_bytes(plan: &Plan) -> u64 {
    if keeps_segments(plan) {
        return 0;
    }
    usual_bytes(plan) as u64
}

pub(crate) fn len_bytes(plan: &Plan, segment: &crate::Segment) -> usize {
    let width = plan.storages[segment.storage].grad_dtype().len_bytes();
    (segment.elements.end - segment.elements.start) as usize * width
}

/// Tensors of a segment that have elements.
pub(crate) fn full_tensors(plan: &Plan, segment: &crate::Segment) -> usize {
    let layout = &plan.storages[segment.storage].layout;
    let full = |&tensor: &u32| layout.numel(tensor as usize) > 0;
    segment.tensors.clone().filter(full).count()
}

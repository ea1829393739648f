//! Leaves of the fixed tree of sums: where those of each parameter lie in a rank's vector of them,
//! and the chunks that they make up.

use std::collections::BTreeMap;
use std::ops::Range;

use fusestep_elementwise::{NORM_LANES, fold};
use fusestep_launch::{
    Batch, CHUNK_ELEMENTS, CHUNK_LEAVES, LEAF_ELEMENTS, SquareSum, TensorPartials,
};

use crate::plan::value::Plan;

pub(crate) fn leaves_of(numel: u64) -> usize {
    numel.div_ceil(LEAF_ELEMENTS) as usize
}

/// Leaves of all records, in order: index of the parameter's leaf, one by one.
pub(crate) fn leaves_in<'a>(
    batches: &'a [Batch],
    members: &'a [u32],
    leaves: &'a [Range<usize>],
) -> impl Iterator<Item = Range<usize>> + 'a {
    let records = batches.iter().flat_map(|batch| &batch.records);
    records.map(|record| {
        let param = members[record.tensor as usize] as usize;
        let first = leaves[param].start + (record.first_element / LEAF_ELEMENTS) as usize;
        first..first + leaves_of(record.numel)
    })
}

/// Ranges of each parameter's leaves among all of this rank, and the count of leaves of parameters
/// that ranks share. Shared ones come first.
pub(crate) fn place_leaves(plan: &Plan) -> (Vec<Range<usize>>, usize) {
    let mut leaves = vec![0..0; plan.params.len()];
    let (mut next, mut shared) = (0, 0);
    for distributed in [false, true] {
        // As gradients lie, so that the leaves of a read follow each other.
        let storages = plan.storages.iter().filter(|spec| spec.distributed == distributed);
        for &param in storages.flat_map(|spec| &spec.members) {
            let first = next;
            next += leaves_of(plan.params[param as usize].numel());
            leaves[param as usize] = first..next;
        }
        if !distributed {
            shared = next;
        }
    }
    (leaves, shared)
}

/// Leaves of all ranks' slices: those of each rank behind those of the rank before.
#[derive(Default)]
pub(crate) struct SliceLeaves {
    /// Count of each rank's leaves.
    pub(crate) counts: Vec<usize>,
    /// Places of each rank's leaves, for each parameter that is in slices.
    pub(crate) of_ranks: BTreeMap<usize, Vec<Range<usize>>>,
}

impl SliceLeaves {
    /// Leaves of a plan, in each rank's own order of [`place_leaves`].
    pub(crate) fn of(plan: &Plan) -> Self {
        let mut found = Self::default();
        if plan.slices.is_empty() {
            return found;
        }
        let mut next = 0;
        for rank in 0..plan.topology.world {
            let before = next;
            let storages = plan.storages.iter().filter(|spec| spec.distributed);
            for &param in storages.flat_map(|spec| &spec.members) {
                let param = param as usize;
                let first = next;
                next += leaves_of(plan.shape_on(rank, param).numel());
                found.of_ranks.entry(param).or_default().push(first..next);
            }
            found.counts.push(next - before);
        }
        found
    }

    /// Count of all ranks' leaves.
    pub(crate) fn count(&self) -> usize {
        self.counts.iter().sum()
    }
}

/// Leaves of parameters that ranks share, and of the slices of all ranks.
pub(crate) fn leaf_counts(plan: &Plan) -> (u64, u64) {
    let (_, shared) = place_leaves(plan);
    (shared as u64, SliceLeaves::of(plan).count() as u64)
}

/// The leaves of every chunk, and the chunks of every parameter, of parameters with these leaves.
pub(crate) fn chunks_of_leaves(
    params: &[Range<usize>],
) -> (Vec<TensorPartials>, Vec<TensorPartials>) {
    let (mut chunks, mut tensors) = (Vec::new(), Vec::with_capacity(params.len()));
    for leaves in params {
        let first = chunks.len() as u64;
        let starts = leaves.clone().step_by(CHUNK_LEAVES);
        chunks.extend(starts.map(|at| TensorPartials {
            first: at as u64,
            count: CHUNK_LEAVES.min(leaves.end - at) as u64,
        }));
        let count = chunks.len() as u64 - first;
        tensors.push(TensorPartials { first, count });
    }
    (chunks, tensors)
}

/// The sum over a chunk from those over its leaves.
pub(crate) fn chunk(leaves: &[f64]) -> f64 {
    let mut lanes = [0.0; NORM_LANES];
    lanes[..leaves.len()].copy_from_slice(leaves);
    fold(lanes)
}

/// The sum over each chunk of a tensor, from pairs of its leaves' sums of squares and counts of
/// what is not finite.
pub(crate) fn chunk_squares(leaves: &[f64]) -> impl Iterator<Item = SquareSum> + '_ {
    leaves.chunks(2 * CHUNK_LEAVES).map(|leaves| {
        let sums: Vec<f64> = leaves.iter().copied().step_by(2).collect();
        let counts = leaves.iter().skip(1).step_by(2);
        SquareSum { sum: chunk(&sums), non_finite: counts.map(|&count| count as u64).sum() }
    })
}

/// Chunks of the fixed tree that so many elements have.
pub(crate) fn chunks_of(numel: u64) -> usize {
    // Tensors are allocated, so their element counts fit a usize.
    numel.div_ceil(u64::from(CHUNK_ELEMENTS)) as usize
}

//! Leaves of the fixed tree of sums: where those of each parameter lie in a rank's vector of them,
//! and the chunks that they make up.

use std::ops::Range;

use fusestep_elementwise::{NORM_LANES, fold};
use fusestep_launch::{Batch, CHUNK_LEAVES, LEAF_ELEMENTS, SquareSum, TensorPartials};

use crate::Plan;

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

/// Where each parameter's leaves lie among those of this rank, and how many of them are of
/// parameters that ranks share, which come first.
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

/// Leaves of parameters that ranks share, and of this rank's slices of all others.
pub(crate) fn leaf_counts(plan: &Plan) -> (u64, u64) {
    let (leaves, shared) = place_leaves(plan);
    let all = leaves.iter().map(|leaves| leaves.end).max().unwrap_or(0);
    (shared as u64, (all - shared) as u64)
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

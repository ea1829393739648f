//! The elements of one dtype as one line, cut into a shard for each rank.

use std::ops::Range;

use fusestep_launch::CHUNK_ELEMENTS;
use fusestep_tensor::{DType, ParamDesc};
use serde::Serialize;

use crate::passes::Zero;

/// How the elements of a dtype are given to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ownership {
    /// Element ranges as equal as can be; a boundary may lie inside a tensor.
    #[default]
    Elements,
    /// The same with boundaries between chunks of the fixed tree, 65,536 elements counted from a tensor's start: what pass
    /// `update_norms` makes of [`Ownership::Elements`].
    Chunks,
    /// Whole tensors in plan order: a boundary lies at the tensor's edge next to the equal cut.
    Tensors,
    /// Whole tensors by [`owners_in_use_order`].
    UseOrder,
    /// Whole tensors by [`owners_greedy_even`].
    GreedyEven,
}

/// Which ranks have the parameters of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Held {
    /// They are the same on all ranks, or shared out among them.
    #[default]
    Together,
    /// Each rank has slices of its own under these names (pass `distributed`).
    Apart,
}

/// Consecutive elements of one tensor within a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Piece {
    /// Position of the parameter in the plan.
    pub param: u32,
    /// First element within the tensor.
    pub first: u64,
    /// Element count, at least 1.
    pub numel: u64,
    /// First element within the shard.
    pub at: u64,
}

/// All parameters of one dtype, one after the other without gaps, and where each rank's shard begins.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flat {
    /// Storage type of the parameters.
    pub dtype: DType,
    /// Storage type of their gradients.
    pub grad_dtype: DType,
    /// Which ranks have them.
    pub held: Held,
    /// The parameters, in the order they lie.
    pub members: Vec<u32>,
    /// First element of each member, and the end of the last.
    pub starts: Vec<u64>,
    /// First element of each rank's shard, and the end of the last.
    pub bounds: Vec<u64>,
}

impl Flat {
    /// The parameters `members` cut into `world` shards.
    pub(crate) fn new(
        (dtypes, held): ((DType, DType), Held),
        mut members: Vec<u32>,
        params: &[ParamDesc],
        ownership: Ownership,
        world: usize,
    ) -> Self {
        let numel = |member: &u32| params[*member as usize].numel();
        let owners = match ownership {
            Ownership::Elements | Ownership::Chunks | Ownership::Tensors => None,
            Ownership::UseOrder => {
                let width = dtypes.0.len_bytes() as u64;
                let bytes: Vec<u64> = members.iter().map(|m| numel(m) * width).collect();
                Some(owners_in_use_order(&bytes, world))
            }
            Ownership::GreedyEven => {
                let numels: Vec<u64> = members.iter().map(numel).collect();
                Some(owners_greedy_even(&numels, world))
            }
        };
        let mut of_rank = vec![0u64; world];
        if let Some(owners) = &owners {
            for (&owner, member) in owners.iter().zip(&members) {
                of_rank[owner] += numel(member);
            }
            // Tensors of one owner come to lie together, in plan order, so that a shard is a range.
            let mut order: Vec<usize> = (0..members.len()).collect();
            order.sort_by_key(|&position| owners[position]);
            members = order
                .into_iter()
                .map(|position| members[position])
                .collect();
        }
        let mut starts = vec![0];
        for member in &members {
            starts.push(starts[starts.len() - 1] + numel(member));
        }
        let total = starts[members.len()];
        let bounds = match (owners, ownership) {
            (Some(_), _) => {
                let mut bounds = vec![0];
                for numel in of_rank {
                    bounds.push(bounds[bounds.len() - 1] + numel);
                }
                bounds
            }
            (None, Ownership::Tensors) => nearest_edges(&starts, world),
            (None, Ownership::Chunks) => nearest_edges(&chunk_edges(&starts), world),
            (None, _) => even_bounds(total, world),
        };
        Self {
            dtype: dtypes.0,
            grad_dtype: dtypes.1,
            held,
            members,
            starts,
            bounds,
        }
    }

    /// Elements of all members.
    pub fn total(&self) -> u64 {
        self.starts[self.members.len()]
    }

    /// The elements of a rank's shard.
    pub fn shard(&self, rank: usize) -> Range<u64> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// The elements that a rank updates.
    pub(crate) fn own(&self, zero: Zero, rank: usize) -> Range<u64> {
        match (zero, self.held) {
            (Zero::Zero0, _) | (_, Held::Apart) => 0..self.total(),
            _ => self.shard(rank),
        }
    }

    /// What of each tensor lies in these elements, in the order it lies; `at` counts from their start.
    pub fn pieces(&self, elements: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        let from = self
            .starts
            .partition_point(|&start| start <= elements.start);
        (from.saturating_sub(1)..self.members.len())
            .take_while({
                let end = elements.end;
                move |&position| self.starts[position] < end
            })
            .filter_map(move |position| {
                let start = self.starts[position].max(elements.start);
                let end = self.starts[position + 1].min(elements.end);
                (start < end).then(|| Piece {
                    param: self.members[position],
                    first: start - self.starts[position],
                    numel: end - start,
                    at: start - elements.start,
                })
            })
    }
}

/// How much of `elements` lies in each shard.
pub(crate) fn overlaps(bounds: &[u64], elements: &Range<u64>) -> impl Iterator<Item = usize> {
    bounds.windows(2).map(move |shard| {
        let (start, end) = (shard[0].max(elements.start), shard[1].min(elements.end));
        end.saturating_sub(start) as usize
    })
}

/// Shards as equal as can be, the longer ones first.
fn even_bounds(total: u64, world: usize) -> Vec<u64> {
    let (each, more) = (total / world as u64, total % world as u64);
    let bound = |rank: u64| rank * each + rank.min(more);
    (0..=world as u64).map(bound).collect()
}

/// Where chunks begin, and the end of the last.
fn chunk_edges(starts: &[u64]) -> Vec<u64> {
    let tensors = starts.windows(2).map(|ends| ends[0]..ends[1]);
    let edges = tensors.flat_map(|elements| elements.step_by(CHUNK_ELEMENTS as usize));
    edges.chain(starts.last().copied()).collect()
}

/// The edges next to the equal cut.
fn nearest_edges(starts: &[u64], world: usize) -> Vec<u64> {
    let total = starts[starts.len() - 1];
    let nearest = |cut: u64| {
        let above = starts.partition_point(|&start| start < cut);
        let (high, low) = (starts[above], starts[above.saturating_sub(1)]);
        if cut.abs_diff(low) <= cut.abs_diff(high) {
            low
        } else {
            high
        }
    };
    even_bounds(total, world).into_iter().map(nearest).collect()
}

/// The owner of each tensor, walking in order of use: once more than a rank's part of all bytes has been placed, the next rank
/// takes over. The test comes before a tensor is placed and is strict, so 4 equal tensors over 2 ranks lie 3 and 1.
///
/// # Source
/// PaddlePaddle, `sharding/shard.py`, 2023.
pub fn owners_in_use_order(len_bytes: &[u64], world: usize) -> Vec<usize> {
    let total: u128 = len_bytes.iter().map(|&bytes| u128::from(bytes)).sum();
    let (mut placed, mut rank) = (0u128, 0usize);
    let place = |&bytes: &u64| {
        if placed * world as u128 > total * (rank as u128 + 1) {
            rank += 1;
        }
        placed += u128::from(bytes);
        rank
    };
    len_bytes.iter().map(place).collect()
}

/// The owner of each tensor: the rank with the fewest elements so far, the lowest of equals, in the given order.
///
/// # Source
/// PaddlePaddle, `auto_parallel_sharding.py`, 2023.
pub fn owners_greedy_even(numels: &[u64], world: usize) -> Vec<usize> {
    let mut loads: std::collections::BinaryHeap<_> = (0..world)
        .map(|rank| std::cmp::Reverse((0u64, rank)))
        .collect();
    let place = |&numel: &u64| {
        let Some(std::cmp::Reverse((load, rank))) = loads.pop() else {
            return 0;
        };
        loads.push(std::cmp::Reverse((load + numel, rank)));
        rank
    };
    numels.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fusestep_tensor::Shape;

    fn flat(numels: &[u64], ownership: Ownership, world: usize) -> Flat {
        let params: Vec<ParamDesc> = numels
            .iter()
            .enumerate()
            .map(|(i, &n)| ParamDesc::new(format!("p{i}"), Shape::new([n]).unwrap(), DType::F32))
            .collect();
        let members = (0..numels.len() as u32).collect();
        let dtypes = ((DType::F32, DType::F32), Held::Together);
        Flat::new(dtypes, members, &params, ownership, world)
    }

    #[test]
    fn owners_are_those_of_the_reference() {
        assert_eq!(owners_in_use_order(&[1; 4], 2), [0, 0, 0, 1]);
        assert_eq!(owners_in_use_order(&[1; 8], 4), [0, 0, 0, 1, 1, 2, 2, 3]);
        assert_eq!(owners_in_use_order(&[100, 1, 1], 4), [0, 1, 2]);
        assert_eq!(owners_greedy_even(&[5, 3, 1, 1, 4], 2), [0, 1, 1, 1, 0]);
        assert_eq!(owners_greedy_even(&[1; 3], 5), [0, 1, 2]);
    }

    #[test]
    fn shards_cover_everything_once_whatever_the_ownership() {
        for numels in [&[7u64, 0, 1, 100, 3][..], &[1], &[0], &[5; 9]] {
            for world in 1..=6 {
                for ownership in [
                    Ownership::Elements,
                    Ownership::Chunks,
                    Ownership::Tensors,
                    Ownership::UseOrder,
                    Ownership::GreedyEven,
                ] {
                    let flat = flat(numels, ownership, world);
                    let mut seen: Vec<Vec<u32>> =
                        numels.iter().map(|&n| vec![0; n as usize]).collect();
                    for rank in 0..world {
                        let mut at = 0;
                        for piece in flat.pieces(flat.shard(rank)) {
                            assert_eq!(piece.at, at);
                            at += piece.numel;
                            for element in piece.first..piece.first + piece.numel {
                                seen[piece.param as usize][element as usize] += 1;
                            }
                            // The tensors here are of one chunk each.
                            if ownership != Ownership::Elements {
                                assert_eq!(
                                    (piece.first, piece.numel),
                                    (0, numels[piece.param as usize])
                                );
                            }
                        }
                        assert_eq!(at, flat.bounds[rank + 1] - flat.bounds[rank]);
                    }
                    assert!(
                        seen.iter().flatten().all(|&count| count == 1),
                        "{ownership:?} {world}"
                    );
                }
            }
        }
    }

    #[test]
    fn chunk_shards_end_at_the_chunks_next_to_the_equal_cut() {
        let chunk = u64::from(CHUNK_ELEMENTS);
        let bounds = |numels: &[u64], world| flat(numels, Ownership::Chunks, world).bounds;
        let end = 3 * chunk + 110;
        assert_eq!(bounds(&[100, 3 * chunk + 10], 2), [0, chunk + 100, end]);
        let thirds = [0, chunk + 100, 2 * chunk + 100, end];
        assert_eq!(bounds(&[100, 3 * chunk + 10], 3), thirds);
        assert_eq!(bounds(&[10], 3), [0, 0, 10, 10]);
        assert_eq!(bounds(&[], 2), [0, 0, 0]);
    }

    #[test]
    fn element_shards_differ_by_one_element_at_most() {
        let flat = flat(&[10, 1, 6], Ownership::Elements, 4);
        assert_eq!(flat.bounds, [0, 5, 9, 13, 17]);
    }
}

//! The sum of squares over gradients of any dtype, in the fixed tree of [`crate::norm`].

use fusestep_launch::{SquareSum, tree_sum};
use fusestep_simd::{Level, Pool, Split};
use fusestep_tensor::DType;
use half::{bf16, f16};

use super::lists::Floats;
use crate::norm::{NORM_CHUNK_ELEMENTS, chunk_square_sum};

/// The sum of squares over all lists: the total of the tree, whose tensors are the lists in their
/// order. A parameter without a gradient is an empty list, which keeps the places of the others.
///
/// # Cost
/// One read of the elements, on all threads of `pool` or in the calling thread.
pub fn square_sums(pool: Option<&Pool>, lists: &[Floats<'_>]) -> SquareSum {
    let counts = lists.iter().map(|list| list.numel().div_ceil(NORM_CHUNK_ELEMENTS));
    let mut sums = vec![SquareSum::default(); counts.clone().sum()];
    let mut chunks = Vec::with_capacity(sums.len());
    for &list in lists {
        let mut rest = list;
        while rest.numel() > 0 {
            let (chunk, behind) = rest.split_at(rest.numel().min(NORM_CHUNK_ELEMENTS));
            chunks.push(chunk);
            rest = behind;
        }
    }
    let work = Chunks { level: Level::detect(), chunks: &chunks, sums: &mut sums };
    match pool {
        Some(pool) => pool.run(work),
        None => work.run(),
    }
    let mut first = 0;
    let tensors: Vec<SquareSum> = counts
        .map(|count| {
            let own = &sums[first..first + count];
            first += count;
            tree_sum(count, |chunk| own[chunk])
        })
        .collect();
    tree_sum(tensors.len(), |tensor| tensors[tensor])
}

/// Chunks and the places of their sums.
struct Chunks<'a> {
    level: Level,
    chunks: &'a [Floats<'a>],
    sums: &'a mut [SquareSum],
}

impl Split for Chunks<'_> {
    fn elements(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.numel() as u64).sum()
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let mut before = 0;
        let reaches = |chunk: &Floats<'_>| {
            before += chunk.numel() as u64;
            before >= elements
        };
        let middle = self.chunks.iter().position(reaches).map_or(self.chunks.len(), |at| at + 1);
        let (chunks, chunks_rest) = self.chunks.split_at(middle);
        let (sums, sums_rest) = self.sums.split_at_mut(middle);
        let level = self.level;
        (Self { level, chunks, sums }, Self { level, chunks: chunks_rest, sums: sums_rest })
    }

    fn run(self) {
        for (sum, chunk) in self.sums.iter_mut().zip(self.chunks) {
            *sum = match chunk.dtype() {
                DType::BF16 => chunk_square_sum::<f32, bf16>(self.level, chunk.elements()),
                DType::F16 => chunk_square_sum::<f32, f16>(self.level, chunk.elements()),
                _ => chunk_square_sum::<f32, f32>(self.level, chunk.elements()),
            };
        }
    }
}

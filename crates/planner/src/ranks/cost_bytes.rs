//! Bytes that a rank keeps, and bytes that it reads and writes itself.

use super::{Held, RankPlan};
use crate::passes::Zero;

impl RankPlan {
    /// Bytes of everything that [`super::RankState`] keeps for this rank between steps.
    pub fn memory_bytes(&self) -> u64 {
        let local: u64 = self
            .local
            .storages
            .iter()
            .map(|storage| storage.len_bytes())
            .sum();
        let lines = self.flats.iter().zip(&self.pieces).map(|(flat, pieces)| {
            let numel: u64 = pieces.iter().map(|piece| piece.numel).sum();
            let width = flat.grad_dtype.len_bytes() as u64;
            let sums = if self.reduces_each() { width.max(4) } else { 0 };
            let replica = match self.zero() {
                Zero::Zero0 | Zero::Zero3 => 0,
                Zero::Zero1 | Zero::Zero2 => flat.total() * flat.dtype.len_bytes() as u64,
            };
            numel * (width + sums) + replica
        });
        let merges = self.micro_steps() > 1 && !self.reduces_each();
        let narrow = self.buckets.iter().map(|bucket| {
            let narrow = self.flats[bucket.flat].grad_dtype.len_bytes() == 2;
            if merges && narrow {
                4 * bucket.numel
            } else {
                0
            }
        });
        let kept = self.buckets.iter().enumerate();
        let kept = kept.filter(|&(index, _)| self.keeps(index));
        let kept = kept.map(|(_, bucket)| self.len_bytes_of(bucket) as u64);
        local + lines.sum::<u64>() + kept.sum::<u64>() + narrow.sum::<u64>()
    }

    /// Bytes that this rank reads and writes to put the gradients of micro-step `pass` into their buckets, each counted.
    ///
    /// A copy reads and writes its bytes once. In a merge window the gradients of later micro-steps are added, which reads the sums
    /// and writes them again, and the last one divides or rounds them.
    pub fn pass_bytes(&self, pass: u32) -> u64 {
        let merges = self.micro_steps() > 1;
        let last = pass + 1 == self.micro_steps();
        let of_bucket = |bucket: &super::Bucket| {
            let width = self.flats[bucket.flat].grad_dtype.len_bytes() as u64;
            let (sum, copy) = (width.max(4), 2 * width);
            let per_element = match (merges, self.reduces_each()) {
                (false, _) => copy,
                // Added to the shard's sums once they are reduced.
                (true, true) => copy + (width + 2 * sum) / self.shard_place().world as u64,
                (true, false) => {
                    let added = if pass == 0 { sum } else { 2 * sum };
                    width + added + if last { sum + width } else { 0 }
                }
            };
            bucket.numel * per_element
        };
        self.buckets.iter().map(of_bucket).sum()
    }

    /// Bytes of buckets that are allocated in micro-step `pass`, because they were given back: from ZeRO stage 2 on all of them, or with
    /// `rings`, if calls keep up, one for each ring and one that is being filled.
    pub fn fresh_bytes(&self, pass: u32, rings: usize) -> u64 {
        if pass > 0 && !self.reduces_each() {
            return 0;
        }
        let given_back = self.buckets.iter().enumerate();
        let given_back = given_back.filter(|&(index, _)| !self.keeps(index));
        let bytes = given_back.map(|(_, bucket)| self.len_bytes_of(bucket) as u64);
        let (all, largest) = bytes.fold((0, 0), |(all, largest), bytes: u64| {
            (all + bytes, largest.max(bytes))
        });
        let groups = self.shard_place().world < self.topology().world;
        match rings {
            0 => all,
            _ if groups => all,
            _ => all.min((rings as u64 + 1) * largest),
        }
    }

    /// Bytes that this rank reads and writes once its gradients are reduced, each counted: its part out of the buckets and to the
    /// update, the norm if it is formed across ranks, what the update's kernels read and write, and its parameters into the replica.
    pub fn update_bytes(&self) -> u64 {
        let own = |line: usize| {
            let pieces = self.pieces[line].iter();
            pieces.map(|piece| piece.numel).sum::<u64>()
        };
        let norm = self.norm_across() && self.whole.gradients.rule().is_some();
        let lines = self.flats.iter().enumerate().map(|(line, flat)| {
            let (width, grad) = (flat.dtype.len_bytes(), flat.grad_dtype.len_bytes());
            let copies = 4 + u64::from(norm);
            let replicated = match (self.zero(), flat.held) {
                (Zero::Zero1 | Zero::Zero2, Held::Together) => 2 * width as u64,
                _ => 0,
            };
            own(line) * (copies * grad as u64 + replicated)
        });
        lines.sum::<u64>() + self.local.traffic_bytes()
    }
}

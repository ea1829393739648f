//! Gradients and replicas of all ranks in one place, so that each rank updates its block
//! everywhere.

use std::ops::Range;

use fusestep_tensor::DType;
use smallvec::SmallVec;

use crate::fingerprint::hash;
use crate::{
    Blocks, CallContext, CallShape, CollectiveError, Fingerprint, Lengths, OfRanks, Operation,
};

/// Memory that one rank brings to
/// [`Communicator::reduce_update`](crate::Communicator::reduce_update).
#[derive(Debug)]
pub struct ReduceUpdate<'a> {
    /// Type of the gradients' elements.
    pub grad_dtype: DType,
    /// This rank's gradients, which every rank may read; empty on all ranks if only replicas are
    /// worked on.
    pub grads: &'a [u8],
    /// This rank's replicas: parameters, and state that every rank keeps. Rank `i` alone reads and
    /// writes block `i` of everyone's.
    pub replicas: Replicas<'a>,
    /// Elements of each rank's block; the same on all ranks.
    pub counts: &'a [usize],
}

/// One rank's replica of a list that all ranks keep alike.
#[derive(Debug)]
pub struct Replica<'a> {
    /// Type of the replica's entries.
    pub dtype: DType,
    /// Elements that share an entry: 1, or those of a group in a list of units. Blocks begin with
    /// an entry.
    pub elements: usize,
    /// The replica's bytes, with an entry for every so many gradients; the last may be of fewer.
    pub bytes: &'a mut [u8],
}

impl Replica<'_> {
    /// The bytes of a rank's block.
    pub fn block(&self, blocks: Blocks<'_>, rank: usize) -> Range<usize> {
        blocks.of_entries(rank, self.elements, self.dtype.len_bytes())
    }
}

/// The replicas of one rank, in an order that is the same on all ranks.
pub type Replicas<'a> = SmallVec<[Replica<'a>; 4]>;

/// One rank's block of the memory of all ranks.
#[derive(Debug)]
pub struct RankMemory<'a> {
    /// The rank whose block it is.
    pub rank: usize,
    /// The block in each rank's gradients, in rank order; empty if the call has none.
    pub grads: OfRanks<&'a [u8]>,
    /// The block in each rank's copy of each replica, in rank order. All copies hold the same
    /// values.
    pub replicas: SmallVec<[OfRanks<&'a mut [u8]>; 4]>,
}

impl<'a> ReduceUpdate<'a> {
    /// The most replicas of one call.
    pub const MAX_REPLICAS: usize = crate::rendezvous::MAX_REPLICAS;

    /// Checks everything that one rank can know and says how elements are cut into blocks.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] naming the buffer, the expected and the found length.
    pub fn blocks(&self, rank: usize, world_size: usize) -> Result<Blocks<'a>, CollectiveError> {
        let refuse =
            |reason| CollectiveError::refused(rank, Operation::ReduceUpdate.name(), reason);
        let numel: usize = self.counts.iter().sum();
        let expect = |name: &str, expected: usize, found: usize| {
            if expected == found {
                Ok(())
            } else {
                Err(refuse(format!("{name}: expected {expected}, found {found}")))
            }
        };
        expect("counts", world_size, self.counts.len())?;
        if !self.grads.is_empty() {
            let expected = numel * self.grad_dtype.len_bytes();
            expect("bytes of gradients", expected, self.grads.len())?;
        }
        if self.replicas.len() > Self::MAX_REPLICAS {
            return Err(refuse(format!(
                "expected at most {} replicas, found {}",
                Self::MAX_REPLICAS,
                self.replicas.len()
            )));
        }
        for replica in self.replicas.iter() {
            let entries = numel.div_ceil(replica.elements.max(1));
            let expected = entries * replica.dtype.len_bytes();
            expect("bytes of a replica", expected, replica.bytes.len())?;
            let mut start = 0;
            for count in self.counts {
                let beside = if start < numel { start % replica.elements.max(1) } else { 0 };
                expect("elements of a block before its first entry", 0, beside)?;
                start += count;
            }
        }
        Ok(Blocks { numel, world_size, counts: Some(self.counts) })
    }

    /// The fingerprint that ranks compare; its hash of the counts is a hash of the replicas' types,
    /// too.
    pub fn fingerprint(&self, numel: usize, sequence: u64, context: CallContext) -> Fingerprint {
        let shape = CallShape {
            operation: Operation::ReduceUpdate,
            dtype: self.grad_dtype,
            counts: Some(self.counts),
            lengths: Lengths::InPlace(self.grads.len()),
        };
        let mut fingerprint = shape.fingerprint(numel, sequence, context);
        if self.grads.is_empty() {
            fingerprint.counts_hash = hash(&[fingerprint.counts_hash as usize]);
        }
        for replica in self.replicas.iter() {
            // Of most lists as it was before some had entries for several elements.
            let entry = replica.dtype as usize + 64 * replica.elements.saturating_sub(1);
            let mixed = [fingerprint.counts_hash as usize, entry];
            fingerprint.counts_hash = hash(&mixed);
        }
        fingerprint
    }
}

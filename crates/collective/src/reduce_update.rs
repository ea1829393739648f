//! Gradients and parameters of all ranks in one place, so that each rank updates its block everywhere.

use fusestep_tensor::DType;
use smallvec::SmallVec;

use crate::{Blocks, CallShape, CollectiveError, Lengths, Operation};

/// What one rank brings to [`Communicator::reduce_update`](crate::Communicator::reduce_update).
#[derive(Debug)]
pub struct ReduceUpdate<'a> {
    /// Type of the gradients' elements.
    pub grad_dtype: DType,
    /// Type of the parameters' elements.
    pub param_dtype: DType,
    /// This rank's gradients, which every rank may read.
    pub grads: &'a [u8],
    /// This rank's parameters: as many elements. Rank `i` alone reads and writes block `i` of everyone's.
    pub params: &'a mut [u8],
    /// Elements of each rank's block; the same on all ranks.
    pub counts: &'a [usize],
}

/// One rank's block of the memory of all ranks.
#[derive(Debug)]
pub struct RankMemory<'a> {
    /// The rank whose block it is.
    pub rank: usize,
    /// The block in each rank's gradients, in rank order.
    pub grads: SmallVec<[&'a [u8]; 16]>,
    /// The block in each rank's parameters, in rank order. All hold the same values.
    pub params: SmallVec<[&'a mut [u8]; 16]>,
}

impl<'a> ReduceUpdate<'a> {
    /// Checks everything that one rank can know and says how elements are cut into blocks.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] naming the buffer, the expected and the found length.
    pub fn blocks(&self, rank: usize, world_size: usize) -> Result<Blocks<'a>, CollectiveError> {
        let refuse = |reason| CollectiveError::Refused {
            rank,
            operation: Operation::ReduceUpdate.name(),
            reason,
        };
        let numel: usize = self.counts.iter().sum();
        let expect = |name: &str, expected: usize, found: usize| match expected == found {
            true => Ok(()),
            false => Err(refuse(format!(
                "{name}: expected {expected}, found {found}"
            ))),
        };
        expect("counts", world_size, self.counts.len())?;
        expect(
            "bytes of gradients",
            numel * self.grad_dtype.len_bytes(),
            self.grads.len(),
        )?;
        expect(
            "bytes of parameters",
            numel * self.param_dtype.len_bytes(),
            self.params.len(),
        )?;
        Ok(Blocks {
            numel,
            world_size,
            counts: Some(self.counts),
        })
    }

    /// The call as ranks compare it.
    pub fn shape(&self) -> CallShape<'a> {
        CallShape {
            operation: Operation::ReduceUpdate,
            dtype: self.grad_dtype,
            counts: Some(self.counts),
            lengths: Lengths::InPlace(self.grads.len()),
        }
    }
}

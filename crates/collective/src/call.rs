//! One call of a collective, and whether it can be made.

use fusestep_tensor::DType;

use crate::{Blocks, CallShape, CollectiveError, Lengths, Operation};

/// Memory of a call: its input and the place of its result.
#[derive(Debug)]
pub enum Buffers<'a> {
    /// One buffer of the whole length; a rank's block lies at its place in it.
    InPlace(&'a mut [u8]),
    /// Two buffers.
    OutOfPlace {
        /// The input; not looked at where an operation has none.
        send: &'a [u8],
        /// The result; not written where an operation has none.
        receive: &'a mut [u8],
    },
}

/// One call, as bytes: what every engine implements. [`Collectives`](crate::Collectives) has typed
/// forms.
///
/// # Shapes
/// `L` elements in place, or, apart:
///
/// | operation | send | receive |
/// |---|---|---|
/// | all-reduce | L | L |
/// | reduce | L | L on the root |
/// | broadcast | L on the root | L |
/// | all-gather | own block | L |
/// | reduce-scatter | L | own block |
/// | scatter | L on the root | own block |
/// | gather | own block | L on the root |
/// | all-to-all | L | L |
/// | send, receive | L, – | –, L |
///
/// Blocks are as equal as can be, or as `counts` says. Scatter and gather apart and without counts,
/// and all-to-all always, need blocks of one length, so `L` must be a multiple of the world size.
#[derive(Debug)]
pub struct Call<'a> {
    /// The operation of the call.
    pub operation: Operation,
    /// The elements' type.
    pub dtype: DType,
    /// Elements of each rank's block, for the operations that have blocks; the same on all ranks.
    pub counts: Option<&'a [usize]>,
    /// Input and result.
    pub buffers: Buffers<'a>,
}

impl<'a> Call<'a> {
    /// The call without its memory.
    pub fn shape(&self) -> CallShape<'a> {
        CallShape {
            operation: self.operation,
            dtype: self.dtype,
            counts: self.counts,
            lengths: match &self.buffers {
                Buffers::InPlace(buffer) => Lengths::InPlace(buffer.len()),
                Buffers::OutOfPlace { send, receive } => {
                    Lengths::OutOfPlace { send: send.len(), receive: receive.len() }
                }
            },
        }
    }

    /// Checks everything that one rank can know and says how the whole is cut into blocks.
    ///
    /// # Errors
    /// As [`CallShape::blocks`].
    pub fn blocks(&self, rank: usize, world_size: usize) -> Result<Blocks<'a>, CollectiveError> {
        self.shape().blocks(rank, world_size)
    }
}

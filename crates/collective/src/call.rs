//! One call of a collective, and whether it can be made.

use fusestep_tensor::DType;

use crate::{Blocks, CollectiveError, Operation, ReduceOp};

/// Where a call finds its input and puts its result.
#[derive(Debug)]
pub enum Buffers<'a> {
    /// One buffer of the whole length; a rank's block lies at its place in it.
    InPlace(&'a mut [u8]),
    /// Two buffers.
    Apart {
        /// The input; not looked at where an operation has none.
        send: &'a [u8],
        /// The result; not written where an operation has none.
        receive: &'a mut [u8],
    },
}

/// One call, as bytes: what every engine implements. [`Collectives`](crate::Collectives) has typed forms.
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
/// Blocks are as equal as can be, or as `counts` says. Scatter and gather apart and without counts, and all-to-all always, need
/// blocks of one length, so `L` must be a multiple of the world size.
#[derive(Debug)]
pub struct Call<'a> {
    /// What to do.
    pub operation: Operation,
    /// The elements' type.
    pub dtype: DType,
    /// Elements of each rank's block, for the operations that have blocks; the same on all ranks.
    pub counts: Option<&'a [usize]>,
    /// Input and result.
    pub buffers: Buffers<'a>,
}

/// What a call is for; compared between ranks and shown in errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallContext {
    /// Identifies the plan that makes the calls; 0 for none.
    pub plan_hash: u64,
    /// The bucket of gradients that is being reduced.
    pub bucket: Option<u32>,
}

impl<'a> Call<'a> {
    /// Checks everything that one rank can know and says how the whole is cut into blocks.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] naming the buffer, the expected and the found length; [`CollectiveError::Undefined`].
    pub fn blocks(&self, rank: usize, world_size: usize) -> Result<Blocks<'a>, CollectiveError> {
        let refuse = |reason: String| CollectiveError::Refused {
            rank,
            operation: self.operation.name(),
            reason,
        };
        let floating = matches!(
            self.dtype,
            DType::F16 | DType::BF16 | DType::F32 | DType::F64
        );
        if let Some(reduce @ ReduceOp::Average) = self.operation.reduce_op()
            && !floating
        {
            return Err(CollectiveError::Undefined {
                rank,
                operation: self.operation.name(),
                reduce,
                dtype: self.dtype,
            });
        }
        self.check_ranks(rank, world_size).map_err(refuse)?;
        let numel = self.numel(rank, world_size).map_err(refuse)?;
        let blocks = Blocks {
            numel,
            world_size,
            counts: self.counts,
        };
        self.check_lengths(rank, &blocks).map_err(refuse)?;
        Ok(blocks)
    }

    fn check_ranks(&self, rank: usize, world_size: usize) -> Result<(), String> {
        match self.operation {
            Operation::Split => {
                return Err("expected a call with data; use the method `split`".to_owned());
            }
            Operation::Send { to: peer } | Operation::Receive { from: peer } if peer == rank => {
                return Err(format!(
                    "expected another rank as the peer, found {peer}, this rank; copy the elements instead"
                ));
            }
            _ => {}
        }
        match self.operation.root() {
            Some(root) if root >= world_size => Err(format!(
                "root or peer: expected a rank below {world_size}, found {root}"
            )),
            _ => Ok(()),
        }
    }

    /// Elements of the whole.
    fn numel(&self, rank: usize, world_size: usize) -> Result<usize, String> {
        let element_bytes = self.dtype.len_bytes();
        let numel_of = |name: &str, bytes: &[u8]| match bytes.len() % element_bytes {
            0 => Ok(bytes.len() / element_bytes),
            _ => Err(format!(
                "{name}: expected a multiple of {element_bytes} bytes ({}), found {} bytes",
                self.dtype,
                bytes.len()
            )),
        };
        let (send, receive) = match &self.buffers {
            Buffers::InPlace(buffer) => (numel_of("buffer", buffer)?, numel_of("buffer", buffer)?),
            Buffers::Apart { send, receive } => {
                (numel_of("send", send)?, numel_of("receive", receive)?)
            }
        };
        if let Some(counts) = self.counts {
            if !self.operation.has_blocks() {
                return Err(
                    "expected no counts, found some: this operation has no blocks".to_owned(),
                );
            }
            if counts.len() != world_size {
                return Err(format!(
                    "counts: expected {world_size}, one for each rank, found {}",
                    counts.len()
                ));
            }
            let total = counts
                .iter()
                .try_fold(0usize, |sum, &count| sum.checked_add(count));
            let fits = total.filter(|total| {
                total
                    .checked_mul(element_bytes)
                    .is_some_and(|bytes| bytes <= isize::MAX as usize)
            });
            return fits.ok_or_else(|| {
                "counts: expected a sum that fits memory, found an overflow".to_owned()
            });
        }
        let in_place = matches!(self.buffers, Buffers::InPlace(_));
        let scaled = |block: usize| {
            block.checked_mul(world_size).ok_or_else(|| {
                "length: expected one that fits memory, found an overflow".to_owned()
            })
        };
        let numel = match self.operation {
            _ if in_place => send,
            Operation::Scatter { root } if root != rank => scaled(receive)?,
            Operation::Gather { root } if root != rank => scaled(send)?,
            Operation::Gather { .. }
            | Operation::AllGather
            | Operation::Broadcast { .. }
            | Operation::Receive { .. } => receive,
            _ => send,
        };
        let equal = match self.operation {
            Operation::AllToAll => true,
            Operation::Scatter { .. } | Operation::Gather { .. } => !in_place,
            _ => false,
        };
        match equal && numel % world_size != 0 {
            true => Err(format!(
                "length: expected a multiple of {world_size}, the world size, found {numel}; pass counts (scatter, gather) or pad"
            )),
            false => Ok(numel),
        }
    }

    fn check_lengths(&self, rank: usize, blocks: &Blocks<'_>) -> Result<(), String> {
        let element_bytes = self.dtype.len_bytes();
        let (whole, own) = (blocks.numel, blocks.of(rank).len());
        let at = |root: usize, numel: usize| (root == rank).then_some(numel);
        let (send_numel, receive_numel) = match self.operation {
            Operation::AllReduce(_) | Operation::AllToAll => (Some(whole), Some(whole)),
            Operation::Reduce { root, .. } => (Some(whole), at(root, whole)),
            Operation::Broadcast { root } => (at(root, whole), Some(whole)),
            Operation::AllGather => (Some(own), Some(whole)),
            Operation::ReduceScatter(_) => (Some(whole), Some(own)),
            Operation::Scatter { root } => (at(root, whole), Some(own)),
            Operation::Gather { root } => (Some(own), at(root, whole)),
            Operation::Send { .. } => (Some(whole), None),
            Operation::Receive { .. } => (None, Some(whole)),
            Operation::Barrier | Operation::Split => (None, None),
        };
        let require = |name: &str, bytes: &[u8], expected: Option<usize>| match expected {
            Some(expected) if bytes.len() != expected * element_bytes => Err(format!(
                "{name}: expected {expected} elements, found {}",
                bytes.len() / element_bytes
            )),
            _ => Ok(()),
        };
        match &self.buffers {
            Buffers::InPlace(buffer) => require("buffer", buffer, Some(whole)),
            Buffers::Apart { send, receive } => {
                require("send", send, send_numel)?;
                require("receive", receive, receive_numel)
            }
        }
    }
}

impl Operation {
    /// Whether each rank has a block of the whole that counts can set.
    pub(crate) fn has_blocks(self) -> bool {
        matches!(
            self,
            Operation::AllGather
                | Operation::ReduceScatter(_)
                | Operation::Scatter { .. }
                | Operation::Gather { .. }
        )
    }
}

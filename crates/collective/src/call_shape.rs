//! Shapes: calls without their memory, and the check whether a call can be made.

use fusestep_tensor::DType;

use crate::fingerprint::hash;
use crate::{Blocks, CallContext, CollectiveError, Fingerprint, Operation};

/// A [`Call`](crate::Call) without its memory: for engines whose buffers do not lie in host memory.
#[derive(Clone, Copy, Debug)]
pub struct CallShape<'a> {
    /// The operation of the call.
    pub operation: Operation,
    /// The elements' type.
    pub dtype: DType,
    /// Elements of each rank's block, for the operations that have blocks; the same on all ranks.
    pub counts: Option<&'a [usize]>,
    /// The lengths of the buffers.
    pub lengths: Lengths,
}

/// Bytes of the buffers of a call; see [`Buffers`](crate::Buffers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// Bytes of the one buffer.
    InPlace(usize),
    /// Bytes of both buffers.
    OutOfPlace {
        /// Bytes of the input.
        send: usize,
        /// Bytes of the result.
        receive: usize,
    },
}

impl CallShape<'static> {
    /// A split, which moves no elements, as ranks compare it.
    pub const SPLIT: Self = Self {
        operation: Operation::Split,
        dtype: DType::U8,
        counts: None,
        lengths: Lengths::InPlace(0),
    };
}

impl<'a> CallShape<'a> {
    /// The fingerprint that ranks compare, for a call that was checked and is of `numel` elements.
    pub fn fingerprint(&self, numel: usize, sequence: u64, context: CallContext) -> Fingerprint {
        Fingerprint {
            sequence,
            operation: self.operation,
            dtype: self.dtype,
            numel: numel as u64,
            counts_hash: self.counts.map_or(0, hash),
            context,
        }
    }

    /// Checks everything that one rank can know and says how the whole is cut into blocks.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] naming the buffer, the expected and the found length;
    /// [`CollectiveError::Undefined`].
    pub fn blocks(&self, rank: usize, world_size: usize) -> Result<Blocks<'a>, CollectiveError> {
        let refuse = |reason: String| CollectiveError::refused(rank, self.operation.name(), reason);
        let floating = matches!(self.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        if let Some(reduce) = self.operation.reduce_op()
            && reduce.is_of_floats()
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
        let blocks = Blocks { numel, world_size, counts: self.counts };
        self.check_lengths(rank, &blocks).map_err(refuse)?;
        Ok(blocks)
    }

    fn check_ranks(&self, rank: usize, world_size: usize) -> Result<(), String> {
        match self.operation {
            Operation::Split => {
                return Err("expected a call with data; use the method `split`".to_owned());
            }
            Operation::ReduceUpdate => {
                return Err("expected one buffer; use the method `reduce_update`".to_owned());
            }
            Operation::Send { to: peer } | Operation::Receive { from: peer } if peer == rank => {
                return Err(format!(
                    "expected another rank as the peer, found {peer}, this rank; copy the \
                     elements instead"
                ));
            }
            _ => {}
        }
        match self.operation.root() {
            Some(root) if root >= world_size => {
                Err(format!("root or peer: expected a rank below {world_size}, found {root}"))
            }
            _ => Ok(()),
        }
    }

    /// Elements of the whole.
    fn numel(&self, rank: usize, world_size: usize) -> Result<usize, String> {
        let element_bytes = self.dtype.len_bytes();
        let numel_of = |name: &str, len_bytes: usize| match len_bytes % element_bytes {
            0 => Ok(len_bytes / element_bytes),
            _ => Err(format!(
                "{name}: expected a multiple of {element_bytes} bytes ({}), found {} bytes",
                self.dtype, len_bytes
            )),
        };
        let (send, receive) = match self.lengths {
            Lengths::InPlace(buffer) => {
                let numel = numel_of("buffer", buffer)?;
                (numel, numel)
            }
            Lengths::OutOfPlace { send, receive } => {
                (numel_of("send", send)?, numel_of("receive", receive)?)
            }
        };
        if let Some(counts) = self.counts {
            return self.counted(counts, world_size);
        }
        let in_place = matches!(self.lengths, Lengths::InPlace(_));
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
        if equal && numel % world_size != 0 {
            Err(format!(
                "length: expected a multiple of {world_size}, the world size, found {numel}; pass \
                 counts (scatter, gather) or pad"
            ))
        } else {
            Ok(numel)
        }
    }

    /// Elements of the whole, where the caller gives the count of each rank.
    fn counted(&self, counts: &[usize], world_size: usize) -> Result<usize, String> {
        let element_bytes = self.dtype.len_bytes();
        if !self.operation.has_blocks() {
            return Err("expected no counts, found some: this operation has no blocks".to_owned());
        }
        if counts.len() != world_size {
            return Err(format!(
                "counts: expected {world_size}, one for each rank, found {}",
                counts.len()
            ));
        }
        let mut counts = counts.iter();
        let total = counts.try_fold(0usize, |sum, &count| sum.checked_add(count));
        let bytes = |total: &usize| total.checked_mul(element_bytes);
        let fits = total.filter(|total| bytes(total).is_some_and(|len| len <= isize::MAX as usize));
        fits.ok_or_else(|| "counts: expected a sum that fits memory, found an overflow".to_owned())
    }

    fn check_lengths(&self, rank: usize, blocks: &Blocks<'_>) -> Result<(), String> {
        let element_bytes = self.dtype.len_bytes();
        let (whole, own) = (blocks.numel, blocks.of(rank).len());
        let numel_of = |part| match part {
            Part::Whole => Some(whole),
            Part::Own => Some(own),
            Part::Nothing => None,
        };
        let require = |name: &str, len_bytes: usize, expected: Option<usize>| match expected {
            Some(expected) if len_bytes != expected * element_bytes => Err(format!(
                "{name}: expected {expected} elements, found {}",
                len_bytes / element_bytes
            )),
            _ => Ok(()),
        };
        match self.lengths {
            Lengths::InPlace(buffer) => require("buffer", buffer, Some(whole)),
            Lengths::OutOfPlace { send, receive } => {
                let [gives, gets] = self.operation.parts(rank);
                require("send", send, numel_of(gives))?;
                require("receive", receive, numel_of(gets))
            }
        }
    }
}

/// Part of the whole that a rank gives to a call or gets from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All elements.
    Whole,
    /// The rank's own block.
    Own,
    /// No elements.
    Nothing,
}

impl Operation {
    /// The part that `rank` gives, and the part that it gets.
    pub fn parts(self, rank: usize) -> [Part; 2] {
        let at = |root| if root == rank { Part::Whole } else { Part::Nothing };
        match self {
            Operation::AllReduce(_) | Operation::AllToAll => [Part::Whole, Part::Whole],
            Operation::Reduce { root, .. } => [Part::Whole, at(root)],
            Operation::Broadcast { root } => [at(root), Part::Whole],
            Operation::AllGather => [Part::Own, Part::Whole],
            Operation::ReduceScatter(_) => [Part::Whole, Part::Own],
            Operation::Scatter { root } => [at(root), Part::Own],
            Operation::Gather { root } => [Part::Own, at(root)],
            Operation::Send { .. } => [Part::Whole, Part::Nothing],
            Operation::Receive { .. } => [Part::Nothing, Part::Whole],
            Operation::Barrier | Operation::Split | Operation::ReduceUpdate => {
                [Part::Nothing, Part::Nothing]
            }
        }
    }

    /// Whether each rank has a block of the whole that counts can set.
    pub(crate) fn has_blocks(self) -> bool {
        matches!(
            self,
            Operation::AllGather
                | Operation::ReduceScatter(_)
                | Operation::Scatter { .. }
                | Operation::Gather { .. }
                | Operation::ReduceUpdate
        )
    }
}

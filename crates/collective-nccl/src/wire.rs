//! What ranks tell each other through the control communicator before data moves.

use fusestep_collective::{CallContext, CollectiveError, Fingerprint, Operation, ReduceOp};
use fusestep_tensor::DType;

/// Bytes of a frame.
pub(crate) const FRAME_BYTES: usize = 72;

/// Why a rank speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// It is about to make this call.
    Call(Fingerprint),
    /// The data of its last call has not come through.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code))]
    Stuck(Fingerprint),
}

const DTYPES: [DType; 8] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
];

/// The kind of an operation, its reduction and its root or peer.
fn parts(operation: Operation) -> (u8, u8, u64) {
    let kind = match operation {
        Operation::AllReduce(_) => 0,
        Operation::Reduce { .. } => 1,
        Operation::Broadcast { .. } => 2,
        Operation::AllGather => 3,
        Operation::ReduceScatter(_) => 4,
        Operation::Scatter { .. } => 5,
        Operation::Gather { .. } => 6,
        Operation::AllToAll => 7,
        Operation::Send { .. } => 8,
        Operation::Receive { .. } => 9,
        Operation::Barrier => 10,
        Operation::Split => 11,
    };
    let op = |op: ReduceOp| ReduceOp::ALL.iter().position(|&other| other == op);
    let reduce = operation.reduce_op().and_then(op).unwrap_or(0);
    (kind, reduce as u8, operation.root().unwrap_or(0) as u64)
}

fn operation(kind: u8, reduce: u8, root: u64) -> Option<Operation> {
    let reduce = *ReduceOp::ALL.get(usize::from(reduce))?;
    let root = usize::try_from(root).ok()?;
    Some(match kind {
        0 => Operation::AllReduce(reduce),
        1 => Operation::Reduce { reduce, root },
        2 => Operation::Broadcast { root },
        3 => Operation::AllGather,
        4 => Operation::ReduceScatter(reduce),
        5 => Operation::Scatter { root },
        6 => Operation::Gather { root },
        7 => Operation::AllToAll,
        8 => Operation::Send { to: root },
        9 => Operation::Receive { from: root },
        10 => Operation::Barrier,
        11 => Operation::Split,
        _ => return None,
    })
}

impl Frame {
    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        match self {
            Frame::Call(print) | Frame::Stuck(print) => print,
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; FRAME_BYTES] {
        let print = self.fingerprint();
        let (kind, reduce, root) = parts(print.operation);
        let dtype = DTYPES.iter().position(|&dtype| dtype == print.dtype);
        let CallContext { plan_hash, bucket } = print.context;
        let small = [
            u8::from(matches!(self, Frame::Stuck(_))),
            kind,
            reduce,
            dtype.unwrap_or(usize::MAX) as u8,
            u8::from(bucket.is_some()),
        ];
        let words = [
            print.sequence,
            root,
            print.numel,
            print.counts_hash,
            plan_hash,
            u64::from(bucket.unwrap_or(0)),
        ];
        let mut bytes = [0; FRAME_BYTES];
        bytes[..small.len()].copy_from_slice(&small);
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` for bytes that no rank of this version has written.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; FRAME_BYTES] = bytes.try_into().ok()?;
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 + 8 * index..][..8]);
            u64::from_le_bytes(word)
        };
        let bucket = u32::try_from(word(5)).ok()?;
        let print = Fingerprint {
            sequence: word(0),
            operation: operation(bytes[1], bytes[2], word(1))?,
            dtype: *DTYPES.get(usize::from(bytes[3]))?,
            numel: word(2),
            counts_hash: word(3),
            context: CallContext {
                plan_hash: word(4),
                bucket: (bytes[4] == 1).then_some(bucket),
            },
        };
        match bytes[0] {
            0 => Some(Frame::Call(print)),
            1 => Some(Frame::Stuck(print)),
            _ => None,
        }
    }
}

/// A mismatch between parties, said of the ranks they are.
pub(crate) fn of_ranks(mut error: CollectiveError, ranks: &[usize]) -> CollectiveError {
    if let CollectiveError::Mismatch {
        expected_rank,
        found_rank,
        ..
    } = &mut error
    {
        (*expected_rank, *found_rank) = (ranks[*expected_rank], ranks[*found_rank]);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        for kind in 0..12 {
            for reduce in 0..5 {
                let operation = operation(kind, reduce, 3).unwrap();
                let print = Fingerprint {
                    sequence: 7,
                    operation,
                    dtype: DTYPES[usize::from(kind) % 8],
                    numel: 1 << 40,
                    counts_hash: 5,
                    context: CallContext {
                        plan_hash: u64::MAX,
                        bucket: (kind % 2 == 0).then_some(u32::from(reduce)),
                    },
                };
                for frame in [Frame::Call(print), Frame::Stuck(print)] {
                    assert_eq!(Frame::from_bytes(&frame.to_bytes()), Some(frame));
                }
            }
        }
        assert_eq!(Frame::from_bytes(&[0; 3]), None);
        assert_eq!(Frame::from_bytes(&[99; FRAME_BYTES]), None);
    }
}

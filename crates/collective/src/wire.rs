//! Fingerprints as bytes, for engines whose ranks do not share memory.

use fusestep_tensor::DType;

use crate::{CallContext, CollectiveError, Fingerprint, Operation, ReduceOp};

const WORDS: usize = 7;

impl Fingerprint {
    /// Bytes of a fingerprint in a message.
    pub const WIRE_BYTES: usize = WORDS * size_of::<u64>();

    /// The fingerprint for a message to a process of the same version, on a machine of any byte
    /// order.
    pub fn to_bytes(&self) -> [u8; Self::WIRE_BYTES] {
        let words = [
            self.sequence,
            self.kind(),
            self.operation.root().unwrap_or(0) as u64,
            self.numel,
            self.counts_hash,
            self.context.plan_hash,
            self.divisor_bits(),
        ];
        let mut bytes = [0; Self::WIRE_BYTES];
        for (place, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The fingerprint that [`Self::to_bytes`] made these bytes of; `None` for any other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::WIRE_BYTES] = bytes.try_into().ok()?;
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*place);
        }
        let [sequence, kind, root, numel, counts_hash, plan_hash, divisor] = words;
        let root = usize::try_from(root).ok()?;
        let (operation, dtype, bucket) = Self::of_kind(kind, root, divisor)?;
        Some(Self {
            sequence,
            operation,
            dtype,
            numel,
            counts_hash,
            context: CallContext { plan_hash, bucket },
        })
    }

    /// The fingerprints that [`Self::to_bytes`] made these bytes of on all ranks, for this call of
    /// `rank`.
    ///
    /// # Errors
    /// [`CollectiveError::Engine`] for any other bytes.
    pub fn read_all<'a>(
        &self,
        rank: usize,
        all: impl Iterator<Item = &'a [u8]>,
    ) -> Result<Vec<Self>, CollectiveError> {
        let all: Option<Vec<Self>> = all.map(Self::from_bytes).collect();
        let reason = "what no rank of this version says; start all ranks from one program";
        all.ok_or_else(|| CollectiveError::engine(rank, self.operation.name(), reason))
    }

    /// The divisor of the reduction, as bits; 0 without one.
    pub(crate) fn divisor_bits(&self) -> u64 {
        self.operation.reduce_op().map_or(0, ReduceOp::divisor_bits)
    }

    /// One word for the operation without its root and divisor, the dtype and the bucket.
    pub(crate) fn kind(&self) -> u64 {
        let reduce = self.operation.reduce_op().map_or(0, ReduceOp::code);
        let bucket = self.context.bucket;
        self.operation.code() as u64
            | reduce << 8
            | (self.dtype as u64) << 16
            | u64::from(bucket.is_some()) << 24
            | u64::from(bucket.unwrap_or(0)) << 32
    }

    /// Operation, dtype and bucket that [`Self::kind`] made the word of; `None` for any other word.
    pub(crate) fn of_kind(
        word: u64,
        root: usize,
        divisor: u64,
    ) -> Option<(Operation, DType, Option<u32>)> {
        let byte = |at: u32| word >> (8 * at) & 0xff;
        let reduce = ReduceOp::of_code(byte(1), divisor)?;
        let dtype = |dtype: &DType| *dtype as u64 == byte(2);
        let bucket = match byte(3) {
            0 => None,
            1 => Some((word >> 32) as u32),
            _ => return None,
        };
        let operation = operation(byte(0), reduce, root)?;
        Some((operation, DType::ALL.into_iter().find(dtype)?, bucket))
    }
}

/// The operation whose [`Operation::code`] this is.
fn operation(code: u64, reduce: ReduceOp, root: usize) -> Option<Operation> {
    Some(match code {
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
        12 => Operation::ReduceUpdate,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Divisor;

    #[test]
    fn fingerprints_come_back_as_they_went_and_differ_where_calls_do() {
        let mut seen = std::collections::HashSet::new();
        for kind in 0..13 {
            let tree = |divisor| ReduceOp::Tree(Divisor::of(divisor));
            for reduce in ReduceOp::ALL.into_iter().chain([tree(1.0), tree(12.0)]) {
                for dtype in DType::ALL {
                    for bucket in [None, Some(0), Some(u32::MAX)] {
                        let print = Fingerprint {
                            sequence: u64::MAX - 1,
                            operation: operation(kind, reduce, 3).unwrap(),
                            dtype,
                            numel: 1 << 40,
                            counts_hash: 5,
                            context: CallContext { plan_hash: u64::MAX, bucket },
                        };
                        assert_eq!(Fingerprint::from_bytes(&print.to_bytes()), Some(print));
                        seen.insert(print.to_bytes());
                    }
                }
            }
        }
        // Of thirteen operations three reduce, in seven ways.
        assert_eq!(seen.len(), (10 + 3 * 7) * 8 * 3);
    }

    #[test]
    fn other_bytes_are_refused() {
        assert_eq!(Fingerprint::from_bytes(&[0; 3]), None);
        let strange = [0xff; Fingerprint::WIRE_BYTES];
        assert_eq!(Fingerprint::from_bytes(&strange), None);
        let own = crate::CallShape::SPLIT.fingerprint(0, 1, CallContext::default());
        let bytes = own.to_bytes();
        let read = |of: [&[u8]; 2]| own.read_all(1, of.into_iter());
        assert_eq!(read([&bytes, &bytes]), Ok(vec![own, own]));
        let error = read([&bytes, &strange]).unwrap_err();
        assert!(error.to_string().starts_with("split on rank 1: expected the engine to do it"));
    }
}

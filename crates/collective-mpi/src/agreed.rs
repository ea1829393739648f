//! Kinds of calls that ranks have compared and need not compare again.

use std::collections::HashSet;

use fusestep_collective::{CallContext, CallShape, Fingerprint, Lengths, Operation};

/// Fingerprints, without sequence numbers, of calls on which all ranks have agreed, if ranks
/// compare each kind once.
#[derive(Debug, Default)]
pub(crate) struct Agreed {
    all: HashSet<Fingerprint>,
    /// The last of these calls. Frequent calls often come in a row, and a short call takes as long
    /// as ten look-ups.
    last: Option<Fingerprint>,
}

impl Agreed {
    /// Adds a call; returns whether it is new.
    pub(crate) fn insert(&mut self, print: Fingerprint) -> bool {
        let kind = Fingerprint { sequence: 0, ..print };
        self.last != Some(kind) && {
            self.last = Some(kind);
            self.all.insert(kind)
        }
    }

    /// The elements of a call of this shape, if it is the same all-reduce in place as the last one.
    /// Checks would find the same as before. For a short all-reduce of MPI they take longer than
    /// all other work here.
    pub(crate) fn like(&self, shape: &CallShape<'_>, context: &CallContext) -> Option<usize> {
        let last = self.last.as_ref()?;
        let (Operation::AllReduce(_), None) = (shape.operation, shape.counts) else {
            return None;
        };
        let Lengths::InPlace(len_bytes) = shape.lengths else {
            return None;
        };
        let is_like_it = last.operation == shape.operation
            && last.dtype == shape.dtype
            && last.numel * last.dtype.len_bytes() as u64 == len_bytes as u64
            && last.context == *context;
        is_like_it.then_some(last.numel as usize)
    }
}

#[cfg(test)]
mod tests {
    use fusestep_collective::ReduceOp;
    use fusestep_tensor::DType;

    use super::*;

    #[test]
    fn calls_are_agreed_on_once_whatever_is_between_them() {
        let mut agreed = Agreed::default();
        let print = |sequence, numel, bucket| Fingerprint {
            sequence,
            operation: Operation::Barrier,
            dtype: DType::F32,
            numel,
            counts_hash: 0,
            context: CallContext { plan_hash: 7, bucket },
        };
        let calls = [
            (print(1, 3, None), true),
            (print(2, 3, None), false),
            (print(3, 4, None), true),
            (print(4, 3, Some(0)), true),
            (print(5, 3, None), false),
            (print(6, 4, None), false),
            (print(7, 4, Some(0)), true),
            (print(8, 3, Some(0)), false),
        ];
        for (print, is_new) in calls {
            assert_eq!(agreed.insert(print), is_new, "{print:?}");
        }
    }

    #[test]
    fn only_the_same_all_reduce_in_place_is_like_the_last() {
        let context = CallContext { plan_hash: 7, bucket: Some(2) };
        let (operation, dtype) = (Operation::AllReduce(ReduceOp::Sum), DType::F32);
        let like = |agreed: &Agreed, operation, dtype, in_place: Option<usize>, context| {
            let lengths = match in_place {
                Some(len_bytes) => Lengths::InPlace(len_bytes),
                None => Lengths::OutOfPlace { send: 16, receive: 16 },
            };
            let shape = CallShape { operation, dtype, counts: None, lengths };
            agreed.like(&shape, &context)
        };
        let mut agreed = Agreed::default();
        assert_eq!(like(&agreed, operation, dtype, Some(16), context), None);
        let print =
            Fingerprint { sequence: 5, operation, dtype, numel: 4, counts_hash: 0, context };
        assert!(agreed.insert(print));
        assert_eq!(like(&agreed, operation, dtype, Some(16), context), Some(4));
        let maximum = Operation::AllReduce(ReduceOp::Max);
        let other = CallContext { bucket: None, ..context };
        // 15 bytes are no 4 elements, and are refused as any first call is.
        for (operation, dtype, in_place, context) in [
            (maximum, dtype, Some(16), context),
            (operation, DType::I32, Some(16), context),
            (operation, dtype, Some(12), context),
            (operation, dtype, Some(15), context),
            (operation, dtype, None, context),
            (operation, dtype, Some(16), other),
        ] {
            assert_eq!(like(&agreed, operation, dtype, in_place, context), None);
        }
        let gather = Fingerprint { operation: Operation::AllGather, ..print };
        assert!(agreed.insert(gather));
        assert_eq!(like(&agreed, gather.operation, dtype, Some(16), context), None);
    }
}

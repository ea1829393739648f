//! Which calls need not be compared.

use std::collections::HashSet;

use fusestep_collective::{Buffers, Call, CallContext, Fingerprint, Operation};

/// Calls that all ranks have agreed on, if they compare each kind once: fingerprints but for the
/// sequence.
#[derive(Debug, Default)]
pub(crate) struct Agreed {
    all: HashSet<Fingerprint>,
    /// One of them: calls that are often made are often made in a row, and short ones take as long
    /// as ten look-ups.
    last: Option<Fingerprint>,
}

impl Agreed {
    /// Adds a call; says whether it was not there yet.
    pub(crate) fn insert(&mut self, print: Fingerprint) -> bool {
        let kind = Fingerprint { sequence: 0, ..print };
        self.last != Some(kind) && {
            self.last = Some(kind);
            self.all.insert(kind)
        }
    }

    /// The last call, without its number, if this one is like it: an all-reduce in place of as many
    /// elements. The checks of such a call would find what they found then, and take a short
    /// all-reduce of MPI's own more time than all else that is done for it here.
    pub(crate) fn like(&self, call: &Call<'_>, context: CallContext) -> Option<Fingerprint> {
        let last = self.last.as_ref()?;
        let (Operation::AllReduce(_), None) = (call.operation, call.counts) else {
            return None;
        };
        let Buffers::InPlace(buffer) = &call.buffers else {
            return None;
        };
        let is_like_it = last.operation == call.operation
            && last.dtype == call.dtype
            && last.numel * last.dtype.len_bytes() as u64 == buffer.len() as u64
            && last.context == context;
        is_like_it.then_some(*last)
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
        let mut memory = [0u8; 32];
        let (first, second) = memory.split_at_mut(16);
        let mut like = |agreed: &Agreed, operation, dtype, in_place: Option<usize>, context| {
            let buffers = match in_place {
                Some(len_bytes) => Buffers::InPlace(&mut first[..len_bytes]),
                None => Buffers::OutOfPlace { send: &*second, receive: first },
            };
            let call = Call { operation, dtype, counts: None, buffers };
            agreed.like(&call, context)
        };
        let mut agreed = Agreed::default();
        assert_eq!(like(&agreed, operation, dtype, Some(16), context), None);
        let print =
            Fingerprint { sequence: 5, operation, dtype, numel: 4, counts_hash: 0, context };
        assert!(agreed.insert(print));
        let last = like(&agreed, operation, dtype, Some(16), context);
        assert_eq!(last, Some(Fingerprint { sequence: 0, ..print }));
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

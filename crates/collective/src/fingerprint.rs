//! Fingerprints of calls, which ranks compare before data moves.

use fusestep_tensor::DType;

use crate::{CallContext, CollectiveError, Field, Operation};

/// The fields of a call that must be equal on all ranks. Buffers may be in place on one rank and
/// apart on another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// Number of the call within its group, from 1; transfers count apart, for each pair and
    /// direction.
    pub sequence: u64,
    /// Operation with reduction and root. A transfer is a `Send` on both sides.
    pub operation: Operation,
    /// The elements' type.
    pub dtype: DType,
    /// Elements of the whole.
    pub numel: u64,
    /// Hash of the counts, and of the types of replicas; 0 without counts.
    pub counts_hash: u64,
    /// Plan and bucket.
    pub context: CallContext,
}

impl Fingerprint {
    /// One field as text.
    pub fn field(&self, field: Field) -> String {
        let or_none = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
        match field {
            Field::Operation => self.operation.name().to_owned(),
            Field::ReduceOp => or_none(self.operation.reduce_op().map(|op| op.to_string())),
            Field::DType => self.dtype.to_string(),
            Field::Numel => self.numel.to_string(),
            Field::Root => or_none(self.operation.root().map(|root| root.to_string())),
            Field::Counts => format!("{:016x}", self.counts_hash),
            Field::Bucket => or_none(self.context.bucket.map(|bucket| bucket.to_string())),
            Field::PlanHash => format!("{:016x}", self.context.plan_hash),
            Field::Sequence => self.sequence.to_string(),
        }
    }

    /// Compares the fingerprints of all ranks; every rank that does so gets the same answer.
    ///
    /// # Errors
    /// [`CollectiveError::Mismatch`] with the majority's side against the lowest rank that differs
    /// from it. Between equally many ranks the side with the lowest rank counts as the majority.
    /// The field is the first in which the two sides differ.
    pub fn compare<'a>(
        world_size: usize,
        of: impl Fn(usize) -> &'a Fingerprint,
    ) -> Result<(), CollectiveError> {
        let first = of(0);
        if (1..world_size).all(|rank| of(rank) == first) {
            return Ok(());
        }
        let votes = |rank: usize| (0..world_size).filter(|&other| of(other) == of(rank)).count();
        // `max_by_key` takes the last of equals, so it goes from the highest rank down.
        let expected_rank = (0..world_size).rev().max_by_key(|&rank| votes(rank)).unwrap_or(0);
        let expected = of(expected_rank);
        let found_rank = (0..world_size).find(|&rank| of(rank) != expected).unwrap_or(0);
        let found = of(found_rank);
        let differs = |field: &Field| expected.field(*field) != found.field(*field);
        let field = Field::ALL.into_iter().find(differs).unwrap_or(Field::Sequence);
        Err(CollectiveError::Mismatch {
            field,
            sequence: expected.sequence,
            bucket: expected.context.bucket,
            expected_rank,
            expected: expected.field(field),
            expected_operation: expected.operation.name(),
            found_rank,
            found: found.field(field),
            found_operation: found.operation.name(),
        })
    }
}

/// FNV-1a over the counts, word by word; never 0, which says that there are none.
pub(crate) fn hash(counts: &[usize]) -> u64 {
    let mix = |hash: u64, &count: &usize| (hash ^ count as u64).wrapping_mul(0x0000_0100_0000_01b3);
    counts.iter().fold(0xcbf2_9ce4_8422_2325, mix).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    #[test]
    fn the_majority_is_expected_and_the_first_difference_named() {
        let base = Fingerprint {
            sequence: 3,
            operation: Operation::AllReduce(ReduceOp::Sum),
            dtype: DType::F32,
            numel: 10,
            counts_hash: 0,
            context: CallContext::default(),
        };
        let odd = Fingerprint { numel: 11, sequence: 4, ..base };
        for (all, expected, found) in
            [(vec![base, base, odd], 0, 2), (vec![odd, base, base], 1, 0), (vec![base, odd], 0, 1)]
        {
            match Fingerprint::compare(all.len(), |rank| &all[rank]) {
                Err(CollectiveError::Mismatch {
                    field: Field::Numel,
                    expected_rank,
                    found_rank,
                    ..
                }) => assert_eq!((expected_rank, found_rank), (expected, found)),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(Fingerprint::compare(3, |_| &base), Ok(()));
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
    }
}

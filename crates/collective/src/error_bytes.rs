//! Errors as bytes, for engines whose ranks are processes.

use crate::CollectiveError;
use crate::error::short;

impl CollectiveError {
    /// The error for another process of the same version, about 2 KiB at most; longer texts are
    /// cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut error = self.clone();
        if let Self::Aborted { reason, .. }
        | Self::Refused { reason, .. }
        | Self::Engine { reason, .. } = &mut error
        {
            *reason = short(reason);
        }
        serde_json::to_vec(&error).expect("errors are plain data with text keys")
    }

    /// The error that [`Self::to_bytes`] made these bytes of; `None` for any other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use fusestep_tensor::DType;

    use super::*;
    use crate::{Field, ReduceOp};

    #[test]
    fn errors_come_back_as_they_were_and_long_texts_are_cut() {
        let errors = [
            CollectiveError::Late {
                ranks: vec![1, 3],
                operation: "barrier",
                sequence: 4,
                bucket: Some(2),
                timeout_ms: 5,
            },
            CollectiveError::Mismatch {
                field: Field::Root,
                sequence: 1,
                bucket: None,
                expected_rank: 0,
                expected: "1".into(),
                expected_operation: "reduce",
                found_rank: 2,
                found: "2".into(),
                found_operation: "broadcast",
            },
            CollectiveError::Panicked { rank: 1, calls: 2 },
            CollectiveError::Left { rank: 1, calls: 0 },
            CollectiveError::Died { rank: 2, calls: 7 },
            CollectiveError::Aborted { rank: 0, reason: "enough".into() },
            CollectiveError::Dropped { rank: 3, operation: "all-reduce" },
            CollectiveError::Refused { rank: 1, operation: "split", reason: "expected ä".into() },
            CollectiveError::Engine { rank: 1, operation: "scatter", reason: "no".into() },
            CollectiveError::Undefined {
                rank: 1,
                operation: "reduce",
                reduce: ReduceOp::Average,
                dtype: DType::I64,
            },
        ];
        for error in errors {
            assert_eq!(CollectiveError::from_bytes(&error.to_bytes()), Some(error));
        }
        let long = CollectiveError::Aborted { rank: 0, reason: "ä".repeat(5000) };
        assert!(long.to_bytes().len() < 2048);
        assert!(CollectiveError::from_bytes(&long.to_bytes()).is_some());
        assert_eq!(CollectiveError::from_bytes(b"[]"), None);
    }
}

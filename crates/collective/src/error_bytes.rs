//! Errors as bytes, for engines whose ranks are processes.

use serde_json::{Value, json};

use crate::{CollectiveError, Field, Operation, ReduceOp};

/// Longest text of an error in bytes, so that the whole fits a short message.
const TEXT_BYTES: usize = 1024;

impl CollectiveError {
    /// The error for another process of the same version, about 2 KiB at most; longer texts are
    /// cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        error_value(self).to_string().into_bytes()
    }

    /// The error of which [`Self::to_bytes`] made these; `None` if it made others.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        error_from(&serde_json::from_slice(bytes).ok()?)
    }
}

fn position<T: PartialEq>(all: &[T], one: T) -> u64 {
    all.iter().position(|other| *other == one).unwrap_or(0) as u64
}

/// The part of a text that fits.
fn short(text: &str) -> String {
    let end = (0..=text.len().min(TEXT_BYTES))
        .rev()
        .find(|&end| text.is_char_boundary(end));
    text[..end.unwrap_or(0)].to_owned()
}

fn error_value(error: &CollectiveError) -> Value {
    use CollectiveError as E;
    match error {
        E::Late {
            ranks,
            operation,
            sequence,
            bucket,
            timeout_ms,
        } => {
            json!(["late", ranks, operation, sequence, bucket, timeout_ms])
        }
        E::Mismatch {
            field,
            sequence,
            bucket,
            expected_rank,
            expected,
            expected_operation,
            found_rank,
            found,
            found_operation,
        } => json!([
            "mismatch",
            position(&Field::ALL, *field),
            sequence,
            bucket,
            expected_rank,
            expected,
            expected_operation,
            found_rank,
            found,
            found_operation
        ]),
        E::Panicked { rank, calls } => json!(["panicked", rank, calls]),
        E::Left { rank, calls } => json!(["left", rank, calls]),
        E::Died { rank, calls } => json!(["died", rank, calls]),
        E::Aborted { rank, reason } => json!(["aborted", rank, short(reason)]),
        E::Dropped { rank, operation } => json!(["dropped", rank, operation]),
        E::Refused {
            rank,
            operation,
            reason,
        } => json!(["refused", rank, operation, short(reason)]),
        E::Engine {
            rank,
            operation,
            reason,
        } => json!(["engine", rank, operation, short(reason)]),
        E::Undefined {
            rank,
            operation,
            reduce,
            dtype,
        } => json!([
            "undefined",
            rank,
            operation,
            position(&ReduceOp::ALL, *reduce),
            dtype.name()
        ]),
    }
}

fn error_from(value: &Value) -> Option<CollectiveError> {
    use CollectiveError as E;
    let rank = || number(&value[1]);
    Some(match value[0].as_str()? {
        "late" => E::Late {
            ranks: value[1]
                .as_array()?
                .iter()
                .map(number)
                .collect::<Option<_>>()?,
            operation: name(&value[2])?,
            sequence: value[3].as_u64()?,
            bucket: value[4].as_u64().map(|bucket| bucket as u32),
            timeout_ms: value[5].as_u64()?,
        },
        "mismatch" => E::Mismatch {
            field: *Field::ALL.get(number(&value[1])?)?,
            sequence: value[2].as_u64()?,
            bucket: value[3].as_u64().map(|bucket| bucket as u32),
            expected_rank: number(&value[4])?,
            expected: text(&value[5])?,
            expected_operation: name(&value[6])?,
            found_rank: number(&value[7])?,
            found: text(&value[8])?,
            found_operation: name(&value[9])?,
        },
        "panicked" => E::Panicked {
            rank: rank()?,
            calls: value[2].as_u64()?,
        },
        "left" => E::Left {
            rank: rank()?,
            calls: value[2].as_u64()?,
        },
        "died" => E::Died {
            rank: rank()?,
            calls: value[2].as_u64()?,
        },
        "aborted" => E::Aborted {
            rank: rank()?,
            reason: text(&value[2])?,
        },
        "dropped" => E::Dropped {
            rank: rank()?,
            operation: name(&value[2])?,
        },
        "refused" => E::Refused {
            rank: rank()?,
            operation: name(&value[2])?,
            reason: text(&value[3])?,
        },
        "engine" => E::Engine {
            rank: rank()?,
            operation: name(&value[2])?,
            reason: text(&value[3])?,
        },
        "undefined" => E::Undefined {
            rank: rank()?,
            operation: name(&value[2])?,
            reduce: *ReduceOp::ALL.get(number(&value[3])?)?,
            dtype: value[4].as_str()?.parse().ok()?,
        },
        _ => return None,
    })
}

fn number(value: &Value) -> Option<usize> {
    value.as_u64().map(|number| number as usize)
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// The name of an operation as the constant that it is here.
fn name(value: &Value) -> Option<&'static str> {
    let found = value.as_str()?;
    let known = Operation::NAMES.into_iter().find(|name| *name == found);
    // The caller's own name for a call; a group ends once, so this happens once in its life.
    Some(known.unwrap_or_else(|| Box::leak(short(found).into_boxed_str())))
}

#[cfg(test)]
mod tests {
    use fusestep_tensor::DType;

    use super::*;

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
            CollectiveError::Aborted {
                rank: 0,
                reason: "enough".into(),
            },
            CollectiveError::Dropped {
                rank: 3,
                operation: "all-reduce",
            },
            CollectiveError::Refused {
                rank: 1,
                operation: "split",
                reason: "expected ä".into(),
            },
            CollectiveError::Engine {
                rank: 1,
                operation: "scatter",
                reason: "no".into(),
            },
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
        let long = CollectiveError::Aborted {
            rank: 0,
            reason: "ä".repeat(5000),
        };
        assert!(long.to_bytes().len() < 2048);
        assert!(CollectiveError::from_bytes(&long.to_bytes()).is_some());
        assert_eq!(CollectiveError::from_bytes(b"[]"), None);
    }
}

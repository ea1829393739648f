//! What ranks tell each other besides data: fingerprints, and why a group ends.

use fusestep_collective::{CollectiveError, Field, Fingerprint, Membership, Operation, ReduceOp};
use serde_json::{Value, json};

/// Bytes of a [`Header`].
pub(crate) const HEADER_BYTES: usize = Fingerprint::WIRE_BYTES + 3 * 8;

/// Longest text that goes into a notice, so that a notice is short enough to need no answer from its receiver.
const TEXT_BYTES: usize = 1024;

/// What a rank tells the others before data moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) fingerprint: Fingerprint,
    /// The subgroup it joins, if it splits.
    pub(crate) membership: Option<Membership>,
    /// The number of a group it would lead.
    pub(crate) proposal: u32,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let member = self.membership.unwrap_or(Membership { colour: 0, key: 0 });
        let words = [
            u64::from(self.membership.is_some()),
            u64::from(member.colour) << 32 | u64::from(member.key),
            u64::from(self.proposal),
        ];
        let mut bytes = [0; HEADER_BYTES];
        let (print, rest) = bytes.split_at_mut(Fingerprint::WIRE_BYTES);
        print.copy_from_slice(&self.fingerprint.to_bytes());
        for (to, word) in rest.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` if these are not the bytes of a header.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (print, rest) = bytes.split_at_checked(Fingerprint::WIRE_BYTES)?;
        let mut words = rest
            .chunks_exact(8)
            .map(|word| word.try_into().map(u64::from_le_bytes));
        let mut next = || words.next()?.ok();
        let (joins, member, proposal) = (next()?, next()?, next()?);
        Some(Self {
            fingerprint: Fingerprint::from_bytes(print)?,
            membership: (joins != 0).then_some(Membership {
                colour: (member >> 32) as u32,
                key: member as u32,
            }),
            proposal: proposal as u32,
        })
    }
}

fn position<T: PartialEq>(all: &[T], one: T) -> u64 {
    all.iter().position(|other| *other == one).unwrap_or(0) as u64
}

/// What a rank says once about the end of a group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Notice {
    /// The rank that found the error.
    pub(crate) origin: usize,
    /// Calls of all ranks that the sender has entered.
    pub(crate) entered: u64,
    /// What it found.
    pub(crate) error: CollectiveError,
}

impl Notice {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let value = json!([self.origin, self.entered, error_value(&self.error)]);
        value.to_string().into_bytes()
    }

    /// `None` if these are not the bytes of a notice.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(bytes).ok()?;
        Some(Self {
            origin: number(&value[0])?,
            entered: value[1].as_u64()?,
            error: error_from(&value[2])?,
        })
    }
}

/// The part of a text that fits a notice.
pub(crate) fn short(text: &str) -> String {
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
        // A kind of error that this version does not know of still ends the group, by its words.
        other => json!(["aborted", 0, short(&other.to_string())]),
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
#[path = "wire_tests.rs"]
mod tests;

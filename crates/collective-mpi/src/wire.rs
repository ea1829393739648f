//! What ranks tell each other besides data: fingerprints, and why a group ends.

use fusestep_collective::{
    CallContext, CollectiveError, Field, Fingerprint, Membership, Operation, ReduceOp,
};
use fusestep_tensor::DType;
use serde_json::{Value, json};

/// Bytes of a [`Header`].
pub(crate) const HEADER_BYTES: usize = 11 * 8;

/// Longest text that goes into a notice, so that a notice is short enough to need no answer from its receiver.
const TEXT_BYTES: usize = 1024;

const DTYPES: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::I64,
    DType::U8,
];

const FIELDS: [Field; 9] = [
    Field::Operation,
    Field::ReduceOp,
    Field::DType,
    Field::Numel,
    Field::Root,
    Field::Counts,
    Field::Bucket,
    Field::PlanHash,
    Field::Sequence,
];

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
        let print = self.fingerprint;
        let reduce = print
            .operation
            .reduce_op()
            .map_or(0, |op| 1 + position(&ReduceOp::ALL, op));
        let root = print.operation.root().map_or(0, |root| root as u64);
        let member = self.membership.unwrap_or(Membership { colour: 0, key: 0 });
        let words = [
            print.sequence,
            code(print.operation) | reduce << 8 | position(&DTYPES, print.dtype) << 16,
            root,
            print.numel,
            print.counts_hash,
            print.context.plan_hash,
            u64::from(print.context.bucket.unwrap_or(0)),
            u64::from(print.context.bucket.is_some()),
            u64::from(self.membership.is_some()),
            u64::from(member.colour) << 32 | u64::from(member.key),
            u64::from(self.proposal),
        ];
        let mut bytes = [0; HEADER_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` if these are not the bytes of a header.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes
            .chunks_exact(8)
            .map(|word| word.try_into().map(u64::from_le_bytes));
        let mut next = || words.next()?.ok();
        let (sequence, kind, root) = (next()?, next()?, next()?);
        let (numel, counts_hash, plan_hash) = (next()?, next()?, next()?);
        let (bucket, has_bucket, joins, member, proposal) =
            (next()?, next()?, next()?, next()?, next()?);
        let reduce = (kind >> 8 & 255) as usize;
        let reduce = reduce
            .checked_sub(1)
            .map(|at| ReduceOp::ALL.get(at).copied());
        Some(Self {
            fingerprint: Fingerprint {
                sequence,
                operation: operation(kind & 255, reduce.flatten(), root as usize)?,
                dtype: *DTYPES.get((kind >> 16 & 255) as usize)?,
                numel,
                counts_hash,
                context: CallContext {
                    plan_hash,
                    bucket: (has_bucket != 0).then_some(bucket as u32),
                },
            },
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

fn code(operation: Operation) -> u64 {
    match operation {
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
    }
}

fn operation(code: u64, reduce: Option<ReduceOp>, root: usize) -> Option<Operation> {
    Some(match code {
        0 => Operation::AllReduce(reduce?),
        1 => Operation::Reduce {
            reduce: reduce?,
            root,
        },
        2 => Operation::Broadcast { root },
        3 => Operation::AllGather,
        4 => Operation::ReduceScatter(reduce?),
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
            position(&FIELDS, *field),
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
            position(&DTYPES, *dtype)
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
            field: *FIELDS.get(number(&value[1])?)?,
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
            dtype: *DTYPES.get(number(&value[4])?)?,
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
    let known = (0..12).filter_map(|code| operation(code, Some(ReduceOp::Sum), 0));
    let known = known.map(Operation::name).find(|name| *name == found);
    // The caller's own name for a call; a group ends once, so this happens once in its life.
    Some(known.unwrap_or_else(|| Box::leak(short(found).into_boxed_str())))
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;

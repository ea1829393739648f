//! Ranks tell each other in every step that they update by the same rules, along with which
//! gradients there are: a rate that one of them has changed would part their parameters in silence.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_tensor::DType;
use xxhash_rust::xxh3::xxh3_64;

use crate::comms::Comms;
use crate::{Plan, PlanError, Result, State};

/// Bytes by which ranks hear of a value whether all have the same: it and its complement.
pub(crate) const TOLD_BYTES: u64 = 16;

/// Makes each byte of `given` the largest that any rank has, and says of each of `values` whether
/// all ranks have the same.
pub(crate) fn largest<const N: usize>(
    comms: &mut Comms<'_>,
    given: &mut Vec<u8>,
    values: [u64; N],
) -> Result<[bool; N]> {
    let count = given.len();
    for value in values {
        given.extend(value.to_le_bytes());
        given.extend((!value).to_le_bytes());
    }
    comms.in_place(Operation::AllReduce(ReduceOp::Max), DType::U8, None, &mut *given)?;
    // The largest of each byte and of its complement fit each other only where all ranks have the
    // same.
    let mut pairs = given[count..].chunks_exact(TOLD_BYTES as usize).map(|pair| pair.split_at(8));
    let alike = std::array::from_fn(|_| {
        let mut pair = pairs.next().into_iter().flat_map(|(low, high)| low.iter().zip(high));
        pair.all(|(byte, complement)| byte ^ complement == 0xff)
    });
    given.truncate(count);
    Ok(alike)
}

/// What ranks compare of their rules, with the base rates set since.
pub(crate) fn hash(state: &mut State) -> u64 {
    let rules = &state.rules;
    *state.rules_hash.get_or_insert_with(|| xxh3_64(format!("{rules:?}").as_bytes()))
}

/// Names the setting in which ranks differ, on all of them, if they have found that they do.
pub(crate) fn check(
    plan: &Plan,
    state: &State,
    comms: &mut Comms<'_>,
    is_alike: bool,
) -> Result<()> {
    if is_alike {
        return Ok(());
    }
    plan.compare_settings(state, comms)?;
    Err(PlanError::Topology {
        expected: "the same rules on all ranks".to_owned(),
        found: "others; set rates on all ranks alike".to_owned(),
    })
}

//! What ranks settle about a save: where it goes, what each has written, and whether all could.

use std::path::Path;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_tensor::DType;

use super::generation::{Generation, MODEL_FILE, shard_file};
use super::manifest::{ShardSpec, refuse};
use super::shards::Written;
use crate::comms::Comms;
use crate::{Plan, PlanError, Result};

/// Bytes that each rank says about a file: whether there is one, length and checksum.
const WORD_BYTES: usize = 24;

/// Bytes that each rank says about its two files.
const FILES_BYTES: usize = 2 * WORD_BYTES;

/// Bytes of an error that a rank tells the others.
const TOLD_BYTES: usize = 512;

/// Brings the place that rank 0 has found to all ranks, so that all write to one.
pub(super) fn on_generation(
    plan: &Plan,
    comms: &mut Comms<'_>,
    begun: Result<Option<Generation>>,
) -> Result<Generation> {
    let mut words = [0u8; 3 * 8];
    if let Ok(Some(own)) = &begun {
        let own = [own.checkpoint, own.step, own.turn as u64];
        words.copy_from_slice(&own.map(u64::to_le_bytes).concat());
    }
    on_outcome(plan, comms, begun.map(drop))?;
    let broadcast = Operation::Broadcast { root: 0 };
    comms.in_place(broadcast, DType::U8, None, &mut words)?;
    Ok(Generation {
        checkpoint: number(&words, 0),
        step: number(&words, 1),
        turn: usize::from(number(&words, 2) > 0),
    })
}

/// Tells all ranks what each has written; if one could not, all fail.
pub(super) fn on_shards(
    plan: &Plan,
    comms: &mut Comms<'_>,
    written: Result<Written>,
) -> Result<Vec<ShardSpec>> {
    let mut own = [0u8; FILES_BYTES];
    if let Ok(written) = &written {
        let files = [&written.model, &written.shard];
        for (word, spec) in own.chunks_exact_mut(WORD_BYTES).zip(files) {
            if let Some(spec) = spec {
                let sum = u64::from_str_radix(&spec.xxh3, 16).unwrap_or_default();
                let said = [1u64, spec.len_bytes, sum].map(u64::to_le_bytes);
                word.copy_from_slice(&said.concat());
            }
        }
    }
    let words = said_by_each(comms, &own)?;
    on_outcome(plan, comms, written.map(drop))?;
    let said = words.chunks_exact(WORD_BYTES).enumerate();
    let wrote = said.filter(|(_, word)| number(word, 0) == 1);
    let spec = |(at, word): (usize, &[u8])| ShardSpec {
        file: match at % 2 {
            0 => MODEL_FILE.to_owned(),
            _ => shard_file(at / 2),
        },
        len_bytes: number(word, 1),
        xxh3: format!("{:016x}", number(word, 2)),
    };
    Ok(wrote.map(spec).collect())
}

/// Passes on what this rank has; fails on all ranks if it failed on one, with that rank's own
/// error: the lowest such rank's, which the others name.
pub(super) fn on_outcome<T>(plan: &Plan, comms: &mut Comms<'_>, outcome: Result<T>) -> Result<T> {
    if plan.topology().world == 1 {
        return outcome;
    }
    comms.set_plan(plan.hash());
    if !most(comms, outcome.is_err())? {
        return outcome;
    }
    let mut own = [0u8; TOLD_BYTES];
    if let Err(error) = &outcome {
        let text = error.to_string();
        let fits = |len: &usize| text.is_char_boundary(*len);
        let most = text.len().min(TOLD_BYTES - 1);
        let len = (0..=most).rev().find(fits).unwrap_or(0);
        own[0] = 1;
        own[1..=len].copy_from_slice(&text.as_bytes()[..len]);
    }
    let told = said_by_each(comms, &own)?;
    outcome?;
    let mut ranks = told.chunks_exact(TOLD_BYTES).enumerate();
    let first = ranks.find(|(_, told)| told[0] == 1);
    let (rank, text) = first.map_or((0, &[][..]), |(rank, told)| (rank, &told[1..]));
    Err(PlanError::OtherRank {
        rank,
        reason: String::from_utf8_lossy(text).trim_end_matches('\0').to_owned(),
    })
}

/// Refuses, on all ranks, a checkpoint that one of them cannot go on from, or that is not the
/// same for all: each says which it has read, 0 for none.
pub(super) fn on_checkpoint<T>(
    plan: &Plan,
    comms: &mut Comms<'_>,
    folder: &Path,
    (read, said): (Result<T>, u64),
) -> Result<T> {
    let world = plan.topology().world;
    if world == 1 {
        return read;
    }
    let read = on_outcome(plan, comms, read)?;
    let words = said_by_each(comms, &said.to_le_bytes())?;
    let first = number(&words, 0);
    let Some(other) = (1..world).find(|&rank| number(&words, rank) != first) else {
        return Ok(read);
    };
    let text = |word| match word {
        0 => "none".to_owned(),
        sum => format!("one with checksum {sum:016x}"),
    };
    let expected = format!(
        "the checkpoint that rank 0 sees ({}) on all ranks; resume from a file system that \
         they share",
        text(first)
    );
    let found = format!("{} on rank {other}", text(number(&words, other)));
    Err(refuse(folder, "manifest", &expected, found))
}

/// Whether it is so on any rank.
pub(super) fn on_any_rank(plan: &Plan, comms: &mut Comms<'_>, own: bool) -> Result<bool> {
    if plan.topology().world == 1 {
        return Ok(own);
    }
    comms.set_plan(plan.hash());
    most(comms, own)
}

/// Brings a text of each rank to all, in rank order.
pub(super) fn gather_texts(plan: &Plan, comms: &mut Comms<'_>, own: &str) -> Result<Vec<String>> {
    let (rank, world) = (plan.topology().rank, plan.topology().world);
    if world == 1 {
        return Ok(vec![own.to_owned()]);
    }
    comms.set_plan(plan.hash());
    let lengths = said_by_each(comms, &(own.len() as u64).to_le_bytes())?;
    let counts: Vec<usize> = (0..world).map(|at| number(&lengths, at) as usize).collect();
    let mut texts = vec![0u8; counts.iter().sum()];
    if !texts.is_empty() {
        let first: usize = counts[..rank].iter().sum();
        texts[first..first + own.len()].copy_from_slice(own.as_bytes());
        comms.in_place(Operation::AllGather, DType::U8, Some(&counts), &mut texts)?;
    }
    let mut rest = &texts[..];
    let text = |count: usize| {
        let (text, behind) = rest.split_at(count);
        rest = behind;
        String::from_utf8_lossy(text).into_owned()
    };
    Ok(counts.into_iter().map(text).collect())
}

/// What all ranks say, each in as many bytes as this one, in rank order.
fn said_by_each(comms: &mut Comms<'_>, own: &[u8]) -> Result<Vec<u8>> {
    let mut all = own.repeat(comms.world());
    let counts = vec![own.len(); comms.world()];
    comms.in_place(Operation::AllGather, DType::U8, Some(&counts), &mut all)?;
    Ok(all)
}

fn most(comms: &mut Comms<'_>, own: bool) -> Result<bool> {
    let mut any = [u8::from(own)];
    let max = Operation::AllReduce(ReduceOp::Max);
    comms.in_place(max, DType::U8, None, &mut any)?;
    Ok(any[0] != 0)
}

/// One of the 64-bit words that ranks tell each other.
fn number(words: &[u8], at: usize) -> u64 {
    let bytes = &words[8 * at..8 * (at + 1)];
    let digits = bytes.iter().rev();
    digits.fold(0, |number, &byte| number << 8 | u64::from(byte))
}

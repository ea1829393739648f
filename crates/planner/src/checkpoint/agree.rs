//! Agreement of ranks on a save: where it goes, which files each rank has written, and whether all
//! succeeded.

use std::path::Path;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_tensor::DType;

use super::generation::Generation;
use super::manifest::ShardSpec;
use super::names::{MODEL_FILE, shard_file};
use super::refusal::refuse;
use super::shards::Written;
use crate::run::comms::calls::Comms;
use crate::run::comms::texts::{number, said_by_each};
use crate::{Plan, PlanError, Result};

/// Bytes of a rank's message about one file: whether the file exists, its length and its checksum.
const WORD_BYTES: usize = 24;

/// Bytes of a rank's message about its two files.
const FILES_BYTES: usize = 2 * WORD_BYTES;

/// Bytes of the error message that a failed rank sends to the others.
const TOLD_BYTES: usize = 512;

/// Broadcasts the generation that rank 0 has begun, so that all ranks write to the same folder.
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

/// Gathers the files that each rank has written. If one rank could not write, all ranks fail.
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
    let specs = wrote.map(|(at, word)| ShardSpec {
        file: match at % 2 {
            0 => MODEL_FILE.to_owned(),
            _ => shard_file(at / 2),
        },
        len_bytes: number(word, 1),
        xxh3: format!("{:016x}", number(word, 2)),
    });
    Ok(specs.collect())
}

/// Returns this rank's outcome, unless a rank has failed: then all ranks fail. The failed rank
/// returns its own error; the others name the lowest failed rank and its error.
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

/// Refuses a checkpoint, on all ranks, if one rank cannot resume from it or if ranks have read
/// different ones. `fingerprint` is that of the checkpoint that this rank has read, 0 for none.
pub(super) fn on_checkpoint<T>(
    plan: &Plan,
    comms: &mut Comms<'_>,
    folder: &Path,
    read: Result<T>,
    fingerprint: u64,
) -> Result<T> {
    let world = plan.topology().world;
    if world == 1 {
        return read;
    }
    let read = on_outcome(plan, comms, read)?;
    let words = said_by_each(comms, &fingerprint.to_le_bytes())?;
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

/// Whether `own` is true on any rank.
pub(super) fn on_any_rank(plan: &Plan, comms: &mut Comms<'_>, own: bool) -> Result<bool> {
    if plan.topology().world == 1 {
        return Ok(own);
    }
    comms.set_plan(plan.hash());
    most(comms, own)
}

fn most(comms: &mut Comms<'_>, own: bool) -> Result<bool> {
    let mut any = [u8::from(own)];
    let max = Operation::AllReduce(ReduceOp::Max);
    comms.in_place(max, DType::U8, None, &mut any)?;
    Ok(any[0] != 0)
}

//! Agreement of ranks on a save: where it goes, which files each rank has written, and whether all
//! succeeded.

use std::path::Path;

use fusestep_planner::{Comms, PlanError};

use crate::Result;
use crate::generation::Generation;
use crate::manifest::ShardSpec;
use crate::names::{MODEL_FILE, shard_file};
use crate::refusal::refuse;
use crate::shards::Written;

/// Bytes of a rank's message about one file: whether the file exists, its length and its checksum.
const WORD_BYTES: usize = 24;

/// Bytes of a rank's message about its two files.
const FILES_BYTES: usize = 2 * WORD_BYTES;

/// Bytes of the error message that a failed rank sends to the others.
const TOLD_BYTES: usize = 512;

/// Broadcasts the generation that rank 0 has begun, so that all ranks write to the same folder.
pub(crate) fn on_generation(
    comms: &mut Comms<'_>,
    begun: Result<Option<Generation>>,
) -> Result<Generation> {
    let mut words = [0u8; 3 * 8];
    if let Ok(Some(own)) = &begun {
        let own = [own.checkpoint, own.step, own.turn as u64];
        words.copy_from_slice(&own.map(u64::to_le_bytes).concat());
    }
    on_outcome(comms, begun.map(drop))?;
    comms.broadcast_bytes(0, &mut words)?;
    Ok(Generation {
        checkpoint: number(&words, 0),
        step: number(&words, 1),
        turn: usize::from(number(&words, 2) > 0),
    })
}

/// Gathers the files that each rank has written. If one rank could not write, all ranks fail.
pub(crate) fn on_shards(comms: &mut Comms<'_>, written: Result<Written>) -> Result<Vec<ShardSpec>> {
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
    let words = comms.gather_bytes(&own)?;
    on_outcome(comms, written.map(drop))?;
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
pub(crate) fn on_outcome<T>(comms: &mut Comms<'_>, outcome: Result<T>) -> Result<T> {
    if comms.world() == 1 {
        return outcome;
    }
    if !comms.on_any_rank(outcome.is_err())? {
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
    let told = comms.gather_bytes(&own)?;
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
pub(crate) fn on_checkpoint<T>(
    comms: &mut Comms<'_>,
    folder: &Path,
    read: Result<T>,
    fingerprint: u64,
) -> Result<T> {
    let world = comms.world();
    if world == 1 {
        return read;
    }
    let read = on_outcome(comms, read)?;
    let words = comms.gather_bytes(&fingerprint.to_le_bytes())?;
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

/// Reads the 64-bit word at index `at`.
fn number(words: &[u8], at: usize) -> u64 {
    let bytes = &words[8 * at..8 * (at + 1)];
    let digits = bytes.iter().rev();
    digits.fold(0, |number, &byte| number << 8 | u64::from(byte))
}

//! Texts and words that ranks exchange, in rank order.

use fusestep_collective::Operation;
use fusestep_tensor::DType;

use crate::error::Result;
use crate::run::comms::calls::Comms;

/// Gathers a text of each rank on all ranks, in rank order.
pub(crate) fn gather_texts(comms: &mut Comms<'_>, own: &str) -> Result<Vec<String>> {
    let (rank, world) = (comms.rank(), comms.world());
    if world == 1 {
        return Ok(vec![own.to_owned()]);
    }
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

/// Gathers the bytes of each rank on all ranks; each rank has equally many.
pub(crate) fn said_by_each(comms: &mut Comms<'_>, own: &[u8]) -> Result<Vec<u8>> {
    let mut all = own.repeat(comms.world());
    let counts = vec![own.len(); comms.world()];
    comms.in_place(Operation::AllGather, DType::U8, Some(&counts), &mut all)?;
    Ok(all)
}

/// Reads the 64-bit word at index `at`.
pub(crate) fn number(words: &[u8], at: usize) -> u64 {
    let bytes = &words[8 * at..8 * (at + 1)];
    let digits = bytes.iter().rev();
    digits.fold(0, |number, &byte| number << 8 | u64::from(byte))
}

//! Any bytes as tensors and limits of launches, which are packed for a device.

use std::iter::Peekable;

use fusestep_launch::{ArgumentLayout, Batch, Batchable, LaunchLimits, batches};

use super::packed::Packer;
use crate::Outcome;
use crate::mutate::Numbers;

/// Launches that are packed of each input: the first ones, and the last.
const MOST_PACKED: usize = 16;

pub(crate) fn run(input: &[u8]) -> Outcome {
    let mut numbers = Numbers(input);
    let layout = ArgumentLayout {
        scalar_bytes: numbers.below(200) as usize,
        step_scalar_bytes: numbers.below(100) as usize,
        lists: numbers.below(9) as usize,
    };
    let limits = LaunchLimits {
        argument_bytes: numbers.below(40_000) as usize,
        chunk_elements: numbers.wide() as u32,
        chunks_per_launch: numbers.wide() as u32,
        ..LaunchLimits::default()
    };
    let rounds_at_random = numbers.byte() % 2 == 1;
    let mut tensors = Vec::new();
    while !numbers.is_empty() && tensors.len() < 2_000 {
        tensors.push(Batchable {
            tensor: tensors.len() as u32,
            first_element: 0,
            numel: match numbers.byte() {
                0 => numbers.below(1 << 50),
                _ => numbers.below(1 << 20),
            },
            group: numbers.byte().into(),
        });
    }
    let made = match batches("fuzz", tensors.iter().copied(), layout, limits) {
        Ok(made) => made,
        Err(error) => return Ok(error.to_string()),
    };
    let numels = tensors.iter().map(|tensor: &Batchable| tensor.numel);
    let mut packer = Packer::new(layout, limits, numels, rounds_at_random)?;
    for batch in made.iter().take(MOST_PACKED).chain(made.last()) {
        packer.check(batch)?;
    }
    let mut left = tensors.into_iter().filter(|tensor| tensor.numel > 0).peekable();
    for batch in &made {
        let bytes = layout.bytes(batch.records.len(), batch.groups.len());
        if bytes > limits.argument_bytes || batch.chunks > limits.chunks_per_launch {
            let chunks = batch.chunks;
            return Err(format!("a launch of {bytes} bytes and {chunks} chunks"));
        }
        take_out(batch, limits.chunk_elements, &mut left)?;
    }
    match left.next() {
        // Letters, because digits do not tell outcomes apart.
        None => Ok("l".repeat((made.len() + 1).ilog2() as usize)),
        Some(tensor) => Err(format!("tensor {} is left over", tensor.tensor)),
    }
}

/// Takes a launch's records, which are the next elements, out of what is left of the tensors.
fn take_out(
    batch: &Batch,
    chunk_elements: u32,
    left: &mut Peekable<impl Iterator<Item = Batchable>>,
) -> Result<(), String> {
    let mut chunks = 0;
    for record in &batch.records {
        let Some(tensor) = left.peek_mut() else {
            return Err("more records than tensors".to_owned());
        };
        let group = batch.groups.get(usize::from(record.group));
        let (first, expected_group) = (tensor.first_element, Some(&tensor.group));
        let expected = (tensor.tensor, first, chunks, expected_group);
        let (first, first_chunk) = (record.first_element, record.first_chunk);
        let found = (record.tensor, first, first_chunk, group);
        if found != expected || !(1..=tensor.numel).contains(&record.numel) {
            return Err(format!("expected {expected:?}, found {record:?}"));
        }
        chunks += record.numel.div_ceil(chunk_elements.into()) as u32;
        tensor.first_element += record.numel;
        tensor.numel -= record.numel;
        if tensor.numel == 0 {
            left.next();
        }
    }
    if chunks == batch.chunks {
        return Ok(());
    }
    Err(format!("expected {chunks} chunks, found {}", batch.chunks))
}

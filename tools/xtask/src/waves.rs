//! `waves`: how long the last blocks of a launch keep a device waiting, from counts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace_root;

/// Of an H100 (SXM).
const MULTIPROCESSORS: usize = 132;

/// Blocks that a multiprocessor holds at once: 2,048 threads and 65,536 registers are 3 blocks of
/// 256 threads with up to 80 registers each, 4 with up to 64, 5 with up to 48.
const BLOCKS: [usize; 3] = [3, 4, 5];

const CHUNKS: [u64; 4] = [65_536, 32_768, 16_384, 8_192];

/// Prints, for the models of `data/shapes`, the blocks of one launch over all tensors and what the
/// device loses to its end, for several lengths of chunks.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    ensure!(arguments.is_empty(), "expected `waves` alone, found {arguments:?}");
    println!(
        "An H100 of {MULTIPROCESSORS} multiprocessors; blocks begin in order, each where one has \
         ended, and last as long as their elements are many.\n"
    );
    let heads = BLOCKS.map(|blocks| format!("lost, {blocks} blocks each"));
    println!("| Model | Chunk | Blocks | {} |", heads.join(" | "));
    println!("|---|---:|---:|{}", "---:|".repeat(BLOCKS.len()));
    for model in ["resnet50", "gpt2", "bert_large"] {
        let path = workspace_root().join(format!("data/shapes/{model}.json"));
        let numels = numels(&path)?;
        for chunk in CHUNKS {
            let blocks = of_chunks(&numels, chunk);
            let lost = BLOCKS.map(|each| {
                let lost = lost(&blocks, each * MULTIPROCESSORS);
                format!("{:.1} %", 100.0 * lost)
            });
            println!("| {model} | {chunk} | {} | {} |", blocks.len(), lost.join(" | "));
        }
    }
    Ok(())
}

/// Elements of a model's tensors.
pub(crate) fn numels(path: &Path) -> Result<Vec<u64>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let tensors: Value = serde_json::from_str(&text)?;
    let numel = |tensor: &Value| {
        let shape = tensor["shape"].as_array()?;
        shape.iter().map(Value::as_u64).product()
    };
    let tensors = tensors.as_array().context("expected a list of tensors")?;
    let numels: Option<Vec<u64>> = tensors.iter().map(numel).collect();
    numels.context("expected a shape for each tensor")
}

/// Elements of each block.
fn of_chunks(numels: &[u64], chunk: u64) -> Vec<u64> {
    let of_tensor = |&numel: &u64| {
        let starts = (0..numel).step_by(chunk as usize);
        starts.map(move |start| chunk.min(numel - start))
    };
    numels.iter().flat_map(of_tensor).collect()
}

/// Time of the launch over that of the same elements on places that are never empty, less one.
fn lost(blocks: &[u64], places: usize) -> f64 {
    let mut free: BinaryHeap<Reverse<u64>> = (0..places).map(|_| Reverse(0)).collect();
    let mut end = 0;
    for elements in blocks {
        let Reverse(begin) = free.pop().unwrap_or_default();
        end = end.max(begin + elements);
        free.push(Reverse(begin + elements));
    }
    let all: u64 = blocks.iter().sum();
    end as f64 * places as f64 / all as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_cut_into_chunks() {
        assert_eq!(of_chunks(&[5, 0, 4, 1], 4), [4, 1, 4, 1]);
    }

    #[test]
    fn what_is_lost_is_the_end() {
        assert_eq!(lost(&[4, 4, 4, 4], 2), 0.0);
        // Three blocks on two places take the time of four.
        assert!((lost(&[4, 4, 4], 2) - 1.0 / 3.0).abs() < 1e-12);
        // The last block begins where the shortest has ended.
        assert_eq!(lost(&[3, 1, 2], 2), 0.0);
    }
}

//! What entries did, from the lines that every process leaves behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Numbers of an entry by their names, such as `instructions` and `stores of 16`.
pub(super) type Counts = BTreeMap<String, BTreeMap<String, u64>>;

/// Modules that no test of the CUDA backend launches: their calls belong to the engine for NCCL.
const OF_OTHERS: [&str; 1] = ["rank_order"];

/// What a run must have launched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Required {
    /// Nothing in particular; what is missing is printed.
    Nothing,
    /// An entry of every kernel and storage class.
    AllClasses,
}

/// The sums over all processes.
pub(super) fn read(path: &Path) -> Result<Counts> {
    let text =
        fs::read_to_string(path).with_context(|| format!("{}: no entry ran", path.display()))?;
    let mut all = Counts::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line)?;
        let entry = line["entry"].as_str().context("a line without an entry")?;
        let counts = all.entry(entry.to_owned()).or_default();
        for (name, value) in line.as_object().into_iter().flatten() {
            if let Some(number) = value.as_u64() {
                *counts.entry(name.clone()).or_default() += number;
            }
            for (width, number) in value.as_object().into_iter().flatten() {
                let number = number.as_u64().context("a count that is no number")?;
                *counts.entry(format!("{name} of {width}")).or_default() += number;
            }
        }
    }
    Ok(all)
}

/// A line for each entry.
pub(super) fn print(counts: &Counts) {
    println!("| Entry | Instructions | Loads | Stores | Sectors in, out | Barriers | Shuffles |");
    println!("|---|---:|---|---|---:|---:|---:|");
    for (entry, numbers) in counts {
        let number = |name: &str| numbers.get(name).copied().unwrap_or(0);
        let widths = |name: &str| {
            let each = [1, 2, 4, 8, 16].map(|width| (width, number(&format!("{name} of {width}"))));
            let some = each.iter().filter(|(_, count)| *count != 0);
            some.map(|(width, count)| format!("{count} × {width} B"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        println!(
            "| {entry} | {} | {} | {} | {}, {} | {} | {} |",
            number("instructions"),
            widths("loads"),
            widths("stores"),
            number("load_sectors"),
            number("store_sectors"),
            number("barriers"),
            number("shuffles"),
        );
    }
}

/// Says how many entries ran, and of which kernels and storage classes none did.
pub(super) fn check_coverage(counts: &Counts, root: &Path, required: Required) -> Result<()> {
    let mut missing = Vec::new();
    let (mut ran, mut all) = (0, 0);
    let mut classes: BTreeMap<String, bool> = BTreeMap::new();
    for file in fs::read_dir(root.join("kernels/ptx"))? {
        let path = file?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        if OF_OTHERS.contains(&stem.as_ref()) {
            println!("not run here: {stem}, which the CUDA backend never launches");
            continue;
        }
        let text = fs::read_to_string(&path)?;
        for entry in text
            .lines()
            .filter_map(|line| line.strip_prefix(".visible .entry "))
        {
            let entry = entry.trim_end_matches('(');
            let is_run = counts.contains_key(entry);
            all += 1;
            ran += usize::from(is_run);
            *classes.entry(class_of(entry).to_owned()).or_default() |= is_run;
        }
    }
    missing.extend(
        classes
            .iter()
            .filter(|class| !class.1)
            .map(|class| class.0.as_str()),
    );
    println!(
        "{ran} of {all} entries ran, of {} kernels and storage classes",
        classes.len()
    );
    if required == Required::AllClasses {
        ensure!(missing.is_empty(), "no entry ran of {}", missing.join(", "));
    } else if !missing.is_empty() {
        println!("not run: {}; `--all` runs them", missing.join(", "));
    }
    Ok(())
}

/// An entry's name without the place of its arguments and the part of its step.
fn class_of(entry: &str) -> &str {
    entry
        .trim_end_matches("_resident")
        .trim_end_matches("_measured")
}

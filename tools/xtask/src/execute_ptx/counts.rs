//! What entries did, from the lines that every process leaves behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Suite;
use crate::commands::named;

/// Numbers of an entry by their names, such as `instructions` and `stores of 16`.
type Counts = BTreeMap<String, BTreeMap<String, u64>>;

/// Elements of the tensors whose difference is counted: one chunk, and two.
const LENGTHS: [u64; 2] = [65_536, 131_072];

/// An H100 (SXM, 132 multiprocessors at 1.755 GHz): instructions of single threads in a second,
/// those in f64, and bytes of memory.
const ISSUED: f64 = 132.0 * 128.0 * 1.755e9;
const ISSUED_DOUBLE: f64 = ISSUED / 2.0;
const MOVED: f64 = 3.35e12;

/// The test that runs every entry over one tensor.
const TEST: &str = "one_tensor_of_the_length_that_the_environment_says";

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

/// Requires that every entry of `kernels/ptx` was launched.
pub(super) fn check_coverage(counts: &Counts, root: &Path) -> Result<()> {
    let mut all = BTreeSet::new();
    for file in fs::read_dir(root.join("kernels/ptx"))? {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "ptx") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let heads = text.lines().filter_map(|line| line.strip_prefix(".visible .entry "));
        all.extend(heads.map(|head| head.trim_end_matches('(').to_owned()));
    }
    let missing: Vec<_> =
        all.iter().filter(|&entry| !counts.contains_key(entry)).map(String::as_str).collect();
    ensure!(
        missing.is_empty(),
        "{} of {} entries did not run: {}",
        missing.len(),
        all.len(),
        missing.join(", ")
    );
    let instructions: u64 = counts.values().map(|counts| counts["instructions"]).sum();
    println!(
        "all {} entries ran, {:.2} · 10^9 instructions of single threads",
        all.len(),
        instructions as f64 / 1e9
    );
    Ok(())
}

/// Prints what an element more costs every entry: the difference of two tensors' lengths.
pub(super) fn of_an_element(suite: &Suite, path: &Path) -> Result<()> {
    for rounding in ["nearest", "random"] {
        let mut runs = Vec::new();
        for length in LENGTHS {
            let _ = fs::remove_file(path);
            let mut command = suite.command(named(&suite.programs, "every_entry")?);
            command.args([TEST, "--exact", "--ignored"]);
            command.env("FUSESTEP_COUNT_ELEMENTS", length.to_string());
            command.env("FUSESTEP_COUNT_ROUNDING", rounding);
            // Warps in step: parted ones touch sectors more than once.
            command.env("FUSESTEP_PTX_SEED", "0");
            let output = command.output().context("cannot start a test program")?;
            let text = String::from_utf8_lossy(&output.stdout);
            ensure!(output.status.success(), "{text}");
            runs.push(read(path)?);
        }
        println!("\nRounded to {rounding}, for each element of a chunk:\n");
        print(&runs[0], &runs[1]);
    }
    Ok(())
}

/// A line for each entry.
fn print(short: &Counts, long: &Counts) {
    println!(
        "| Entry | Instructions | in f64 | Divisions, roots | Bytes in | Bytes out | Loads | \
         Stores | Issue / memory |"
    );
    println!("|---|---:|---:|---:|---:|---:|---|---|---:|");
    for (entry, after) in long {
        let Some(before) = short.get(entry) else {
            continue;
        };
        let launches = after.get("launches").copied().unwrap_or(1) as f64;
        let each = |name: &str| {
            let of = |counts: &BTreeMap<String, u64>| counts.get(name).copied().unwrap_or(0);
            let more = of(after).saturating_sub(of(before)) as f64;
            more / launches / (LENGTHS[1] - LENGTHS[0]) as f64
        };
        let moved = 32.0 * (each("load_sectors") + each("store_sectors"));
        if moved < 0.1 {
            continue;
        }
        let widths = |name: &str| {
            let bytes = [1, 2, 4, 8, 16].map(|width| {
                let bytes = f64::from(width) * each(&format!("{name} of {width}"));
                (width, bytes)
            });
            let some = bytes.iter().filter(|(_, bytes)| *bytes >= 0.05);
            some.map(|(width, bytes)| format!("{bytes:.1} B by {width}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let (all, doubles) = (each("instructions"), each("doubles"));
        let issue = (all - doubles) / ISSUED + doubles / ISSUED_DOUBLE;
        println!(
            "| {entry} | {all:.1} | {doubles:.1} | {:.1} | {:.1} | {:.1} | {} | {} | {:.2} |",
            each("divisions"),
            32.0 * each("load_sectors"),
            32.0 * each("store_sectors"),
            widths("loads"),
            widths("stores"),
            issue / (moved / MOVED),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_several_processes_are_added_up() {
        let file = std::env::temp_dir().join(format!("fusestep-counts-{}", std::process::id()));
        let line = "{\"entry\":\"a\",\"instructions\":5,\"loads\":{\"4\":2,\"16\":1}}\n";
        fs::write(&file, line.repeat(2)).unwrap();
        let counts = read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(counts["a"]["instructions"], 10);
        assert_eq!(counts["a"]["loads of 4"], 4);
        assert_eq!(counts["a"]["loads of 16"], 2);
    }

    #[test]
    fn an_entry_that_did_not_run_is_named() {
        let root = crate::workspace_root();
        let error = check_coverage(&Counts::new(), &root).unwrap_err().to_string();
        assert!(error.contains("entries did not run: "), "{error}");
        assert!(error.contains("fused_adam_bf16_m32"), "{error}");
    }
}

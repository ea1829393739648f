//! PTX with one change that breaks it: a test that runs on it must fail.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::Suite;

/// A change of every instruction of one opcode in one entry.
struct Mutant {
    /// What is broken.
    name: &'static str,
    entry: &'static str,
    /// The text that is replaced, and by what; an empty text removes the whole instruction.
    from: &'static str,
    to: &'static str,
}

/// A mutant of the entry.
const fn mutant(
    name: &'static str,
    entry: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutant {
    Mutant {
        name,
        entry,
        from,
        to,
    }
}

const ADAM: &str = "fused_adam_f32";
const LARS: &str = "lars_momentum_f32";
const LAMB: &str = "lamb_f32";

const MUTANTS: [Mutant; 21] = [
    mutant("products rounded to zero", ADAM, "mul.rn.f32", "mul.rz.f32"),
    mutant("sums rounded to zero", ADAM, "add.rn.f32", "add.rz.f32"),
    mutant("differences rounded up", ADAM, "sub.rn.f32", "sub.rp.f32"),
    mutant("quotients rounded down", ADAM, "div.rn.f32", "div.rm.f32"),
    mutant("roots rounded up", ADAM, "sqrt.rn.f32", "sqrt.rp.f32"),
    mutant("sums for products", ADAM, "mul.rn.f32", "add.rn.f32"),
    mutant(
        "packs stored by halves",
        ADAM,
        "st.global.v4.f32",
        "st.global.v2.f32",
    ),
    mutant(
        "packs loaded by halves",
        ADAM,
        "ld.global.v4.f32",
        "ld.global.v2.f32",
    ),
    mutant("ends inverted", ADAM, "setp.ge.u64", "setp.lt.u64"),
    mutant("starts inverted", ADAM, "setp.lt.u64", "setp.ge.u64"),
    mutant(
        "search of the table inverted",
        ADAM,
        "setp.le.u32",
        "setp.gt.u32",
    ),
    mutant(
        "approximate quotients",
        ADAM,
        "div.rn.f32",
        "div.approx.f32",
    ),
    mutant("barriers of the block removed", LARS, "bar.sync", ""),
    mutant(
        "barriers of the grid without blocks",
        LARS,
        "barrier.sync",
        "",
    ),
    mutant(
        "arrivals that tell nothing",
        LARS,
        "atom.add.release.gpu",
        "atom.add.relaxed.gpu",
    ),
    mutant(
        "waits that learn nothing",
        LARS,
        "ld.acquire.gpu",
        "ld.relaxed.gpu",
    ),
    mutant(
        "shared values stored as f32",
        LARS,
        "st.shared.f64",
        "st.shared.b32",
    ),
    mutant("updates rounded to zero", LARS, "sub.rn.f32", "sub.rz.f32"),
    mutant("barriers of the block removed", LAMB, "bar.sync", ""),
    mutant("quotients rounded up", LAMB, "div.rn.f32", "div.rp.f32"),
    mutant(
        "waits that learn nothing",
        LAMB,
        "ld.acquire.gpu",
        "ld.relaxed.gpu",
    ),
];

/// The test that launches an entry.
fn test_of(entry: &str) -> &'static str {
    match entry {
        ADAM => "chunks_of_64_elements_three_to_a_launch_give_the_same_bits",
        _ => "excluded_tensors_take_the_rate_that_the_option_says",
    }
}

/// Runs every mutant, prints who was found and how, and fails if one survives.
pub(super) fn run(suite: &Suite, root: &Path) -> Result<()> {
    let text = root.join("target/execute-ptx-mutant.ptx");
    let mut survivors = Vec::new();
    for entry in [ADAM, LARS] {
        fs::write(&text, module_of(root, entry)?)?;
        let output = suite.one_with(test_of(entry), &text)?;
        ensure!(output.status.success(), "{entry} fails as it is");
    }
    println!("| Mutant | Entry | Places | Found by | Seconds |\n|---|---|---:|---|---:|");
    for mutant in &MUTANTS {
        let (broken, places) = broken(&module_of(root, mutant.entry)?, mutant)?;
        fs::write(&text, broken)?;
        let begun = Instant::now();
        let output = suite.one_with(test_of(mutant.entry), &text)?;
        let found = if output.status.success() {
            survivors.push(mutant.name);
            "SURVIVED".to_owned()
        } else {
            reason(&String::from_utf8_lossy(&output.stderr))
        };
        println!(
            "| {} | {} | {places} | {found} | {:.1} |",
            mutant.name,
            mutant.entry,
            begun.elapsed().as_secs_f64()
        );
    }
    ensure!(survivors.is_empty(), "survived: {}", survivors.join(", "));
    println!("{} mutants, all found", MUTANTS.len());
    Ok(())
}

fn module_of(root: &Path, entry: &str) -> Result<String> {
    let stem = entry.trim_end_matches("_f32");
    let path = root.join(format!("kernels/ptx/{stem}.ptx"));
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The module with the mutant, and in how many places it differs.
fn broken(module: &str, mutant: &Mutant) -> Result<(String, usize)> {
    let head = format!(".visible .entry {}(", mutant.entry);
    let from = module.find(&head).context("no such entry")?;
    let to = from
        + module[from..]
            .find("\n}")
            .context("an entry without an end")?;
    let mut places = 0;
    let mut body = String::new();
    for line in module[from..to].split_inclusive('\n') {
        // `bar.sync` is no part of `barrier.sync`: opcodes follow space.
        let is_hit = line
            .split_whitespace()
            .any(|word| word.starts_with(mutant.from));
        places += usize::from(is_hit);
        if !is_hit {
            body.push_str(line);
        } else if !mutant.to.is_empty() {
            let line = line.replacen(mutant.from, mutant.to, 1);
            body.push_str(&halved(&line, mutant.to));
        }
    }
    ensure!(places != 0, "{}: nothing to break", mutant.name);
    Ok((
        format!("{}{body}{}", &module[..from], &module[to..]),
        places,
    ))
}

/// The first two of four elements, where a pack became a half.
fn halved(line: &str, to: &str) -> String {
    let whole = line.find('{').zip(line.find('}'));
    let (Some((open, close)), true) = (whole, to.contains(".v2.")) else {
        return line.to_owned();
    };
    let first: Vec<_> = line[open + 1..close].split(',').take(2).collect();
    format!("{}{{{}{}", &line[..open], first.join(","), &line[close..])
}

/// What the emulator said of the fault, or that values differ.
fn reason(output: &str) -> String {
    let said = output.lines().find(|line| line.contains("cuda emulator: "));
    match said {
        Some(line) => line.rsplit("`: ").next().unwrap_or(line).replace('|', "/"),
        None => "other bits than the host's".to_owned(),
    }
}

//! PTX with one change that breaks it: a test that runs on it must fail.

mod list;

use std::fs;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::Suite;
use crate::parallel;
use crate::target_folder;
use list::{EACH, Expected, MUTANTS, Mutant, Places};

/// The test file whose tests run on mutants.
const PROGRAM: &str = "every_entry";

/// Runs every mutant, prints who was found and how, and fails if one is found that should not be,
/// or survives that should be found.
pub(super) fn run(suite: &Suite, root: &Path) -> Result<()> {
    let mutants = all(root)?;
    let begun = Instant::now();
    // As it is, every module passes every test that a mutant of it must fail.
    let untouched: Vec<&Mutant> = mutants
        .iter()
        .filter(|mutant| mutants.iter().find(|other| other.runs_as(mutant)) == Some(mutant))
        .collect();
    parallel::map(&untouched, |mutant| {
        let text = module_of(root, mutant.entry)?;
        let output = test(suite, mutant, &text)?;
        ensure!(
            output.status.success(),
            "{} fails as it is: {}",
            mutant.entry,
            reason(&output.stderr)
        );
        Ok(())
    })?;
    let outcomes = parallel::map(&mutants, |mutant| {
        let (broken, places) = mutant.broken(&module_of(root, mutant.entry)?)?;
        Ok((places, test(suite, mutant, &broken)?))
    })?;
    let mut wrong = Vec::new();
    println!("| Mutant | Entry | Places | Found by |\n|---|---|---:|---|");
    for (mutant, (places, output)) in mutants.iter().zip(outcomes) {
        let survives = output.status.success();
        let says = match mutant.expected {
            Expected::Found if survives => "SURVIVED".to_owned(),
            Expected::Unseen(why) if survives => format!("nobody: {why}"),
            Expected::Unseen(_) => format!("FOUND, by {}", reason(&output.stderr)),
            Expected::Found => reason(&output.stderr),
        };
        if survives == matches!(mutant.expected, Expected::Found) {
            wrong.push(format!("{} of {}", mutant.name, mutant.entry));
        }
        println!("| {} | {} | {places} | {says} |", mutant.name, mutant.entry);
    }
    ensure!(wrong.is_empty(), "not as expected: {}", wrong.join(", "));
    println!("{} mutants, all as expected, in {} s", mutants.len(), begun.elapsed().as_secs());
    Ok(())
}

/// Runs the mutant's test on this text in place of its module.
fn test(suite: &Suite, mutant: &Mutant, text: &str) -> Result<Output> {
    static FILES: AtomicUsize = AtomicUsize::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let file = target_folder().join(format!("execute-ptx-mutant-{number}.ptx"));
    fs::write(&file, text)?;
    let output = suite.one_with(PROGRAM, mutant.test, &file);
    fs::remove_file(&file)?;
    output
}

/// Those of the list, and one for each single instruction of [`EACH`].
fn all(root: &Path) -> Result<Vec<Mutant>> {
    let mut mutants = MUTANTS.to_vec();
    for each in &EACH {
        let module = module_of(root, each.mutant.entry)?;
        let (_, places) = each.mutant.broken(&module)?;
        mutants.extend((0..places).map(|index| {
            let why = each.unseen.iter().find(|unseen| unseen.0 == index);
            Mutant {
                places: Places::One(index),
                expected: why.map_or(Expected::Found, |why| Expected::Unseen(why.1)),
                ..each.mutant
            }
        }));
    }
    Ok(mutants)
}

fn module_of(root: &Path, entry: &str) -> Result<String> {
    let folder = root.join("kernels/ptx");
    for file in fs::read_dir(&folder)? {
        let path = file?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        if entry.starts_with(&*stem) {
            return fs::read_to_string(&path).with_context(|| path.display().to_string());
        }
    }
    anyhow::bail!("{entry}: no module of its stem in {}", folder.display())
}

impl Mutant {
    /// Whether another one is a change of the same module under the same test.
    fn runs_as(&self, other: &Self) -> bool {
        (self.entry, self.test) == (other.entry, other.test)
    }

    /// The module with the mutant, and in how many places it differs.
    fn broken(&self, module: &str) -> Result<(String, usize)> {
        let head = format!(".visible .entry {}(", self.entry);
        let from = module.find(&head).context("no such entry")?;
        let length = module[from..].find("\n}").context("no end of the entry")?;
        let (mut met, mut changed) = (0, 0);
        let mut body = String::new();
        for line in module[from..from + length].split_inclusive('\n') {
            // `bar.sync` is no part of `barrier.sync`: opcodes follow space.
            let mut words = line.split_whitespace();
            let is_hit = words.any(|word| word.starts_with(self.from))
                && match self.places {
                    Places::All => true,
                    Places::One(index) => met == index,
                };
            met += usize::from(line.split_whitespace().any(|word| word.starts_with(self.from)));
            changed += usize::from(is_hit);
            if !is_hit {
                body.push_str(line);
            } else if !self.to.is_empty() {
                let line = line.replacen(self.from, self.to, 1);
                body.push_str(&halved(&line, self.to));
            }
        }
        ensure!(changed != 0, "{}: nothing to break", self.name);
        let whole = format!("{}{body}{}", &module[..from], &module[from + length..]);
        Ok((whole, changed))
    }
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
fn reason(output: &[u8]) -> String {
    let output = String::from_utf8_lossy(output);
    let said = output.lines().find(|line| line.contains("cuda emulator: "));
    match said {
        Some(line) => line.rsplit("`: ").next().unwrap_or(line).replace('|', "/"),
        None => "other bits than the host's".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = ".visible .entry other(\n)\n{\n\tbar.sync 0;\n}\n\
                          .visible .entry own(\n)\n{\n\tbarrier.sync 0;\n\tbar.sync 0;\n\
                          \tst.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};\n\t@%p1 bar.sync 0;\n}\n";

    fn broken(from: &'static str, to: &'static str, places: Places) -> (String, usize) {
        let mutant = Mutant {
            name: "a",
            entry: "own",
            from,
            to,
            places,
            test: "b",
            expected: Expected::Found,
        };
        mutant.broken(MODULE).unwrap()
    }

    #[test]
    fn one_place_or_all_of_one_entry_are_changed() {
        let (text, places) = broken("bar.sync", "", Places::All);
        assert_eq!((places, text.matches("bar.sync").count()), (2, 1));
        assert!(text.contains("barrier.sync"));
        let (text, places) = broken("bar.sync", "", Places::One(1));
        assert_eq!((places, text.matches("bar.sync").count()), (1, 2));
        assert!(!text.contains("@%p1"));
        let (text, _) = broken("st.global.v4.f32", "st.global.v2.f32", Places::All);
        assert!(text.contains("st.global.v2.f32 [%rd1], {%f1, %f2};"), "{text}");
    }
}

//! `execute-ptx --mutants`: PTX with one change that breaks it; a test that runs on it must fail.

mod list;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};

use self::list::{EACH, MUTANTS, Place, PtxMutant, Which};
use super::{End, Target};
use crate::execute_ptx::Suite;
use crate::{mutants, target_folder};

/// The test file whose tests run on mutants.
const PROGRAM: &str = "every_entry";

/// Runs every mutant, or those whose name contains one of the words.
pub(crate) fn run(suite: &Suite, root: &Path, words: &[String]) -> Result<()> {
    mutants::run(&Ptx { suite, root }, &all(root)?, words)
}

/// The PTX as shipped, and the CUDA tests that run on it.
struct Ptx<'a> {
    suite: &'a Suite,
    root: &'a Path,
}

impl Target for Ptx<'_> {
    type Place = Place;
    type Finder = &'static str;

    const AT_A_TIME: Option<usize> = None;

    fn untouched(&self, mutant: &PtxMutant) -> Result<End> {
        self.test(mutant, &module_of(self.root, mutant.place.entry)?)
    }

    fn broken(&self, mutant: &PtxMutant) -> Result<End> {
        let (broken, _) = mutant.broken(&module_of(self.root, mutant.place.entry)?)?;
        self.test(mutant, &broken)
    }

    fn have_one_test(&self, one: &PtxMutant, other: &PtxMutant) -> bool {
        (one.place.entry, one.finder) == (other.place.entry, other.finder)
    }

    fn told(&self, mutant: &PtxMutant) -> Result<[String; 2]> {
        let entry = mutant.place.entry;
        let (_, changed) = mutant.broken(&module_of(self.root, entry)?)?;
        let which = match mutant.place.which {
            Which::All if changed > 1 => format!("{entry}, {changed} places"),
            Which::All => entry.to_owned(),
            Which::One(index) => format!("{entry}, number {index}"),
        };
        Ok([which, mutant.finder.to_owned()])
    }

    fn unseen(&self, mutant: &PtxMutant) -> Option<&'static str> {
        mutant.place.unseen
    }
}

impl Ptx<'_> {
    /// Runs the mutant's test on this text in place of its module.
    fn test(&self, mutant: &PtxMutant, text: &str) -> Result<End> {
        static FILES: AtomicUsize = AtomicUsize::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let file = target_folder().join(format!("execute-ptx-mutant-{number}.ptx"));
        fs::write(&file, text)?;
        let output = self.suite.one_with(PROGRAM, mutant.finder, &file);
        fs::remove_file(&file)?;
        let output = output?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        Ok(End::of_tests(output.status.success(), &text, reason))
    }
}

/// Mutants of the list, and one for each single instruction of [`EACH`].
fn all(root: &Path) -> Result<Vec<PtxMutant>> {
    let mut mutants = MUTANTS.to_vec();
    for each in &EACH {
        let (_, places) = each.broken(&module_of(root, each.place.entry)?)?;
        mutants.extend((0..places).map(|index| PtxMutant {
            place: Place { which: Which::One(index), ..each.place },
            ..*each
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

impl PtxMutant {
    /// The module with the mutant, and in how many places it differs.
    fn broken(&self, module: &str) -> Result<(String, usize)> {
        let head = format!(".visible .entry {}(", self.place.entry);
        let from = module.find(&head).context("no such entry")?;
        let length = module[from..].find("\n}").context("no end of the entry")?;
        let (mut met, mut changed) = (0, 0);
        let mut body = String::new();
        for line in module[from..from + length].split_inclusive('\n') {
            // `bar.sync` is no part of `barrier.sync`: opcodes follow space.
            let mut words = line.split_whitespace();
            let is_hit = words.any(|word| word.starts_with(self.from))
                && match self.place.which {
                    Which::All => true,
                    Which::One(index) => met == index,
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

/// The fault as the emulator told it, or that values differ.
fn reason(output: &str) -> String {
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

    fn broken(from: &'static str, to: &'static str, which: Which) -> (String, usize) {
        let place = Place { entry: "own", which, unseen: None };
        PtxMutant { name: "a", place, from, to, finder: "b" }.broken(MODULE).unwrap()
    }

    #[test]
    fn one_place_or_all_of_one_entry_are_changed() {
        let (text, places) = broken("bar.sync", "", Which::All);
        assert_eq!((places, text.matches("bar.sync").count()), (2, 1));
        assert!(text.contains("barrier.sync"));
        let (text, places) = broken("bar.sync", "", Which::One(1));
        assert_eq!((places, text.matches("bar.sync").count()), (1, 2));
        assert!(!text.contains("@%p1"));
        let (text, _) = broken("st.global.v4.f32", "st.global.v2.f32", Which::All);
        assert!(text.contains("st.global.v2.f32 [%rd1], {%f1, %f2};"), "{text}");
    }
    #[test]
    fn no_mutant_is_another_one_again() {
        let change = |mutant: &PtxMutant| (mutant.place.entry, mutant.from, mutant.to);
        let root = crate::workspace_root();
        let mutants = all(&root).unwrap();
        for (index, mutant) in mutants.iter().enumerate() {
            let others = mutants[..index].iter().filter(|other| change(other) == change(mutant));
            for other in others {
                // Where each single instruction is tried, all of them together are found, too.
                let both_single = matches!(
                    (mutant.place.which, other.place.which),
                    (Which::One(one), Which::One(other)) if one != other
                );
                assert!(both_single, "{} of {}", mutant.name, mutant.place.entry);
            }
        }
    }
}

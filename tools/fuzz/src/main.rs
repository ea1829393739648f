//! Runs a target: `TARGET SECONDS [SEED]` mutates, `TARGET FILE` tries one input, `corpus` writes
//! the first inputs anew.
#![forbid(unsafe_code)]

mod corpus;
#[path = "../../../crates/cli/src/inputs.rs"]
#[expect(dead_code, reason = "only the parser of shapes is fuzzed through this file")]
mod inputs;
mod mutate;
mod targets {
    pub(crate) mod codes;
    pub(crate) mod journal;
    pub(crate) mod manifest;
    pub(crate) mod mark;
    mod packed;
    pub(crate) mod packing;
    pub(crate) mod plan;
    pub(crate) mod shapes;
    pub(crate) mod shards;
    pub(crate) mod state;
    pub(crate) mod tensor_file;
}

use std::collections::HashSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use xxhash_rust::xxh3::xxh3_64;

use crate::mutate::Mutator;

/// What a target makes of an input: what it says, or which promise is broken.
type Outcome = Result<String, String>;

/// Most inputs that others are made from.
const MOST_KEPT: usize = 4096;

/// Longest message of an input, however long the input: what is quoted is cut, and a message
/// quotes a few values.
const MOST_CHARS: usize = 4_000;

/// Tries one input.
type Target = fn(&[u8]) -> Outcome;

/// The targets by name.
const TARGETS: [(&str, Target); 10] = [
    ("tensor_file", targets::tensor_file::run),
    ("shapes", targets::shapes::run),
    ("manifest", targets::manifest::run),
    ("mark", targets::mark::run),
    ("shards", targets::shards::run),
    ("journal", targets::journal::run),
    ("state", targets::state::run),
    ("codes", targets::codes::run),
    ("plan", targets::plan::run),
    ("packing", targets::packing::run),
];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments == ["corpus"] {
        return corpus::write(Path::new(env!("CARGO_MANIFEST_DIR")));
    }
    let [name, what, rest @ ..] = &arguments[..] else {
        bail!("expected a target and seconds or a file");
    };
    let target = TARGETS.iter().find(|(known, _)| known == name);
    let (name, target) = *target.with_context(|| format!("no target `{name}`"))?;
    if let Ok(seconds) = what.parse() {
        let seed = rest.first().map_or(Ok(0), |seed| seed.parse())?;
        return fuzz(name, target, Duration::from_secs(seconds), seed);
    }
    let input = fs::read(what).with_context(|| what.clone())?;
    println!("{}", tried(target, &input).map_err(anyhow::Error::msg)?);
    Ok(())
}

/// A target's outcome; a panic breaks every promise, and so does a message without end.
fn tried(target: Target, input: &[u8]) -> Outcome {
    let outcome = catch_unwind(AssertUnwindSafe(|| target(input))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| Some((*panic.downcast_ref::<&str>()?).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    });
    match outcome {
        Ok(said) if said.chars().count() > MOST_CHARS => {
            let (length, begin) = (said.chars().count(), said.chars().take(300));
            let begin = String::from_iter(begin);
            Err(format!("expected at most {MOST_CHARS} characters, found {length}: {begin}"))
        }
        outcome => outcome,
    }
}

fn fuzz(name: &str, target: Target, time: Duration, seed: u64) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut corpus = read_corpus(&root.join("corpus").join(name))?;
    ensure!(!corpus.is_empty(), "no inputs in {}", root.join("corpus").join(name).display());
    let mut mutator = Mutator::new(seed);
    let (mut known, begun, mut inputs) = (HashSet::new(), Instant::now(), 0u64);
    let given = corpus.len();
    for at in 0.. {
        let input = match corpus.get(at).filter(|_| at < given) {
            Some(input) => input.clone(),
            None => mutator.next(&corpus),
        };
        inputs += 1;
        match tried(target, &input) {
            Ok(said) => {
                let new = known.insert(xxh3_64(kind_of(&said).as_bytes()));
                if new && at >= given && corpus.len() < MOST_KEPT {
                    corpus.push(input);
                }
            }
            Err(broken) => {
                let path = keep(root, name, &input)?;
                bail!("{name}: {broken}\nthe input: {}", path.display());
            }
        }
        if begun.elapsed() >= time {
            break;
        }
    }
    println!(
        "fuzz: {name}: {inputs} inputs in {:.0} s from {given} of the corpus, seed {seed}: {} \
         kinds of outcomes, every promise kept",
        begun.elapsed().as_secs_f64(),
        known.len()
    );
    Ok(())
}

/// What is said of an input without what is of the input itself, of each message that it led to.
fn kind_of(said: &str) -> String {
    said.lines().map(kind_of_one).collect::<Vec<_>>().join("\n")
}

/// A message without what is quoted, what was found, the place that it begins with, and whatever is
/// no plain word.
fn kind_of_one(said: &str) -> String {
    const QUOTES: [char; 2] = ['`', '"'];
    let expected = said.split(", found").next().unwrap_or_default();
    let message = expected.split_once(": ").map_or(expected, |(_, rest)| rest);
    let before = message.split(QUOTES).next().unwrap_or_default();
    let after = message[before.len()..].rsplit(QUOTES).next();
    let outside = [before, after.unwrap_or_default()].concat();
    let words = outside.split(|c: char| c.is_whitespace() || ":,;()".contains(c));
    // Longer than any word of a message's own is a piece of the input.
    let is_plain = |word: &&str| word.len() <= 20 && word.chars().all(|c| c.is_ascii_lowercase());
    words.filter(is_plain).collect::<Vec<_>>().join(" ")
}

fn read_corpus(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths.iter().map(|path| Ok(fs::read(path)?)).collect()
}

fn keep(root: &Path, name: &str, input: &[u8]) -> Result<PathBuf> {
    let folder = root.join("crashes");
    fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{name}-{:016x}", xxh3_64(input)));
    fs::write(&path, input)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{TARGETS, kind_of, tried};

    #[test]
    fn the_corpus_has_what_each_reader_accepts() {
        const FINISHED: &str = "/d/p: an earlier step that was interrupted is finished\n";
        const NO_POINTER: &str = "/f/.fusestep-d6b9d4d14ff6be13.pointer: expected the path of a \
                                  journal, found something else; remove it";
        const NO_JOURNAL: &str = "/d/.fusestep-p.journal: expected moves and their checksum, found \
                                  others; look at the files it names and remove it\n";
        // From the first file and from the second; once as it is, once with its checksum set right;
        // and as a pointer. Nothing leads on from the second file of one folder.
        let of_one = format!("{FINISHED}nothing to do\n").repeat(2) + NO_POINTER;
        let of_two = FINISHED.repeat(4) + NO_POINTER;
        let pointer = NO_JOURNAL.repeat(2) + FINISHED.trim_end();
        let whole = "whole\n";
        for (target, file, expected) in [
            ("manifest", "new.json", "whole"),
            ("manifest", "old.json", "whole"),
            ("journal", "two", of_one.as_str()),
            ("journal", "folders", &of_two),
            ("journal", "pointer", &pointer),
            ("state", "adam", "loaded"),
            ("state", "momentum_bf16", "loaded"),
            ("state", "lamb_f16", "loaded"),
            ("state", "lars", "loaded"),
            ("state", "old", "loaded"),
            ("codes", "unchanged", "loaded\nloaded"),
            ("codes", "code", "loaded\nloaded"),
            ("codes", "unchanged_bf16", "loaded\nloaded"),
        ] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
            let input = fs::read(folder.join(target).join(file)).unwrap();
            let run = TARGETS.iter().find(|(name, _)| *name == target).unwrap().1;
            assert_eq!(tried(run, &input).unwrap(), expected, "{target}/{file}");
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/mark");
        // A mark goes by the list and a list by the mark, for each of two generations.
        for (file, expected) in [
            ("own", ["removed", "refused", "removed", "kept"].as_slice()),
            ("list", &["refused", "refused", "refused", "kept", "removed", "removed"]),
        ] {
            let input = fs::read(folder.join(file)).unwrap();
            let said = tried(super::targets::mark::run, &input).unwrap();
            let said = said.lines().map(|line| match line {
                "removed" | "kept" => line,
                _ => "refused",
            });
            assert_eq!(said.collect::<Vec<_>>(), expected, "{file}");
        }
        let shards = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/shards");
        for entry in fs::read_dir(shards).unwrap() {
            let input = fs::read(entry.unwrap().path()).unwrap();
            let said = tried(super::targets::shards::run, &input).unwrap();
            assert!(said.contains(whole), "{said}");
        }
    }

    #[test]
    fn a_message_without_end_breaks_a_promise() {
        let long = |input: &[u8]| Ok("x".repeat(input.len()));
        assert!(tried(long, &[0; 4_000]).is_ok() && tried(long, &[0; 4_001]).is_err());
    }

    #[test]
    fn kinds_are_of_the_program_and_not_of_the_input() {
        let place = |name: &str, found: &str| {
            format!("/c/{name}/shard-1: `header`: expected checksum b92{name}, found {found}")
        };
        let kind = kind_of(&place("step-0", "b93"));
        assert_eq!(kind.split_whitespace().collect::<Vec<_>>(), ["expected", "checksum"]);
        assert_eq!(kind, kind_of(&place("st p\u{7f}-9", "what ever")));
        assert_ne!(kind, kind_of("/c/step-0: `header`: expected bytes, found 3"));
        assert_eq!(kind_of("input: `a`b`: expected none"), kind_of("input: `\"`: expected none"));
        assert_ne!(kind_of("one: a\none: b"), kind_of("one: a\none: c"));
    }
}

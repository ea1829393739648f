//! What the command line asks for.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use crate::sets;

/// What to time, how often, and where to write it.
#[derive(Debug, PartialEq)]
pub(crate) struct Arguments {
    /// Sets by name.
    pub(crate) sets: Vec<String>,
    /// Steps of a round; `None` takes as many as fill a few milliseconds.
    pub(crate) steps: Option<NonZeroU32>,
    /// Rounds of a line.
    pub(crate) rounds: usize,
    /// Divides counts and numels, for a trial on a slow machine.
    pub(crate) scale: u64,
    /// No line is begun behind this.
    pub(crate) budget: Duration,
    /// The folder of `MODEL.json`.
    pub(crate) shapes: PathBuf,
    /// Where the numbers go.
    pub(crate) json: Option<PathBuf>,
    /// Where the table goes.
    pub(crate) table: Option<PathBuf>,
    /// Load this module, or `all`, and time nothing.
    pub(crate) warm: Option<String>,
}

/// What is asked for.
#[derive(Debug, PartialEq)]
pub(crate) enum Asked {
    /// The names of sets and rules.
    List,
    /// Times.
    Run(Arguments),
}

/// Reads the command line.
///
/// # Errors
/// A sentence that names the argument and what would do.
pub(crate) fn parse(words: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Arguments {
        sets: sets::NAMES.map(str::to_owned).to_vec(),
        steps: None,
        rounds: 11,
        scale: 1,
        budget: Duration::from_secs(3600),
        shapes: PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/shapes")),
        json: None,
        table: None,
        warm: None,
    };
    let mut words = words;
    while let Some(word) = words.next() {
        let mut value =
            || words.next().ok_or_else(|| format!("{word}: expected a value, found none"));
        match word.as_str() {
            "--list" => return Ok(Asked::List),
            "--warm" => asked.warm = Some(value()?),
            "--sets" => asked.sets = known_sets(&value()?)?,
            "--steps" => asked.steps = Some(number(&word, &value()?)?),
            "--rounds" => asked.rounds = number::<NonZeroU32>(&word, &value()?)?.get() as usize,
            "--scale" => asked.scale = number::<NonZeroU32>(&word, &value()?)?.get().into(),
            "--seconds" => asked.budget = Duration::from_secs(number(&word, &value()?)?),
            "--shapes" => asked.shapes = value()?.into(),
            "--json" => asked.json = Some(value()?.into()),
            "--table" => asked.table = Some(value()?.into()),
            // What `cargo bench` adds.
            "--bench" => {}
            _ => {
                return Err(format!(
                    "expected --list, --warm, --sets, --steps, --rounds, --scale, --seconds, \
                     --shapes, --json or --table, found {word}"
                ));
            }
        }
    }
    Ok(Asked::Run(asked))
}

fn known_sets(list: &str) -> Result<Vec<String>, String> {
    let names = list.split(',').map(|name| {
        if sets::NAMES.contains(&name) {
            Ok(name.to_owned())
        } else {
            Err(format!("--sets: expected some of {}, found {name}", sets::NAMES.join(", ")))
        }
    });
    names.collect()
}

fn number<T: std::str::FromStr>(word: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{word}: expected a whole number above 0, found {value}"))
}

//! Measurements as they are kept: one file of `benches/results` for each run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::folders::files_below;

/// Folder of the measurements, below the workspace's root.
pub(crate) const FOLDER: &str = "benches/results";

/// One run of a benchmark on one machine; numbers of two runs are never compared.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Results {
    /// Heading of the run's tables.
    pub(crate) title: String,
    /// The machine around the processor, in words.
    pub(crate) machine: String,
    pub(crate) processor: String,
    /// Cores that the machine has; absent for a card.
    pub(crate) cores: Option<u32>,
    /// Day of the run, as `2026-11-25`.
    pub(crate) date: String,
    /// Commit that was timed; absent where none was noted.
    pub(crate) commit: Option<String>,
    /// Commands that print the numbers, one a line.
    pub(crate) command: Vec<String>,
    /// Kind of number that was kept: `the best of all rounds`.
    pub(crate) values: String,
    /// Peer of the last column, for each question that has rows here.
    pub(crate) beside: BTreeMap<String, String>,
    pub(crate) rows: Vec<Row>,
}

/// One thing that was timed, by us or by a peer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// Page that shows the row.
    pub(crate) question: String,
    /// Work that was timed: `ResNet-50`.
    pub(crate) name: String,
    pub(crate) side: Side,
    /// Program that did it: `fusestep`, `PyTorch, fused`.
    pub(crate) by: String,
    pub(crate) unit: Unit,
    pub(crate) median: Option<f64>,
    pub(crate) low: Option<f64>,
    pub(crate) high: Option<f64>,
    /// Runs or rounds behind the number, where they were noted.
    pub(crate) runs: Option<u32>,
}

/// Whose program a row has timed.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Ours,
    Peer,
}

/// Unit of a row's times.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
pub(crate) enum Unit {
    #[serde(rename = "ns")]
    Nanoseconds,
    #[serde(rename = "µs")]
    Microseconds,
    #[serde(rename = "ms")]
    Milliseconds,
    #[serde(rename = "s")]
    Seconds,
}

impl Unit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Microseconds => "µs",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
        }
    }

    fn seconds(self) -> f64 {
        match self {
            Self::Nanoseconds => 1e-9,
            Self::Microseconds => 1e-6,
            Self::Milliseconds => 1e-3,
            Self::Seconds => 1.0,
        }
    }
}

impl Row {
    /// The number that a page shows: the median. Where a range alone was noted, it is our largest
    /// and the peer's least, so that no range speaks for us.
    pub(crate) fn value(&self) -> f64 {
        let of_range = match self.side {
            Side::Ours => self.high.or(self.low),
            Side::Peer => self.low.or(self.high),
        };
        self.median.or(of_range).expect("rows without a number are refused when they are read")
    }

    /// [`Row::value`] in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        self.value() * self.unit.seconds()
    }
}

/// All measurements below a folder, the newest first.
///
/// # Errors
/// Files that are no measurements; the message names the file, the row and what was expected.
pub(crate) fn read(folder: &Path) -> Result<Vec<Results>> {
    let mut all = Vec::new();
    for path in files_below(folder)? {
        let text = fs::read_to_string(&path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.push((parse(&text).with_context(|| format!("{FOLDER}/{name}"))?, name));
    }
    ensure!(!all.is_empty(), "{}: expected files of measurements, found none", folder.display());
    all.sort_by(|(a, a_name), (b, b_name)| (&b.date, a_name).cmp(&(&a.date, b_name)));
    Ok(all.into_iter().map(|(results, _)| results).collect())
}

/// One file's measurements.
///
/// # Errors
/// As [`read`].
pub(crate) fn parse(text: &str) -> Result<Results> {
    let results: Results = serde_json::from_str(text)?;
    ensure!(!results.rows.is_empty(), "rows: expected at least one, found none");
    ensure!(!results.command.is_empty(), "command: expected at least one line, found none");
    let date: Vec<&str> = results.date.split('-').collect();
    let digits = |part: &&str, count| part.len() == count && part.parse::<u32>().is_ok();
    ensure!(
        matches!(&date[..], [y, m, d] if digits(y, 4) && digits(m, 2) && digits(d, 2)),
        "date: expected one like 2026-11-25, found {:?}",
        results.date
    );
    let mut seen = Vec::new();
    for (at, row) in results.rows.iter().enumerate() {
        check(row).with_context(|| format!("rows[{at}], {} by {}", row.name, row.by))?;
        let key = (&row.question, &row.name, &row.by);
        ensure!(
            !seen.contains(&key),
            "rows[{at}]: expected {} by {} once, found it twice",
            row.name,
            row.by
        );
        seen.push(key);
        let beside = results.beside.get(&row.question);
        let beside = beside.with_context(|| {
            format!("beside: expected a peer for the question `{}`, found none", row.question)
        })?;
        let is_timed =
            |of: &Row| of.question == row.question && of.by == *beside && of.side == Side::Peer;
        ensure!(
            results.rows.iter().any(is_timed),
            "beside: expected a peer's row by {beside:?} for `{}`, found none",
            row.question
        );
        let is_ours = |of: &Row| of.question == row.question && of.side == Side::Ours;
        ensure!(
            results.rows.iter().any(is_ours),
            "rows: expected one of ours for `{}`, found none",
            row.question
        );
    }
    Ok(results)
}

/// A row's own numbers and question.
fn check(row: &Row) -> Result<()> {
    let slugs = super::QUESTIONS.map(|question| question.slug);
    ensure!(
        slugs.contains(&row.question.as_str()),
        "question: expected one of {slugs:?}, found {:?}",
        row.question
    );
    let numbers: Vec<f64> = [row.low, row.median, row.high].into_iter().flatten().collect();
    ensure!(!numbers.is_empty(), "expected `median`, `low` or `high`, found none");
    ensure!(
        numbers.iter().all(|number| number.is_finite() && *number > 0.0),
        "expected positive times, found {numbers:?}"
    );
    ensure!(numbers.is_sorted(), "expected `low` ≤ `median` ≤ `high`, found {numbers:?}");
    ensure!(row.runs != Some(0), "runs: expected at least 1, found 0");
    Ok(())
}

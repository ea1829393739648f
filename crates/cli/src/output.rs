//! Output: text, JSON and pages.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::sync::OnceLock;

use anyhow::Context;
use fusestep_tensor::{Quoted, escaped, escaped_json, grouped};
use fusestep_tensor_file::{Prepared, commit_together};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Prints text, without characters that a terminal would obey, since names come from files. A
/// reader that closed the pipe is no error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    write_out(&escaped(text))
}

fn write_out(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to standard output"),
    }
}

/// Prints one JSON object, without characters that a terminal would obey; a program that reads it
/// finds every name as it is.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string(value).context("cannot form JSON")?;
    write_out(&format!("{}\n", escaped_json(&text)))
}

/// Prints a result as one JSON object, or in words.
pub(crate) fn show(json: bool, result: &(impl Serialize + Display)) -> anyhow::Result<()> {
    if json { print_json(result) } else { print(&result.to_string()) }
}

/// Amount that a command tells beside its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Told {
    /// Errors alone.
    Quiet,
    /// Errors, warnings, notes, plans and epochs.
    #[default]
    Usual,
    /// All of these, and times and settings that are chosen on the way.
    More,
}

/// The amount that the command line asks for, once it is read.
static TOLD: OnceLock<Told> = OnceLock::new();

/// Decides how much is told from here on.
pub(crate) fn tell(told: Told) {
    // A program reads its command line once.
    let _ = TOLD.set(told);
}

/// Whether as much is told.
pub(crate) fn tells(told: Told) -> bool {
    TOLD.get().copied().unwrap_or_default() >= told
}

/// Whether this process is the first of those that a launcher has started, or alone.
pub(crate) fn is_first_process() -> bool {
    let rank = std::env::var("RANK").unwrap_or_default();
    ["", "0"].contains(&rank.trim())
}

/// Prints a note on standard error, unless the user wants errors alone. Of ranks that are processes
/// the first one does, as all have the same to say.
pub(crate) fn note(text: &str) {
    if tells(Told::Usual) && is_first_process() {
        say(text);
    }
}

/// Prints what `--verbose` asks for on standard error.
pub(crate) fn detail(text: &str) {
    if tells(Told::More) {
        say(text);
    }
}

/// A bar of so many parts on standard error, where that is a terminal.
pub(crate) fn progress(parts: u64, what: &str) -> ProgressBar {
    if !tells(Told::Usual) {
        return ProgressBar::hidden();
    }
    let style =
        ProgressStyle::with_template(&format!("{{bar:40}} {{pos}}/{{len}} {what}  {{msg}}"));
    ProgressBar::new(parts).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A sign of life on standard error, where that is a terminal, for work of unknown length.
pub(crate) fn working(what: &'static str) -> ProgressBar {
    if !tells(Told::Usual) {
        return ProgressBar::hidden();
    }
    // Drawn once: a thread that turns it is more than the system may give.
    let bar = ProgressBar::new_spinner().with_message(what);
    bar.tick();
    bar
}

/// Prints a warning on standard error, in quiet runs too: what is wrong is part of the result.
pub(crate) fn warn(text: &str) {
    say(text);
}

/// Prints a text on standard error, in one piece: ranks that are processes may print at once.
pub(crate) fn say(text: &str) {
    // If the text cannot be printed, nobody is there to be told.
    let _ = std::io::stderr().write_all(escaped(&format!("{text}\n")).as_bytes());
}

/// Writes a page, all or nothing, and says so on standard error.
pub(crate) fn write_page(path: &Path, page: &str) -> anyhow::Result<()> {
    let did = did_write(path);
    commit_together(vec![Prepared::bytes(path, page.as_bytes())?])?;
    note(&format!("{did} {}", path.display()));
    Ok(())
}

/// The word for a file that is about to be written: an earlier one of its name is lost.
pub(crate) fn did_write(path: &Path) -> &'static str {
    if path.exists() { "replaced" } else { "wrote" }
}

/// A sentence about tensors of state with values that are infinite or NaN; `None` without such
/// tensors.
pub(crate) fn non_finite<'n>(names: impl IntoIterator<Item = &'n str>) -> Option<String> {
    let mut names = names.into_iter();
    let first = Quoted(names.next()?);
    Some(match names.count() {
        0 => format!("`{first}` has values that are not finite"),
        1 => format!("`{first}` and 1 other have values that are not finite"),
        more => format!("`{first}` and {more} others have values that are not finite"),
    })
}

/// Warns that state with infinite or NaN values has been saved.
pub(crate) fn warn_non_finite<'n>(place: &Path, names: impl IntoIterator<Item = &'n str>) {
    if let Some(told) = non_finite(names) {
        warn(&format!(
            "warning: {}: {told}, and a run that goes on from it keeps them; steps whose gradients \
             are not finite are skipped with --clip-norm or --loss-scale, and what was not finite \
             before stays so",
            place.display()
        ));
    }
}

/// A number of at least 0 to one decimal, its digits in groups of three: 17,227.0.
pub(crate) fn grouped_tenths(value: f64) -> String {
    let tenths = (10.0 * value).round() as u64;
    format!("{}.{}", grouped(tenths / 10), tenths % 10)
}

/// Nanoseconds as a readable duration.
pub(crate) fn duration(nanoseconds: f64) -> String {
    match nanoseconds {
        n if n >= 1e9 => format!("{:.2} s", n / 1e9),
        n if n >= 1e6 => format!("{:.2} ms", n / 1e6),
        n if n >= 1e3 => format!("{:.1} µs", n / 1e3),
        n => format!("{n:.0} ns"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenths_stand_behind_groups_of_three() {
        for (value, expected) in
            [(0.0, "0.0"), (2.04, "2.0"), (6.96, "7.0"), (17_226.5, "17,226.5")]
        {
            assert_eq!(grouped_tenths(value), expected);
        }
    }
}

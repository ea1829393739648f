//! Output: text, JSON and pages.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use fusestep_tensor::{Quoted, escaped, escaped_json};
use fusestep_tensor_file::{Prepared, commit_together};
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

/// Prints a text on standard error, in one piece: ranks that are processes may print at once.
pub(crate) fn warn(text: &str) {
    // If the text cannot be printed, nobody is there to be told.
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Writes a page, all or nothing, and says so on standard error.
pub(crate) fn write_page(path: &Path, page: &str) -> anyhow::Result<()> {
    commit_together(vec![Prepared::bytes(path, page.as_bytes())?])?;
    eprintln!("wrote {}", path.display());
    Ok(())
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
            "warning: {}: {told}, and a run that goes on from it keeps them; --clip-norm bounds \
             gradients, and with it or --loss-scale steps whose gradients are not finite are \
             skipped",
            place.display()
        ));
    }
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

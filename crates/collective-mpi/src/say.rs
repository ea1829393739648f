//! Words of a rank on standard error.

use std::io::Write;

/// Writes a line to standard error in one piece: other threads and ranks write there, too.
pub(crate) fn say(line: &str) {
    // If standard error cannot be written, there is nowhere to report it.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

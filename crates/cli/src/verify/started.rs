//! Runs of `verify` on processes, which this command starts as ranks of itself.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::summary::Ended;
use crate::launch::start_again;
use crate::output::{Told, tells};

/// Folder of one file that ranks leave, removed with its value.
struct Folder(PathBuf);

impl Folder {
    /// A new folder among the system's temporary ones; one that is there is another's.
    fn new() -> anyhow::Result<Self> {
        let own = format!("fusestep-verify-{}", std::process::id());
        let path = std::env::temp_dir().join(own);
        let create = || format!("cannot make a folder for what ranks find: {}", path.display());
        fs::create_dir(&path).with_context(create)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What stays is small, and the system's to remove.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Starts a world of processes and returns what they have found; ends as they end if one fails.
pub(super) fn runs(world: usize) -> anyhow::Result<Vec<Ended>> {
    let folder = Folder::new()?;
    let file = folder.0.join("runs.json");
    let failed = start_again(world, &with_results(&file))?;
    if let Some(code) = failed {
        drop(folder);
        std::process::exit(i32::from(code));
    }
    let text = fs::read(&file).with_context(|| format!("{}", file.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{}", file.display()))
}

/// Writes runs for the command that has started this rank.
pub(super) fn write(path: &Path, runs: &[Ended]) -> anyhow::Result<()> {
    let text = serde_json::to_vec(runs).context("cannot form JSON")?;
    fs::write(path, text).with_context(|| format!("{}", path.display()))
}

/// Arguments of this command, with the file for results right behind the subcommand's name.
fn with_results(file: &Path) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let name = arguments.iter().position(|argument| argument == "verify");
    let behind = name.map_or(arguments.len(), |name| name + 1);
    let mut more = vec!["--results".into(), file.into()];
    // Notes are this command's.
    if tells(Told::Usual) && !tells(Told::More) {
        more.push("--quiet".into());
    }
    arguments.splice(behind..behind, more);
    arguments
}

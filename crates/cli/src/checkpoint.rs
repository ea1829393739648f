//! `fusestep checkpoint`: the contents of a checkpoint, whether it is intact, and the same tensors
//! in another number of files or another type of state.

mod converted;
mod written;

use std::path::{Path, PathBuf};

use anyhow::ensure;
use clap::{Args, Subcommand};
use fusestep_checkpoint::{MAX_SHARDS, Manifest};
use fusestep_tensor::{Quoted, counted, grouped};
use serde::Serialize;

use self::converted::ConvertArgs;
use self::written::write_to;
use crate::options::whole;
use crate::output::{Told, non_finite, print, print_json, tells, warn, working};

/// Texts of `train` that are the bits of a number, and their digits.
const BITS: [&str; 2] = ["last_loss", "loss_sum"];
const BITS_DIGITS: usize = 16;

/// Flags of `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print what a checkpoint holds
    Inspect {
        #[command(flatten)]
        folder: FolderArgs,
        /// Print the bits of floating-point numbers beside their values
        #[arg(long)]
        bits: bool,
    },
    /// Read every file, compare it with its checksum, and look for state that no run can have
    Verify(FolderArgs),
    /// Write the same tensors as a checkpoint of another number of files
    Reshard {
        #[command(flatten)]
        folder: FolderArgs,
        /// Number of ranks' files; one of whole parameters is written beside them, unless a
        /// distributed parameter has no whole
        #[arg(long, value_name = "N", value_parser = whole::<usize, 1, { MAX_SHARDS as u64 }>)]
        world: usize,
        /// An empty or new folder
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Average tensors that each rank has for itself (LocalSGD, an open window of micro-steps);
        /// any number of ranks can go on then
        #[arg(long)]
        average: bool,
    },
    /// Write the same run, or state file, with its optimizer state in another type, for one that
    /// keeps it so
    Convert(ConvertArgs),
}

impl Action {
    /// The checkpoint's folder.
    fn folder(&self) -> &Path {
        match self {
            Action::Verify(folder)
            | Action::Inspect { folder, .. }
            | Action::Reshard { folder, .. } => &folder.folder,
            Action::Convert(args) => &args.folder,
        }
    }
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The checkpoint's folder
    folder: PathBuf,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

/// The result that `verify --json` prints.
#[derive(Debug, Serialize)]
struct Verified {
    intact: bool,
    step: u64,
    tensors: usize,
    shards: usize,
    bytes: usize,
    /// Tensors with values that are infinite or NaN.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    non_finite: Vec<String>,
}

/// Refuses a folder that is not there, which is no damaged checkpoint.
fn require_there(folder: &Path) -> anyhow::Result<()> {
    ensure!(
        folder.exists(),
        "{}: expected a checkpoint's folder, found none of this name; give one that `train \
         --checkpoint` has written",
        folder.display()
    );
    Ok(())
}

pub(crate) fn run(args: &CheckpointArgs) -> anyhow::Result<()> {
    require_there(args.action.folder())?;
    match &args.action {
        Action::Inspect { folder, bits } => {
            let shown = if *bits { Shown::WithBits } else { Shown::Value };
            inspect(folder, &Manifest::read(&folder.folder)?, shown)?;
            warn_of(&folder.folder);
            Ok(())
        }
        Action::Verify(folder) => {
            let reading = working("reading the checkpoint's files");
            let found = Manifest::verify(&folder.folder);
            reading.finish_and_clear();
            let found = found?;
            let verified = Verified {
                intact: true,
                step: found.manifest.step,
                tensors: found.tensors.len(),
                shards: found.manifest.shards.len(),
                bytes: found.tensors.values().map(Vec::len).sum(),
                non_finite: [found.params_non_finite, found.non_finite].concat(),
            };
            if folder.json {
                print_json(&verified)
            } else {
                let names = verified.non_finite.iter().map(String::as_str);
                let told = non_finite(names).map_or_else(String::new, |told| format!("; {told}"));
                print(&format!(
                    "step {}: {} ({}) in {}, all intact{told}\n",
                    grouped(verified.step),
                    counted(verified.tensors as u64, "tensor"),
                    counted(verified.bytes as u64, "byte"),
                    counted(verified.shards as u64, "file")
                ))
            }
        }
        Action::Reshard { folder, world, out, average } => {
            let writing = working("writing a file for each rank");
            let (from, manifest) = (&folder.folder, Manifest::read(&folder.folder)?);
            let written = write_to(out, from, || {
                if *average {
                    manifest.average(from, out, *world)
                } else {
                    manifest.reshard(from, out, *world)
                }
            });
            writing.finish_and_clear();
            show_written(folder, out, &written?)
        }
        Action::Convert(args) => converted::run(args),
    }
}

/// Settings that decide bits, as the run had them when it saved.
fn settings_of(manifest: &Manifest) -> Vec<String> {
    let now = manifest.settings.iter().filter_map(|(key, value)| {
        let name = key.strip_prefix("set.").unwrap_or(key);
        (key != "set" && !key.starts_with("built.")).then(|| format!("{name} {value}"))
    });
    let schedule = manifest.schedule.iter().map(|schedule| format!("schedule {schedule}"));
    now.chain(schedule).collect()
}

/// Form of numbers that a checkpoint has as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Value,
    WithBits,
}

/// Prints the checkpoint that was written; in quiet runs its place alone.
fn show_written(args: &FolderArgs, out: &Path, written: &Manifest) -> anyhow::Result<()> {
    if args.json || tells(Told::Usual) {
        return inspect(args, written, Shown::Value);
    }
    print(&format!(
        "wrote {}: {} in {}\n",
        out.display(),
        counted(written.tensors.len() as u64, "tensor"),
        counted(written.shards.len() as u64, "file")
    ))
}

fn inspect(args: &FolderArgs, manifest: &Manifest, shown: Shown) -> anyhow::Result<()> {
    if args.json {
        return print_json(manifest);
    }
    let mut text = format!(
        "{} version {}: {}, step {}, {} skipped, {}\n",
        manifest.format,
        manifest.version,
        manifest.optimizer,
        grouped(manifest.step),
        grouped(manifest.skipped),
        counted(manifest.shards.len() as u64, "file"),
    );
    let settings = settings_of(manifest);
    if !settings.is_empty() {
        text += &format!("settings: {}\n", Quoted(&settings.join(", ")));
    }
    for (key, value) in &manifest.caller {
        text += &format!("{} = {}\n", Quoted(key), text_of(key, value, shown));
    }
    for (name, spec) in &manifest.tensors {
        text += &format!("{}: {} {}\n", Quoted(name), spec.dtype, spec.shape);
    }
    print(&text)
}

/// A text of the run that was saved, as a number where it is the bits of one.
fn text_of(key: &str, value: &str, shown: Shown) -> String {
    let bits = u64::from_str_radix(value, 16).ok().filter(|_| value.len() == BITS_DIGITS);
    match bits.filter(|_| BITS.contains(&key)) {
        Some(bits) if shown == Shown::WithBits => {
            format!("{} (bits {value})", f64::from_bits(bits))
        }
        Some(bits) => f64::from_bits(bits).to_string(),
        None => Quoted(value).to_string(),
    }
}

/// Tells of tensors that are not finite, and of files that are not intact.
fn warn_of(folder: &Path) {
    let reading = working("reading the checkpoint's files");
    let found = Manifest::verify(folder);
    reading.finish_and_clear();
    match found {
        Ok(found) => {
            let names = found.params_non_finite.iter().chain(&found.non_finite);
            let names = names.map(String::as_str);
            if let Some(told) = non_finite(names) {
                warn(&format!("warning: {}: {told}", folder.display()));
            }
        }
        Err(error) => warn(&format!("warning: {error}")),
    }
}

//! `fusestep checkpoint`: what is in a checkpoint, whether it is intact, and the same for another number of files.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::ensure;
use clap::{Args, Subcommand};
use fusestep_planner::Manifest;
use serde::Serialize;

use crate::output::{print, print_json};

/// Flags of `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print what a checkpoint holds
    Inspect(FolderArgs),
    /// Read every file and compare it with its checksum
    Verify(FolderArgs),
    /// Write the same tensors as a checkpoint of another number of files
    Reshard {
        #[command(flatten)]
        folder: FolderArgs,
        /// Number of files
        #[arg(long, value_name = "N")]
        world: NonZeroUsize,
        /// An empty or new folder
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Average what ranks have for themselves (a LocalSGD run, sums of an open merge window), so that any number can go on
        #[arg(long)]
        average: bool,
    },
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The checkpoint's folder
    folder: PathBuf,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

/// What `verify --json` prints.
#[derive(Debug, Serialize)]
struct Verified {
    intact: bool,
    step: u64,
    tensors: usize,
    shards: usize,
    bytes: usize,
}

pub(crate) fn run(args: &CheckpointArgs) -> anyhow::Result<()> {
    match &args.action {
        Action::Inspect(folder) => inspect(folder, &Manifest::read(&folder.folder)?),
        Action::Verify(folder) => {
            let manifest = Manifest::read(&folder.folder)?;
            let tensors = manifest.read_tensors(&folder.folder)?;
            let verified = Verified {
                intact: true,
                step: manifest.step,
                tensors: tensors.len(),
                shards: manifest.shards.len(),
                bytes: tensors.values().map(Vec::len).sum(),
            };
            match folder.json {
                true => print_json(&verified),
                false => print(&format!(
                    "step {}: {} tensors ({} bytes) in {} files, all intact\n",
                    verified.step, verified.tensors, verified.bytes, verified.shards
                )),
            }
        }
        Action::Reshard {
            folder,
            world,
            out,
            average,
        } => {
            std::fs::create_dir_all(out)?;
            ensure!(
                std::fs::read_dir(out)?.next().is_none(),
                "--out {}: expected an empty folder, found files",
                out.display()
            );
            let manifest = Manifest::read(&folder.folder)?;
            let (from, count) = (&folder.folder, world.get());
            let written = match average {
                true => manifest.average(from, out, count)?,
                false => manifest.reshard(from, out, count)?,
            };
            inspect(folder, &written)
        }
    }
}

fn inspect(args: &FolderArgs, manifest: &Manifest) -> anyhow::Result<()> {
    if args.json {
        return print_json(manifest);
    }
    let mut text = format!(
        "{} version {}: {}, step {}, {} skipped, {} files\n",
        manifest.format,
        manifest.version,
        manifest.optimizer,
        manifest.step,
        manifest.skipped,
        manifest.shards.len(),
    );
    for (key, value) in &manifest.caller {
        text += &format!("{key} = {value}\n");
    }
    for (name, spec) in &manifest.tensors {
        text += &format!("{name}: {} {}\n", spec.dtype, spec.shape);
    }
    print(&text)
}

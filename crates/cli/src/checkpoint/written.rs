//! Checkpoints that are written anew, to a folder of their own.

use std::path::Path;

use anyhow::{Context, ensure};
use fusestep_checkpoint::Manifest;
use fusestep_planner::PlanError;

use crate::places::{make_folder, require_beside};

/// Writes a checkpoint to `--out`, an empty or new folder, which goes again if nothing was written.
pub(super) fn write_to(
    out: &Path,
    from: &Path,
    write: impl FnOnce() -> Result<Manifest, PlanError>,
) -> anyhow::Result<Manifest> {
    require_beside("--out", out, "the checkpoint", from)?;
    let is_new = !out.exists();
    make_folder("--out", out)?;
    let named = || format!("--out {}", out.display());
    ensure!(
        std::fs::read_dir(out).with_context(named)?.next().is_none(),
        "--out {}: expected an empty folder, found files; give another folder, or empty it",
        out.display()
    );
    let written = write();
    if written.is_err() && is_new {
        // Other files that are in the folder by now stay; the reason that nothing was written
        // counts.
        let _ = std::fs::remove_dir(out);
    }
    Ok(written?)
}

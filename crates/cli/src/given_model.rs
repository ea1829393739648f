//! The model that a command is given: a file, or a checkpoint's folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use fusestep_checkpoint::{MODEL_FILE, Manifest};
use fusestep_tensor::DType;

use crate::inputs::{Model, read_model};
use crate::output::note;

/// The file of a checkpoint that has its parameters whole.
fn file_of_checkpoint(folder: &Path) -> anyhow::Result<PathBuf> {
    let manifest = Manifest::read_if_any(folder)?.with_context(|| {
        format!(
            "{}: expected a model, or the folder of a checkpoint, found a folder without a \
             manifest.json; name a file in it",
            folder.display()
        )
    })?;
    let file = folder.join(&manifest.generation).join(MODEL_FILE);
    ensure!(
        file.is_file(),
        "{}: expected a checkpoint of whole parameters, found one without {MODEL_FILE}; each rank \
         has a slice of its own",
        folder.display()
    );
    Ok(file)
}

/// [`read_model`], and of a checkpoint's folder the whole parameters; a note says from which file.
///
/// # Errors
/// As [`read_model`]; a folder that has no whole parameters.
pub(crate) fn read_given(path: &Path, dtype: Option<DType>) -> anyhow::Result<Model> {
    if !path.is_dir() {
        return read_model(path, dtype);
    }
    let file = file_of_checkpoint(path)?;
    note(&format!(
        "note: {} is a checkpoint; its parameters are in {}",
        path.display(),
        file.display()
    ));
    read_model(&file, dtype)
}

//! Folders and what lies in them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Makes a folder anew.
pub(crate) fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// Makes a folder anew, with copies of the files of another one and of its folders.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    empty(to)?;
    for path in files_below(from)? {
        let target = to.join(path.strip_prefix(from)?);
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::copy(&path, target)?;
    }
    Ok(())
}

/// All files of a folder and of its folders.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder);
        for entry in entries.with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    Ok(files)
}

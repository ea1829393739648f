//! Places of files and folders: outputs that would replace another file, and folders that are made.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use fusestep_checkpoint::Manifest;
use fusestep_tensor::Quoted;
use fusestep_tensor_file::same_file;

/// A flag, and the file that it names if it was given.
pub(crate) type Place<'a> = (&'a str, Option<&'a PathBuf>);

/// Refuses outputs that would take the place of each other or of an input.
pub(crate) fn require_apart(read: Place<'_>, written: &[Place<'_>]) -> anyhow::Result<()> {
    for (at, (flag, path)) in written.iter().enumerate() {
        let Some(path) = path else { continue };
        for (other, taken) in std::iter::once(&read).chain(&written[..at]) {
            ensure!(
                !taken.is_some_and(|taken| same_file(path, taken)),
                "{flag}: expected another file than {other}, found {} for both; it would be lost",
                path.display()
            );
        }
    }
    Ok(())
}

/// Refuses an output that is the checkpoint's folder, or one of the checkpoint's own files there.
pub(crate) fn require_beside(
    flag: &str,
    path: &Path,
    other: &str,
    folder: &Path,
) -> anyhow::Result<()> {
    let here = |part: &Path| same_file(Path::new(".").join(part).as_path(), folder);
    let mut within = path.ancestors().zip(path.ancestors().skip(1));
    let taken = within.any(|(part, parent)| here(parent) && is_own(part));
    ensure!(
        !taken && !same_file(path, folder),
        "{flag}: expected another file than {other} has for its own, found {}; it would be lost",
        path.display()
    );
    Ok(())
}

/// Whether a checkpoint has a file or folder of this name in its folder.
fn is_own(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let begins = ["step-", ".fusestep-"];
    name == "manifest.json" || name == "lock" || begins.iter().any(|own| name.starts_with(own))
}

/// Makes a folder and its parents, unless it is there.
///
/// # Errors
/// The obstacle at the folder's place, after the flag that gives it.
pub(crate) fn make_folder(flag: &str, folder: &Path) -> anyhow::Result<()> {
    let Err(error) = fs::create_dir_all(folder) else {
        return Ok(());
    };
    let found = obstacle(folder).unwrap_or_else(|| error.to_string());
    bail!(
        "{flag} {}: expected a folder, or a place for a new one, found {found}; give another path",
        folder.display()
    )
}

/// Requires that a file's folder is there, and that the file is none of a checkpoint's.
///
/// # Errors
/// The obstacle in its place, after the flag that gives the file.
pub(crate) fn require_folder(flag: &str, file: &Path) -> anyhow::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let Some(folder) = folder.filter(|folder| !folder.is_dir()) else {
        ensure!(
            !is_of_checkpoint(file),
            "{flag} {}: expected another file than --checkpoint has for its own, found one of a run \
             before; the checkpoint would be lost, so give another path",
            file.display()
        );
        return Ok(());
    };
    let found = obstacle(folder).unwrap_or_else(|| "no such folder".to_owned());
    bail!(
        "{flag} {}: expected a file in a folder that is there, found {found} at {}; make the folder, \
         or give another path",
        file.display(),
        Quoted(&folder.display().to_string())
    )
}

/// Whether a file is a checkpoint's manifest, or lies in the folder of one of its saves.
fn is_of_checkpoint(file: &Path) -> bool {
    let has_manifest = |folder: &Path| matches!(Manifest::read_if_any(folder), Ok(Some(_)));
    let (Ok(file), true) = (std::path::absolute(file), file.exists()) else {
        return false;
    };
    let Some(folder) = file.parent() else {
        return false;
    };
    let is_manifest = file.file_name().is_some_and(|name| name == "manifest.json");
    let saved = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    is_manifest && has_manifest(folder) || saved && folder.parent().is_some_and(has_manifest)
}

/// The obstacle where a folder or one of its parents should be, in words.
fn obstacle(folder: &Path) -> Option<String> {
    let (path, kind) = folder.ancestors().find_map(|path| {
        let kind = fs::symlink_metadata(path).ok()?.file_type();
        Some((path, kind))
    })?;
    let what = match fs::metadata(path) {
        Ok(found) if found.is_dir() => return None,
        Ok(_) => "a file".to_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => "a link that leads nowhere".to_owned(),
        Err(error) if kind.is_symlink() => format!("a link that cannot be followed ({error})"),
        Err(_) => return None,
    };
    Some(if path == folder { what } else { format!("{what} at {}", path.display()) })
}

//! Folders that the command makes.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::bail;

/// Makes a folder and those above it, unless it is there.
///
/// # Errors
/// What is in its way, after the flag that gives it.
pub(crate) fn make(flag: &str, folder: &Path) -> anyhow::Result<()> {
    let Err(error) = fs::create_dir_all(folder) else {
        return Ok(());
    };
    let found = obstacle(folder).unwrap_or_else(|| error.to_string());
    bail!(
        "{flag} {}: expected a folder, or a place for a new one, found {found}; give another path",
        folder.display()
    )
}

/// What lies where a folder or one above it should.
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

//! Files to be written that would take the place of something else.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use fusestep_tensor_file::same_file;

/// A flag, and the file that it names if it was given.
pub(crate) type Place<'a> = (&'a str, Option<&'a PathBuf>);

/// Refuses files to be written that would take the place of each other or of one that is read.
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

/// Refuses a file to be written that is the checkpoint's folder, or one of its own files there.
pub(crate) fn require_beside(
    (flag, path): (&str, &Path),
    (other, folder): (&str, &Path),
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

/// Whether a checkpoint has something of this name in its folder.
fn is_own(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let begins = ["step-", ".fusestep-"];
    name == "manifest.json" || name == "lock" || begins.iter().any(|own| name.starts_with(own))
}

//! `kernels/compiled.txt`: what was compiled, and what came of it, by their hashes.
//!
//! The compiler is pinned, so equal sources give equal PTX. A record that fits the files at hand
//! says as much as compiling them again, in a second in place of minutes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xxhash_rust::xxh3::Xxh3Default;

use super::{ISA, OPTIONS};
use crate::wheels::{NVDISASM, NVRTC, PTXAS};

/// Programs whose change may change what is compiled or refused.
const PROGRAMS: [&str; 6] = [
    "kernels/src/bundle.rs",
    "kernels/src/single_entry.rs",
    "tools/xtask/nvrtc.py",
    "tools/xtask/src/machine_code.rs",
    "tools/xtask/src/ptxas.rs",
    "tools/xtask/src/sass.rs",
];

/// What stands above the two hashes.
const HEAD: &str = "# Written by `cargo xtask ptx` once every kernel was compiled and assembled.\n";

/// The record of the files as they lie below `root` now.
pub(super) fn of_files(root: &Path) -> Result<String> {
    let kernels = root.join("kernels");
    let mut sources = files(&kernels, |name| name.ends_with(".cu") || name.ends_with(".cuh"))?;
    sources.extend(PROGRAMS.map(|program| root.join(program)));
    let mut results = files(&kernels.join("ptx"), |_| true)?;
    results.extend(files(&kernels.join("machine_code"), |_| true)?);
    let versions = [NVRTC, PTXAS, NVDISASM].map(|wheel| wheel.version);
    let options = format!("{OPTIONS:?} {ISA:?} {versions:?}");
    let sources = hash(root, &sources, &options)?;
    let results = hash(root, &results, "")?;
    Ok(format!("{HEAD}sources {sources:032x}\nresults {results:032x}\n"))
}

/// The record that is checked in, if there is one.
pub(super) fn path(root: &Path) -> PathBuf {
    root.join("kernels/compiled.txt")
}

/// Files of a folder whose names are wanted, sorted.
fn files(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry?;
        let is_wanted = entry.file_name().to_str().is_some_and(&wanted);
        if is_wanted && entry.file_type()?.is_file() {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// The hash of a text, and of names, lengths and bytes of files.
fn hash(root: &Path, paths: &[PathBuf], text: &str) -> Result<u128> {
    let mut hasher = Xxh3Default::new();
    hasher.update(text.as_bytes());
    for path in paths {
        let bytes = fs::read(path).with_context(|| path.display().to_string())?;
        let name = path.strip_prefix(root).unwrap_or(path).display();
        hasher.update(format!("\n{name} {}\n", bytes.len()).as_bytes());
        hasher.update(&bytes);
    }
    Ok(hasher.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace_root;

    /// A copy of what a record is of.
    fn copy() -> tempfile::TempDir {
        let (root, folder) = (workspace_root(), tempfile::tempdir().unwrap());
        let mut all = files(&root.join("kernels"), |_| true).unwrap();
        for below in ["kernels/ptx", "kernels/machine_code"] {
            all.extend(files(&root.join(below), |_| true).unwrap());
        }
        all.extend(PROGRAMS.map(|program| root.join(program)));
        for path in all {
            let to = folder.path().join(path.strip_prefix(&root).unwrap());
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(&path, to).unwrap();
        }
        folder
    }

    #[test]
    fn the_record_is_of_the_files_at_hand() {
        let root = workspace_root();
        let found = fs::read_to_string(path(&root)).unwrap();
        assert_eq!(found, of_files(&root).unwrap(), "run `cargo xtask ptx`");
    }

    #[test]
    fn a_change_of_any_kind_of_file_is_another_record() {
        let folder = copy();
        let root = folder.path();
        let before = of_files(root).unwrap();
        assert_eq!(before, of_files(root).unwrap());
        let changed = [
            "kernels/coded.cuh",
            "kernels/lion.cu",
            "kernels/ptx/lion.ptx",
            "kernels/machine_code/sm_90",
            "tools/xtask/nvrtc.py",
        ];
        for name in changed {
            let path = root.join(name);
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, [&bytes[..], b" "].concat()).unwrap();
            assert_ne!(before, of_files(root).unwrap(), "{name}");
            fs::write(&path, bytes).unwrap();
        }
        fs::write(root.join("kernels/new.cu"), "").unwrap();
        assert_ne!(before, of_files(root).unwrap());
    }
}

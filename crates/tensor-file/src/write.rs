//! Writing of files, all or nothing.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use crate::error::io_error;
use crate::prepared::checked_target;
use crate::{Disk, Files, Prepared, TensorBytes, TensorFileError, commit_together, journal, place};

/// Refuses a path that [`write_atomically`] could not write, before work is spent on the content.
///
/// # Errors
/// [`TensorFileError::NotAFile`] for a folder or device, [`TensorFileError::Io`] if its folder is
/// missing or cannot be written, or its name is too long.
pub fn check_writable(path: &Path) -> Result<(), TensorFileError> {
    // Parts of dead processes stay here: the caller may not have finished their commit yet.
    Prepared::within(&Disk, path, checked_target(path)?, &[]).map(drop)
}

/// Refuses paths that [`commit_together`](crate::commit_together) could not write, before work is
/// spent on the contents.
///
/// # Errors
/// Those of [`check_writable`] for each path. For several paths also [`TensorFileError::Write`] if
/// one is not UTF-8, which a journal cannot hold. [`TensorFileError::Io`] if the first is too long
/// for the name of its journal.
pub fn check_writable_together(paths: &[&Path]) -> Result<(), TensorFileError> {
    for path in paths {
        check_writable(path)?;
    }
    let [first, _, ..] = paths else {
        return Ok(());
    };
    let nameless = |path: &&&Path| place::target(path).to_str().is_none();
    if let Some(path) = paths.iter().find(nameless) {
        return Err(TensorFileError::Write {
            path: path.to_path_buf(),
            reason: "expected a path in UTF-8 for files that take their places together, found \
                     other bytes; use another name or folder"
                .to_owned(),
        });
    }
    match Disk.kind(&journal::of(&place::target(first))) {
        Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
            let operation = "call the journal of several files after this one; use a shorter name";
            Err(io_error(first, operation)(error))
        }
        _ => Ok(()),
    }
}

/// Writes a file of tensors: first a temporary file beside `path`, synced, which is then renamed
/// over `path`; last the folder is synced.
///
/// # Errors
/// [`TensorFileError`]; whatever was at `path` is still there, and the temporary file is removed.
/// # Cost
/// One copy of the tensors in memory.
pub fn write_atomically(
    path: &Path,
    tensors: &[(String, TensorBytes<'_>)],
    metadata: HashMap<String, String>,
) -> Result<(), TensorFileError> {
    commit_together(vec![Prepared::tensors(path, tensors, metadata)?])
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::fs;

    use safetensors::Dtype;

    use super::*;
    use crate::TensorFile;
    use crate::header::METADATA_KEY;

    fn tensors(value: u8) -> Vec<(String, TensorBytes<'static>)> {
        let tensor =
            TensorBytes { dtype: Dtype::F32, shape: vec![2], bytes: Cow::Owned(vec![value; 8]) };
        vec![("a".into(), tensor)]
    }

    #[test]
    fn what_is_written_is_read_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.safetensors");
        for value in [1, 2] {
            let metadata = HashMap::from([("step".to_owned(), value.to_string())]);
            write_atomically(&path, &tensors(value), metadata).unwrap();
            let read = TensorFile::read(&path).unwrap();
            assert_eq!(read.bytes("a").unwrap(), [value; 8]);
            assert_eq!(read.metadata()["step"], value.to_string());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn names_that_a_file_cannot_have_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.safetensors");
        write_atomically(&path, &tensors(1), HashMap::new()).unwrap();
        for (name, said) in [
            ("a", "`a`: expected the name once, found it twice"),
            (METADATA_KEY, "expected tensors of other names than `__metadata__`"),
        ] {
            let (mut wrong, mut other) = (tensors(2), tensors(3));
            other[0].0 = name.to_owned();
            wrong.append(&mut other);
            let error = write_atomically(&path, &wrong, HashMap::new()).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains("out.safetensors"), "{error}");
            assert_eq!(TensorFile::read(&path).unwrap().bytes("a").unwrap(), [1; 8]);
        }
    }

    #[test]
    fn a_refused_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.safetensors");
        write_atomically(&path, &tensors(1), HashMap::new()).unwrap();
        let mut wrong = tensors(2);
        wrong[0].1.shape = vec![3];
        assert!(write_atomically(&path, &wrong, HashMap::new()).is_err());
        assert_eq!(TensorFile::read(&path).unwrap().bytes("a").unwrap(), [1; 8]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let below_a_file = path.join("x");
        for bad in [folder.path(), Path::new("/no/such/folder/x"), &below_a_file] {
            assert!(check_writable(bad).is_err(), "{}", bad.display());
            assert!(write_atomically(bad, &tensors(1), HashMap::new()).is_err());
        }
    }

    #[cfg(unix)]
    #[test]
    fn the_mode_is_that_of_an_ordinary_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, plain) = (folder.path().join("ours"), folder.path().join("plain"));
        write_atomically(&ours, &tensors(1), HashMap::new()).unwrap();
        fs::write(&plain, b"x").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&plain));
        fs::set_permissions(&ours, fs::Permissions::from_mode(0o640)).unwrap();
        write_atomically(&ours, &tensors(2), HashMap::new()).unwrap();
        assert_eq!(mode(&ours) & 0o777, 0o640, "a replaced file hands it on");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_what_it_leads_to_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        std::os::unix::fs::symlink("real", &link).unwrap();
        for value in [1, 2] {
            write_atomically(&link, &tensors(value), HashMap::new()).unwrap();
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
            assert_eq!(TensorFile::read(&real).unwrap().bytes("a").unwrap(), [value; 8]);
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_without_an_end_are_refused_and_one_to_nothing_leads_to_the_new_file() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        symlink("l2", at("l1")).unwrap();
        symlink("l1", at("l2")).unwrap();
        symlink("own", at("own")).unwrap();
        for name in ["l1", "l2", "own"] {
            let outcomes = [
                check_writable(&at(name)),
                write_atomically(&at(name), &tensors(1), HashMap::new()),
            ];
            for outcome in outcomes {
                let error = outcome.unwrap_err().to_string();
                let named = format!("{name}: expected a file, found links that lead to no end");
                assert!(error.contains(&named), "{error}");
            }
            assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink());
        }
        symlink("new", at("dangling")).unwrap();
        write_atomically(&at("dangling"), &tensors(1), HashMap::new()).unwrap();
        assert!(fs::symlink_metadata(at("dangling")).unwrap().is_symlink());
        assert_eq!(TensorFile::read(&at("new")).unwrap().bytes("a").unwrap(), [1; 8]);
    }
}

//! Places that paths lead to, so that two names of one file are known as one.

use std::fs;
use std::path::{Path, PathBuf};

/// Most links that a path may lead through; Linux has the same limit.
const MAX_LINKS: usize = 40;

/// The file that a path names once links are followed, whether the file exists yet or not.
///
/// Replacing the file leaves the link in place.
pub(crate) fn target(path: &Path) -> PathBuf {
    if let Ok(found) = fs::canonicalize(path) {
        return found;
    }
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(next) = fs::read_link(&path) else {
            break;
        };
        path = folder(&path).join(next);
    }
    match (fs::canonicalize(folder(&path)), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path,
    }
}

/// Whether [`target`] is still a link: links lead to each other, or through too many.
pub(crate) fn is_link(target: &Path) -> bool {
    fs::symlink_metadata(target).is_ok_and(|found| found.is_symlink())
}

/// The folder of a path.
pub(crate) fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Whether two paths name one file, by whatever spelling, link or hard link. The file need not
/// exist.
pub fn same_file(a: &Path, b: &Path) -> bool {
    target(a) == target(b) || identity(a).is_some_and(|a| Some(a) == identity(b))
}

/// The device and number by which the system knows a file.
#[cfg(unix)]
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(_path: &Path) -> Option<(u64, u64)> {
    None
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn one_file_is_known_by_every_name() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("in")).unwrap();
        fs::write(at("in/a"), b"a").unwrap();
        fs::write(at("b"), b"b").unwrap();
        symlink(at("in"), at("alias")).unwrap();
        symlink("a", at("in/link")).unwrap();
        symlink("not-there", at("in/dangling")).unwrap();
        fs::hard_link(at("in/a"), at("hard")).unwrap();
        for (a, b, same) in [
            ("in/a", "in/../in/a", true),
            ("in/a", "alias/a", true),
            ("in/a", "in/link", true),
            ("in/a", "hard", true),
            ("in/new", "alias/new", true),
            ("in/not-there", "alias/dangling", true),
            ("in/a", "b", false),
            ("in/new", "new", false),
            ("nowhere/x", "nowhere/y", false),
        ] {
            assert_eq!(same_file(&at(a), &at(b)), same, "{a} and {b}");
        }
    }
}

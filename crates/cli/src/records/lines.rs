//! Lines of JSON in a file, each written as it comes.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A file of lines.
pub(super) struct Lines {
    file: File,
    path: PathBuf,
}

impl Lines {
    /// Opens a file to add lines to. A last line that was not written to its end stays one line.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        if file.seek(SeekFrom::End(0))? > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
            }
        }
        Ok(Self { file, path: path.to_owned() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line in one call of the system, so that a reader that follows the file sees it at
    /// once. Numbers that are infinite or NaN are `null`.
    pub(super) fn add(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        self.file.write_all(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_behind_those_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        Lines::open(&path).unwrap().add(&1.5).unwrap();
        Lines::open(&path).unwrap().add(&f64::NAN).unwrap();
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "{\"torn").unwrap();
        Lines::open(&path).unwrap().add(&"next").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "1.5\nnull\n{\"torn\n\"next\"\n");
    }
}

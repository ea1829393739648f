//! Environments of the Python interpreter's own, below `target`.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::commands::{python, succeed};
use crate::target_folder;

/// An environment of the interpreter's own, below `target`.
pub(crate) struct Environment(PathBuf);

impl Environment {
    /// The environment of a folder below `target`, made if it is not there.
    pub(crate) fn new(folder: &str) -> Result<Self> {
        let environment = Self::there(folder);
        if !environment.has_interpreter() {
            succeed(python().args(["-m", "venv"]).arg(&environment.0))?;
        }
        Ok(environment)
    }

    /// The environment of a folder below `target`, which may be missing.
    pub(crate) fn there(folder: &str) -> Self {
        Self(target_folder().join(folder))
    }

    /// Whether it has been made.
    pub(crate) fn has_interpreter(&self) -> bool {
        self.0.join("bin/python").exists()
    }

    pub(crate) fn python(&self) -> Command {
        let mut python = Command::new(self.0.join("bin/python"));
        // A path of the caller's must not stand before what is installed here.
        python.env_remove("PYTHONPATH");
        python
    }

    pub(crate) fn install(&self, packages: &[&OsStr]) -> Result<()> {
        let mut pip = self.python();
        pip.args(["-m", "pip", "install", "--quiet"])
            .arg("--disable-pip-version-check")
            .args(packages);
        succeed(&mut pip)
    }
}

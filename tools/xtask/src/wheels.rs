//! Pinned compilers from the package registry's wheels, unpacked below `target/wheels`.
//!
//! A wheel is a zip file: nothing is installed, no environment is changed, and the second run finds
//! what the first one fetched.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::commands::{python, succeed};
use crate::folders::files_below;
use crate::target_folder;

/// A wheel at the one version that results may depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wheel {
    /// The package's name in the registry.
    pub(crate) name: &'static str,
    /// Its exact version.
    pub(crate) version: &'static str,
}

/// Compiles CUDA C++ to PTX.
pub(crate) const NVRTC: Wheel = Wheel { name: "nvidia-cuda-nvrtc-cu12", version: "12.4.127" };

/// Assembles PTX. 12.9 is the newest release line that still knows sm_70, and knows sm_100.
pub(crate) const PTXAS: Wheel = Wheel { name: "nvidia-cuda-nvcc-cu12", version: "12.9.86" };

/// Lists machine code. The first release line that has a wheel of it.
pub(crate) const NVDISASM: Wheel = Wheel { name: "nvidia-cuda-nvdisasm", version: "13.5.37" };

impl Wheel {
    /// The folder the wheel is unpacked in; fetches it first if it is not there.
    pub(crate) fn unpacked(self) -> Result<PathBuf> {
        let wheels = target_folder().join("wheels");
        let folder = wheels.join(format!("{}-{}", self.name, self.version));
        if folder.is_dir() {
            return Ok(folder);
        }
        let pinned = format!("{}=={}", self.name, self.version);
        eprintln!("fetching {pinned}");
        let incoming = wheels.join(format!("incoming-{}", std::process::id()));
        fs::create_dir_all(&incoming)?;
        let unpacked = self.fetch(&pinned, &incoming).and_then(|()| {
            // Renamed last, so that a folder under the final name is always complete.
            match fs::rename(incoming.join("unpacked"), &folder) {
                Err(error) if !folder.is_dir() => Err(error.into()),
                _ => Ok(()),
            }
        });
        fs::remove_dir_all(&incoming)?;
        unpacked.with_context(|| format!("{pinned} could not be fetched"))?;
        Ok(folder)
    }

    fn fetch(self, pinned: &str, incoming: &Path) -> Result<()> {
        let mut download = python();
        download
            .args(["-m", "pip", "download", "--quiet", "--no-deps"])
            .args(["--disable-pip-version-check", "--only-binary=:all:", "-d"])
            .args([incoming.as_os_str(), pinned.as_ref()]);
        succeed(&mut download)?;
        let wheel = fs::read_dir(incoming)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|found| found == "whl"))
            .with_context(|| format!("no wheel of {pinned} for this platform"))?;
        let mut unpack = python();
        unpack.args(["-m", "zipfile", "-e"]).args([wheel, incoming.join("unpacked")]);
        succeed(&mut unpack)
    }
}

/// The first file called `name` below `folder`.
pub(crate) fn file_below(folder: &Path, name: &str) -> Result<PathBuf> {
    let mut files = files_below(folder)?.into_iter();
    let found = files.find(|path| path.file_name().is_some_and(|found| found == name));
    found.with_context(|| format!("{} holds no `{name}`", folder.display()))
}

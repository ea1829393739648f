//! Compiles the stand-in for NCCL.

use std::fs;
use std::path::{Path, PathBuf};

use crate::compile::{hash, is_of, link, sources, write, write_error};
use crate::{EmulatorError, Options};

const SOURCES: &[(&str, &str)] =
    sources! { "nccl_stand_in.cpp" "nccl_stand_in.hpp" "nccl_lines.hpp" };

/// Version that the stand-in claims to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nccl {
    /// Version 2.27.3, with every function that fusestep uses.
    #[default]
    Complete,
    /// Version 2.10.3, from before communicators that do not block.
    Old,
    /// A new version, but without `ncclCommInitRankConfig`.
    WithoutConfig,
}

/// Builds a libnccl that runs on the emulated driver and returns its path, `out_dir/libnccl.so.2`.
///
/// Ranks are threads of one process; with `FUSESTEP_STAND_IN_PROCESSES` set, processes of one
/// machine. Nothing is compiled again while source, compiler and options stay the same.
///
/// # Errors
/// As [`build`](crate::build).
/// # Cost
/// A second or two of compilation.
pub fn build_nccl(out_dir: &Path, nccl: Nccl, options: &Options) -> Result<PathBuf, EmulatorError> {
    let define = match nccl {
        Nccl::Complete => "-DSTAND_IN_VERSION=22703",
        Nccl::Old => "-DSTAND_IN_VERSION=21003",
        Nccl::WithoutConfig => "-DSTAND_IN_WITHOUT_CONFIG",
    };
    let wanted = hash(&(SOURCES, define, options.compiler(), options.flags()));
    let (library, stamp) = (out_dir.join("libnccl.so.2"), out_dir.join("stamp"));
    if is_of(&library, &stamp, &wanted) {
        return Ok(library);
    }
    fs::create_dir_all(out_dir).map_err(|source| write_error(out_dir, source))?;
    let _ = fs::remove_file(&stamp);
    for (name, text) in SOURCES {
        write(&out_dir.join(name), text)?;
    }
    link(&[out_dir.join(SOURCES[0].0)], &library, &[define, "-ldl"], options)?;
    write(&stamp, &wanted)?;
    Ok(library)
}

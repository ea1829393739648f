//! The extension module of the Python package for CUDA devices: `python --cuda` tests it on the
//! emulated driver, and `wheel` puts it into the wheel.
//!
//! PyTorch's own kernels for CUDA take a card. Tests put tensors of the CPU in memory of the
//! emulated driver, in `crates/python/tests/emulated.py`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use fusestep_cuda_emulator::{Nccl, Options, build, build_nccl};

use crate::commands::{cargo, must, succeed};
use crate::environment::Environment;
use crate::folders::{copy, empty};
use crate::python::{BESIDE_PYTORCH, FAILED, PYTORCH, SOURCES};
use crate::{target_folder, workspace_root};

/// The extension modules, that of the CPU first.
const MODULES: [&str; 2] = ["_fusestep", "_cuda"];

/// Takes wheels apart and puts them together.
const WHEEL: &str = "wheel==0.45.1";

/// The folder of the emulated driver, below `target`.
const EMULATOR: &str = "emulator";

/// The folder of the stand-in for NCCL, below `target`.
const NCCL: &str = "nccl-stand-in";

/// The extension for CUDA devices, built with what the CUDA suite is built of.
const EXTENSION: &str = "build --release -q -p fusestep-python -p fusestep-cli --features \
                         fusestep-python/cuda";

/// Runs the tests of CUDA tensors, or those that `arguments` name.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = workspace_root();
    let folder = target_folder().join("python/cuda");
    let package = folder.join("fusestep");
    copy(&root.join(SOURCES), &package)?;
    let (emulator, library) = (target_folder().join(EMULATOR), extension()?);
    // One file under both names: it has both modules, and here a driver is always there.
    for module in MODULES {
        fs::copy(&library, package.join(format!("{module}.abi3.so")))
            .with_context(|| format!("{} is not there", library.display()))?;
    }
    let tests = root.join("crates/python/tests");
    let environment = Environment::new(BESIDE_PYTORCH)?;
    environment.install(&["-r".as_ref(), tests.join(PYTORCH).as_os_str()])?;
    let mut pytest = environment.python();
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]);
    match arguments {
        [] => {
            pytest.args(["test_cuda.py", "test_graphs.py", "test_nccl.py", "test_sharded_cuda.py"])
        }
        asked => pytest.args(asked),
    };
    let nccl = build_nccl(&target_folder().join(NCCL), Nccl::Complete, &Options::default())?;
    pytest
        .env("PYTHONPATH", folder)
        .env("LD_LIBRARY_PATH", emulator.join("lib64"))
        .env("FUSESTEP_NCCL_LIBRARY", nccl)
        .env("FUSESTEP_EMULATOR_DEVICES", "4")
        .env("FUSESTEP_STAND_IN_PROCESSES", "1")
        .env("FUSESTEP_STAND_IN_EAGER", "1")
        .current_dir(tests);
    must(&mut pytest, FAILED)
}

/// Builds the extension for CUDA devices, linked with the emulator's library, whose name is the
/// driver's.
fn extension() -> Result<PathBuf> {
    let emulator = target_folder().join(EMULATOR);
    build(&workspace_root().join("kernels"), &emulator, &Options::default())?;
    must(
        cargo(EXTENSION).env("CUDA_LIBRARY_PATH", &emulator),
        "the extension module for CUDA devices does not build",
    )?;
    Ok(target_folder().join("release/lib_fusestep.so"))
}

/// A wheel with the module for CUDA devices.
pub(crate) struct WithDevices {
    pub(crate) wheel: PathBuf,
    /// The extension modules in it, unpacked.
    pub(crate) modules: [PathBuf; 2],
}

/// Builds the extension for CUDA devices and adds it to a wheel for this machine.
pub(crate) fn add_to(wheel: &Path, environment: &Environment) -> Result<WithDevices> {
    let (library, stripped) = (extension()?, target_folder().join("python/stripped.so"));
    succeed(Command::new("strip").arg("-o").arg(&stripped).arg(library))?;
    put_into(wheel, environment, &stripped)
}

/// Puts a file with the extension for CUDA devices into a wheel. Its other files are as they were.
pub(crate) fn put_into(
    wheel: &Path,
    environment: &Environment,
    library: &Path,
) -> Result<WithDevices> {
    let folder = unpack(wheel, environment, "python/wheel-unpacked")?;
    let modules = MODULES.map(|name| module_in(&folder, name));
    fs::copy(library, &modules[1]).with_context(|| library.display().to_string())?;
    let out = wheel.parent().context("the wheel lies in no folder")?;
    let mut pack = environment.python();
    pack.args(["-m", "wheel", "pack", "--dest-dir"]).arg(out).arg(&folder);
    succeed(&mut pack)?;
    Ok(WithDevices { wheel: wheel.to_owned(), modules })
}

/// Unpacks a wheel below `target`.
fn unpack(wheel: &Path, environment: &Environment, below: &str) -> Result<PathBuf> {
    environment.install(&[WHEEL.as_ref()])?;
    let unpacked = target_folder().join(below);
    empty(&unpacked)?;
    let mut unpack = environment.python();
    unpack.args(["-m", "wheel", "unpack", "--dest"]).arg(&unpacked).arg(wheel);
    succeed(&mut unpack)?;
    let mut folders = fs::read_dir(&unpacked)?;
    Ok(folders.next().context("the wheel is empty")??.path())
}

fn module_in(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("fusestep/{name}.abi3.so"))
}

/// The file with both extension modules out of a wheel that was built with the feature `cuda`.
pub(crate) fn library_of(wheel: &Path, environment: &Environment) -> Result<PathBuf> {
    Ok(module_in(&unpack(wheel, environment, "python/cuda-unpacked")?, MODULES[0]))
}

/// The features of a build of that file by maturin.
pub(crate) const FEATURES: &str = "pyo3/extension-module,cuda";

/// Makes a library with the driver's name and functions, which do nothing, for links that no driver
/// is there for; returns the folder for `CUDA_LIBRARY_PATH`. `compiler` is a C compiler of the
/// target.
pub(crate) fn stub(compiler: &mut Command, processor: &str) -> Result<PathBuf> {
    let folder = target_folder().join("python/driver-stub").join(processor);
    let library = folder.join("lib64");
    fs::create_dir_all(&library).with_context(|| library.display().to_string())?;
    let header = workspace_root().join("tools/cuda-emulator/src/driver_api.hpp");
    let declared = fs::read_to_string(&header).with_context(|| header.display().to_string())?;
    let source = folder.join("driver.c");
    let functions: Vec<_> = functions(&declared)
        .into_iter()
        .map(|name| format!("int {name}(void) {{ return 999; }}\n"))
        .collect();
    fs::write(&source, functions.concat())?;
    compiler.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]);
    succeed(compiler.arg(library.join("libcuda.so")).arg(&source))?;
    Ok(folder)
}

/// Names of the driver's functions that a header declares.
fn functions(header: &str) -> Vec<&str> {
    let calls = header.lines().filter_map(|line| line.strip_prefix("CUresult "));
    calls.filter_map(|call| call.split_once('(')).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_the_driver_are_found_in_its_header() {
        let header =
            "// cuInit(0)\nCUresult cuInit(unsafe flags);\nCUresult cuMemFree_v2(int at);\n";
        assert_eq!(functions(header), ["cuInit", "cuMemFree_v2"]);
        let all = include_str!("../../cuda-emulator/src/driver_api.hpp");
        assert!(functions(all).contains(&"cuLaunchKernel"));
    }
}

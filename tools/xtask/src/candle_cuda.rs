//! `candle-cuda`: variables of candle on the emulated device, beside a toolkit that has no code.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fusestep_cuda_emulator::{Options, build};

use crate::commands::{cargo, must, succeed};
use crate::emulate::split;
use crate::{ptxas, target_folder, workspace_root};

/// CUDA's libraries that candle is linked with, beside the driver.
const LIBRARIES: [&str; 5] = ["cublas", "cublasLt", "curand", "nvrtc", "cudart"];

/// Builds the emulator and the toolkit, and runs candle's tests on a CUDA device.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = split(arguments);
    ensure!(own.is_empty(), "expected `candle-cuda [-- TEST ARGUMENTS]`, found {own:?}");
    let root = workspace_root();
    let emulator = target_folder().join("emulator");
    build(&root.join("kernels"), &emulator, &Options::default())?;
    let toolkit = target_folder().join("candle-toolkit");
    make_toolkit(&root.join("crates/candle/tests/toolkit"), &toolkit)?;
    let libraries = [emulator.join("lib64"), toolkit.join("lib64")];
    let command = "test --release --package fusestep-candle --features cuda --test cuda --";
    let mut tests = cargo(command);
    tests
        .args(test_arguments)
        // The emulated driver has one per-thread default stream for all threads: while one test
        // records on candle's, another could not use it.
        .env("RUST_TEST_THREADS", "1")
        .env("CUDA_HOME", &toolkit)
        .env("NVCC", toolkit.join("bin/nvcc"))
        .env("CUDA_COMPUTE_CAP", "90")
        .env("CUDARC_CUDA_VERSION", "12040")
        .env("CUDA_LIBRARY_PATH", &emulator)
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries)?);
    must(&mut tests, &format!("the tests failed: cargo {command}"))
}

/// A folder as a CUDA toolkit lies in one: a compiler that writes files without code, and
/// libraries that can be opened and do nothing.
fn make_toolkit(sources: &Path, folder: &Path) -> Result<()> {
    let making = || format!("cannot make {}", folder.display());
    let (programs, libraries) = (folder.join("bin"), folder.join("lib64"));
    for part in [&programs, &libraries] {
        fs::create_dir_all(part).with_context(making)?;
    }
    let compiler = programs.join("nvcc");
    fs::copy(sources.join("nvcc.sh"), &compiler).with_context(making)?;
    ptxas::make_executable(&compiler)?;
    let source = sources.join("libraries.cpp");
    for name in LIBRARIES {
        let library = libraries.join(format!("lib{name}.so"));
        let mut compiler = Command::new(Options::default().compiler());
        compiler
            .args(["-std=c++17", "-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(format!("-DLIBRARY_{name}"))
            .arg(&source);
        succeed(&mut compiler).with_context(|| source.display().to_string())?;
    }
    Ok(())
}

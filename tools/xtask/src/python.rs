//! `python` and `wheel`: the Python package, built and tested.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::commands::{cargo, must, python, succeed};
use crate::emulate::split;
use crate::environment::Environment;
use crate::folders::copy;
use crate::python_cuda::WithDevices;
use crate::{python_cuda, python_free, target_folder, workspace_root};

/// Builds wheels.
const MATURIN: &str = "maturin==1.16.0";

/// Bound on the bytes of the source distribution.
const MOST_SOURCE_BYTES: u64 = 3_000_000;

/// The Python side of the package, below the workspace.
pub(crate) const SOURCES: &str = "crates/python/python/fusestep";

/// What all tests are run beside, in the folder of the tests.
pub(crate) const PYTORCH: &str = "requirements.txt";

pub(crate) const FAILED: &str = "a test of the Python package failed";

/// What a lean extension is built of: AdamW, which every build has, and one rule more.
const LEAN: &str = "-p fusestep-python --no-default-features --features lion";

/// The environment that has PyTorch and the wheel, below `target`.
pub(crate) const BESIDE_PYTORCH: &str = "python/test";

/// Tests the package: without PyTorch, or all of it in an environment of its own.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    match arguments {
        [flag] if flag == "--bare" => bare("bare", "-p fusestep-python -p fusestep-cli"),
        [flag] if flag == "--lean" => bare("lean", LEAN),
        [flag] if flag == "--free-threaded" => python_free::run(),
        [flag] if flag == "--mpi" => full(&["--features", "mpi"], &[PYTORCH], &["-k", "mpirun"]),
        [flag] if flag == "--trainers" => {
            full(&[], &[PYTORCH, "requirements-trainers.txt"], &["test_trainers.py"])
        }
        [flag, rest @ ..] if flag == "--cuda" => python_cuda::run(split(rest).1),
        [] => full(&[], &[PYTORCH], &[]),
        [dashes, rest @ ..] if dashes == "--" => {
            full(&[], &[PYTORCH], &rest.iter().map(String::as_str).collect::<Vec<_>>())
        }
        _ => bail!(
            "expected `python [--bare | --lean | --free-threaded | --mpi | --trainers | --cuda | \
             -- PYTEST ARGUMENTS]`, found {arguments:?}"
        ),
    }
}

/// Builds the wheel and the source distribution. A wheel from that is without CUDA devices, for
/// which a driver's library has to be there.
pub(crate) fn wheel(arguments: &[String]) -> Result<()> {
    let from_sources = match arguments {
        [] => false,
        [flag] if flag == "--from-sdist" => true,
        _ => bail!("expected `wheel [--from-sdist]`, found {arguments:?}"),
    };
    let built = Built::new(&[])?;
    built.with_devices()?;
    println!("{}", built.wheel.display());
    println!("{}", built.sources.display());
    if from_sources {
        let out = target_folder().join("python/from-sdist");
        let mut pip = built.environment.python();
        pip.args(["-m", "pip", "wheel", "--no-deps", "-w"])
            .args([out.as_os_str(), built.sources.as_os_str()]);
        succeed(&mut pip).context("the source distribution does not build")?;
        println!("{}", newest(&out, "whl")?.display());
    }
    Ok(())
}

/// Builds a wheel that has the module for CUDA devices.
pub(crate) fn wheel_with_devices() -> Result<WithDevices> {
    Built::new(&[])?.with_devices()
}

/// Needs nothing but an interpreter: steps over memory of `ctypes`, by `tests/test_WHICH.py`.
///
/// The bare extension is built with the command line, for its dependencies: with them nothing is
/// compiled a second time.
fn bare(which: &str, packages: &str) -> Result<()> {
    must(
        &mut cargo(&format!("build --release -q {packages}")),
        "the extension module does not build",
    )?;
    let library = target_folder().join("release/lib_fusestep.so");
    test_bare(&mut python(), which, &library, "_fusestep.abi3.so", which)
}

/// Has an interpreter run `tests/test_WHICH.py` with an extension module under this name, in a
/// folder below `target/python`.
pub(crate) fn test_bare(
    interpreter: &mut Command,
    folder: &str,
    library: &Path,
    module: &str,
    which: &str,
) -> Result<()> {
    let root = workspace_root();
    let folder = target_folder().join("python").join(folder);
    let package = folder.join("fusestep");
    // Anew: what is no longer there must not be imported.
    copy(&root.join(SOURCES), &package)?;
    fs::copy(library, package.join(module))
        .with_context(|| format!("{} is not there", library.display()))?;
    must(
        interpreter
            .args(["-m", "unittest", "-v", &format!("test_{which}")])
            .env("PYTHONPATH", folder)
            .current_dir(root.join("crates/python/tests")),
        FAILED,
    )
}

/// Installs a wheel of these features beside what these files of the tests pin, checks types and
/// runs tests. It is built of what other tests are built of.
fn full(features: &[&str], pinned: &[&str], arguments: &[&str]) -> Result<()> {
    let root = workspace_root();
    let built = Built::new(&[&["--features", "beside"], features].concat())?;
    let environment = Environment::new(BESIDE_PYTORCH)?;
    let tests = root.join("crates/python/tests");
    let files = pinned.iter().map(|file| tests.join(file)).collect::<Vec<_>>();
    let asked = files.iter().flat_map(|file| [OsStr::new("-r"), file.as_os_str()]);
    environment.install(&asked.collect::<Vec<_>>())?;
    let again = ["--force-reinstall", "--no-deps"].map(OsStr::new);
    environment.install(&[again[0], again[1], built.wheel.as_os_str()])?;
    // The package's types, as users' checkers see them, and the stub of the extension module.
    let checks: [&[&str]; 2] =
        [&["-m", "mypy", "-p", "fusestep"], &["-m", "mypy.stubtest", "fusestep._fusestep"]];
    for check in checks {
        let mut checker = environment.python();
        checker.args(check).current_dir(root.join("crates/python"));
        succeed(&mut checker)?;
    }
    must(
        environment
            .python()
            .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
            .args(arguments)
            .current_dir(tests),
        FAILED,
    )
}

/// What `maturin` has built.
struct Built {
    environment: Environment,
    wheel: PathBuf,
    sources: PathBuf,
}

impl Built {
    /// Adds the module for CUDA devices to the wheel.
    fn with_devices(&self) -> Result<WithDevices> {
        python_cuda::add_to(&self.wheel, &self.environment)
    }

    fn new(features: &[&str]) -> Result<Self> {
        let environment = Environment::new("python/build")?;
        environment.install(&[MATURIN.as_ref()])?;
        let root = workspace_root();
        let out = target_folder().join("python/wheels");
        let manifest = root.join("crates/python/Cargo.toml");
        // A wheel that takes this machine's MPI is for this machine.
        let here: &[&str] = if features.contains(&"mpi") { &["--auditwheel", "skip"] } else { &[] };
        let build = [&["build", "--release"], features, here].concat();
        for command in [&build[..], &["sdist"]] {
            let mut maturin = environment.python();
            maturin
                .args(["-m", "maturin"])
                .args(command)
                .arg("--manifest-path")
                .args([manifest.as_os_str(), "--out".as_ref(), out.as_os_str()])
                .current_dir(&root);
            succeed(&mut maturin)?;
        }
        let sources = newest(&out, "gz")?;
        let len_bytes = fs::metadata(&sources)?.len();
        ensure!(
            len_bytes < MOST_SOURCE_BYTES,
            "{}: expected less than {MOST_SOURCE_BYTES} bytes, found {len_bytes}; `exclude` of \
             pyproject.toml leaves files out",
            sources.display()
        );
        Ok(Self { environment, wheel: newest(&out, "whl")?, sources })
    }
}

/// The file of this ending that was written last.
fn newest(folder: &Path, ending: &str) -> Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.path().extension() == Some(OsStr::new(ending)) {
            found.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    let newest = found.into_iter().max();
    let (_, path) = newest.with_context(|| format!("{} has no .{ending}", folder.display()))?;
    Ok(path)
}

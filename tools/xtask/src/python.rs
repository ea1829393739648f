//! `python` and `wheel`: the Python package, built and tested.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::commands::{cargo, must, python, succeed};
use crate::environment::Environment;
use crate::folders::copy;
use crate::{target_folder, workspace_root};

/// Builds wheels.
const MATURIN: &str = "maturin==1.16.0";

/// The Python side of the package, below the workspace.
const SOURCES: &str = "crates/python/python/fusestep";

const FAILED: &str = "a test of the Python package failed";

/// The environment that has PyTorch and the wheel, below `target`.
pub(crate) const BESIDE_PYTORCH: &str = "python/test";

/// Tests the package: without PyTorch, or all of it in an environment of its own.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    match arguments {
        [flag] if flag == "--bare" => bare(),
        [flag] if flag == "--mpi" => full(&["--features", "mpi"], &["-k", "mpirun"]),
        [] => full(&[], &[]),
        [dashes, rest @ ..] if dashes == "--" => {
            full(&[], &rest.iter().map(String::as_str).collect::<Vec<_>>())
        }
        _ => bail!("expected `python [--bare | --mpi | -- PYTEST ARGUMENTS]`, found {arguments:?}"),
    }
}

/// Builds the wheel and the source distribution.
pub(crate) fn wheel(arguments: &[String]) -> Result<()> {
    let from_sources = match arguments {
        [] => false,
        [flag] if flag == "--from-sdist" => true,
        _ => bail!("expected `wheel [--from-sdist]`, found {arguments:?}"),
    };
    let built = Built::new(&[])?;
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

/// Needs nothing but an interpreter: a step over memory of `ctypes`.
fn bare() -> Result<()> {
    let root = workspace_root();
    // The command line for its dependencies: with them nothing is compiled a second time.
    must(
        &mut cargo("build --release -q -p fusestep-python -p fusestep-cli"),
        "the extension module does not build",
    )?;
    let package = target_folder().join("python/bare/fusestep");
    // Anew: what is no longer there must not be imported.
    copy(&root.join(SOURCES), &package)?;
    let library = target_folder().join("release/lib_fusestep.so");
    fs::copy(&library, package.join("_fusestep.abi3.so"))
        .with_context(|| format!("{} is not there", library.display()))?;
    must(
        python()
            .args(["-m", "unittest", "-v", "test_bare"])
            .env("PYTHONPATH", target_folder().join("python/bare"))
            .current_dir(root.join("crates/python/tests")),
        FAILED,
    )
}

/// Installs a wheel of these features beside the pinned PyTorch, checks types and runs tests. It is
/// built of what other tests are built of.
fn full(features: &[&str], arguments: &[&str]) -> Result<()> {
    let root = workspace_root();
    let built = Built::new(&[&["--features", "beside"], features].concat())?;
    let environment = Environment::new(BESIDE_PYTORCH)?;
    let tests = root.join("crates/python/tests");
    environment.install(&["-r".as_ref(), tests.join("requirements.txt").as_os_str()])?;
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
        Ok(Self { environment, wheel: newest(&out, "whl")?, sources: newest(&out, "gz")? })
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

//! `wheels`: the Python package for other machines, one wheel for each kind of processor, on any
//! Linux with glibc 2.17 or newer. Zig links; its libraries are those of that release. The module
//! for CUDA devices is linked with a library that has the driver's name.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::commands::{host, must, output, succeed};
use crate::environment::Environment;
use crate::{bundle, folders, python_cuda, target_folder, workspace_root};

/// Builds wheels, links them, and reads what they ask of a system.
const TOOLS: [&str; 3] = ["maturin==1.16.0", "ziglang==0.17.1", "auditwheel==6.8.2"];

/// Processors that there are wheels for.
const PROCESSORS: [&str; 2] = ["x86_64", "aarch64"];

/// The newest release of glibc, 2.N, that a wheel may ask for.
const GLIBC_MINOR: u32 = 17;

/// Builds the wheels of all processors or one, and the source distribution, into
/// `target/python/manylinux`; checks what each asks of a system, and imports that of this machine.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let processors: Vec<&str> = match arguments {
        [] => PROCESSORS.to_vec(),
        [one] if PROCESSORS.contains(&one.as_str()) => vec![one],
        _ => bail!("expected `wheels [{}]`, found {arguments:?}", PROCESSORS.join(" | ")),
    };
    let environment = Environment::new("python/manylinux-build")?;
    environment.install(&TOOLS.map(AsRef::as_ref))?;
    let out = target_folder().join("python/manylinux");
    folders::empty(&out)?;
    let host = host()?;
    for processor in processors {
        let target = format!("{processor}-unknown-linux-gnu");
        must(
            Command::new("rustup").args(["target", "add", &target]),
            "the standard library is not there; `rustup target add` says why",
        )?;
        let zig = ["--zig", "--compatibility", "manylinux2014", "--target", &target];
        let build = [&["build", "--release"], &zig[..]].concat();
        maturin(&environment, &build, Driver::None, &out)?;
        let wheel = wheel_for(&out, processor)?;
        let said = output(environment.python().args(["-m", "auditwheel", "show"]).arg(&wheel))?;
        check(&said, processor).with_context(|| wheel.display().to_string())?;
        // Behind that check: the driver is no part of any system's release.
        add_devices(&environment, processor, &build, &wheel)?;
        if host == target {
            import(&wheel)?;
        }
        println!("{}", wheel.display());
    }
    maturin(&environment, &["sdist"], Driver::None, &out)
}

/// Builds the extension module for CUDA devices in the same way, and adds it to the wheel.
fn add_devices(
    environment: &Environment,
    processor: &str,
    build: &[&str],
    wheel: &Path,
) -> Result<()> {
    let target = format!("{processor}-linux-gnu.2.{GLIBC_MINOR}");
    let mut compiler = environment.python();
    compiler.args(["-m", "ziglang", "cc", "-target", &target]);
    let driver = python_cuda::stub(&mut compiler, processor)?;
    let out = target_folder().join("python/manylinux-cuda");
    folders::empty(&out)?;
    let words = ["--auditwheel", "skip", "--features", python_cuda::FEATURES];
    maturin(environment, &[build, &words].concat(), Driver::In(&driver), &out)?;
    let built = wheel_for(&out, processor)?;
    let library = python_cuda::library_of(&built, environment)?;
    let headers = output(Command::new("readelf").args(["-W", "-d", "-V"]).arg(&library))?;
    let (_, minor) = bundle::check_headers("fusestep._cuda", &headers)?;
    ensure!(
        minor <= GLIBC_MINOR,
        "fusestep._cuda: expected glibc 2.{GLIBC_MINOR} or older, found 2.{minor}"
    );
    python_cuda::put_into(wheel, environment, &library).map(drop)
}

/// Where a build finds the driver's library.
enum Driver<'a> {
    /// Nowhere: it needs none.
    None,
    /// In this folder.
    In(&'a Path),
}

fn maturin(
    environment: &Environment,
    words: &[&str],
    driver: Driver<'_>,
    out: &Path,
) -> Result<()> {
    let root = workspace_root();
    let mut maturin = environment.python();
    // Zig is a module of the environment's interpreter and on nobody's path.
    let interpreter = maturin.get_program().to_owned();
    maturin.env("CARGO_ZIGBUILD_PYTHON_PATH", interpreter);
    if let Driver::In(folder) = driver {
        maturin.env("CUDA_LIBRARY_PATH", folder);
    }
    maturin.args(["-m", "maturin"]).args(words).arg("--manifest-path");
    maturin.arg(root.join("crates/python/Cargo.toml")).arg("--out").arg(out);
    succeed(maturin.current_dir(&root))
}

/// The one wheel of a processor.
fn wheel_for(folder: &Path, processor: &str) -> Result<PathBuf> {
    let ending = format!("_{processor}.whl");
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(&ending) {
            found.push(path);
        }
    }
    ensure!(found.len() == 1, "expected one wheel *{ending}, found {found:?}");
    Ok(found.remove(0))
}

/// Requires of auditwheel's words that a wheel runs on glibc 2.17, and brings nothing from outside.
fn check(said: &str, processor: &str) -> Result<()> {
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let tag = said.split_once("consistent with the following platform tag: \"manylinux_2_");
    let tag = tag.and_then(|(_, rest)| rest.split_once('"')).map(|(tag, _)| tag);
    let expected = format!("expected a tag of manylinux_2_{GLIBC_MINOR}_{processor} or older");
    let (minor, of) = tag
        .and_then(|tag| tag.split_once('_'))
        .with_context(|| format!("{expected}, found none in: {said}"))?;
    let is_old = minor.parse::<u32>().is_ok_and(|minor| minor <= GLIBC_MINOR);
    ensure!(is_old && of == processor, "{expected}, found manylinux_2_{minor}_{of}");
    Ok(())
}

/// Installs a wheel by itself and imports it.
fn import(wheel: &Path) -> Result<()> {
    let environment = Environment::new("python/manylinux-import")?;
    let again = ["--force-reinstall", "--no-deps"];
    environment.install(&[again[0].as_ref(), again[1].as_ref(), wheel.as_os_str()])?;
    let mut python = environment.python();
    python.args(["-c", "import fusestep, fusestep._fusestep"]).current_dir(target_folder());
    succeed(&mut python).context("the wheel is installed and cannot be imported")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_that_ask_for_a_newer_system_are_refused() {
        let said =
            "a.whl\nis consistent with the following platform tag:\n\"manylinux_2_17_x86_64\".\n";
        check(said, "x86_64").unwrap();
        check(&said.replace("17", "5"), "x86_64").unwrap();
        for (said, expected) in [
            (
                said.replace("17", "34"),
                "expected a tag of manylinux_2_17_x86_64 or older, found manylinux_2_34_x86_64",
            ),
            (said.replace("x86_64", "aarch64"), "found manylinux_2_17_aarch64"),
            (said.replace("manylinux", "linux"), "found none in: a.whl is consistent"),
        ] {
            let error = check(&said, "x86_64").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_wheel_is_found_by_its_processor() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a-manylinux_2_17_aarch64.whl"), "").unwrap();
        assert!(wheel_for(folder.path(), "aarch64").is_ok());
        let error = wheel_for(folder.path(), "x86_64").unwrap_err().to_string();
        assert!(error.contains("expected one wheel *_x86_64.whl, found []"), "{error}");
    }
}

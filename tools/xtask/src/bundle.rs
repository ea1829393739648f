//! What a bare machine with a GPU needs, in one folder: test and bench programs, shapes, a wheel of
//! the Python package and its script, the script of other implementations' times, and `run.sh`.
//! Kernels are in the programs and the wheel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use fusestep_cuda_emulator::{Options, build};

use crate::commands::{Program, built, cargo, output, succeed};
use crate::emulate::SUITE;
use crate::folders::{self, files_below};
use crate::python_cuda::WithDevices;
use crate::{parallel, ptxas, python, target_folder, workspace_root};

/// Most bytes of the folder.
const MOST_BYTES: u64 = 64 << 20;

/// What programs may ask the loader for: the driver, and what every Linux has.
const LIBRARIES: [&str; 8] = [
    "libcuda.so.1",
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux",
];

const RUN: &str = include_str!("../gpu/run.sh");

/// Builds everything and fills `folder`, which must be new or empty.
///
/// # Errors
/// If the folder holds something, a build fails, a program would not start on a bare machine, or
/// the folder exceeds 64 MiB.
pub(crate) fn pack(folder: &Path) -> Result<()> {
    if let Ok(mut entries) = fs::read_dir(folder) {
        ensure!(
            entries.next().is_none(),
            "{}: expected a new or empty folder, found files in it; name another or empty it",
            folder.display()
        );
    }
    let programs = build_programs()?;
    let making = || format!("cannot fill {}", folder.display());
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).with_context(making)?;
    let glibc = parallel::map(&programs, |program| strip_program(program, &bin))?;
    let glibc = glibc.into_iter().max().unwrap_or_default();
    pack_programs(folder)?;
    let root = workspace_root();
    folders::copy(&root.join("data/shapes"), &folder.join("shapes"))?;
    for script in ["device_torch.py", "device_python.py", "device_offload.py"] {
        let from = root.join("benches/peers").join(script);
        fs::copy(from, folder.join(script)).with_context(making)?;
    }
    let glibc = glibc.max(pack_wheel(folder)?);
    let machine = std::env::consts::ARCH;
    let (major, minor) = glibc;
    let needs = format!("Linux on {machine} with glibc {major}.{minor} or newer\n");
    fs::write(folder.join("NEEDS"), &needs).with_context(making)?;
    let run = folder.join("run.sh");
    fs::write(&run, RUN).with_context(making)?;
    ptxas::make_executable(&run)?;
    let files = lengths_below(folder)?;
    check_len_bytes(&files)?;
    let len_bytes: u64 = files.iter().map(|file| file.1).sum();
    println!(
        "{}: {} programs, {:.1} MiB; needs a GPU, its driver and {needs}run it there: bash run.sh",
        folder.display(),
        programs.len(),
        len_bytes as f64 / f64::from(1 << 20)
    );
    Ok(())
}

/// Test programs as the emulator's suite has them, and the bench. They are linked with the
/// emulator's library, whose name is the driver's: so no driver is needed here, and the loader
/// finds the real one there.
fn build_programs() -> Result<Vec<Program>> {
    let root = workspace_root();
    let library = target_folder().join("emulator");
    build(&root.join("kernels"), &library, &Options::default())?;
    let suite = format!("test --no-run {SUITE}");
    let mut programs = built(cargo(&suite).env("CUDA_LIBRARY_PATH", &library))?;
    let bench = "bench --no-run --package fusestep-benches --features cuda --bench device";
    programs.extend(built(cargo(bench).env("CUDA_LIBRARY_PATH", &library))?);
    programs.retain(|program| program.is_test);
    Ok(programs)
}

/// Copies a wheel of the Python package that has the module for CUDA devices; returns the glibc
/// that it needs.
fn pack_wheel(folder: &Path) -> Result<(u32, u32)> {
    let WithDevices { wheel, modules } = python::wheel_with_devices()?;
    let name = wheel.file_name().context("the wheel has no name")?;
    fs::copy(&wheel, folder.join(name)).with_context(|| wheel.display().to_string())?;
    let mut glibc = (0, 0);
    for module in modules {
        let headers = output(Command::new("readelf").args(["-W", "-d", "-V"]).arg(&module))?;
        glibc = glibc.max(check_headers(&module.display().to_string(), &headers)?);
    }
    Ok(glibc)
}

/// Strips and checks one program; returns the glibc that it needs.
fn strip_program(program: &Program, bin: &Path) -> Result<(u32, u32)> {
    let stripped = bin.join(&program.name);
    let path = program.path.as_os_str();
    succeed(Command::new("strip").arg("-o").arg(&stripped).arg(path))?;
    let headers = output(Command::new("readelf").args(["-W", "-d", "-V"]).arg(&stripped))?;
    check_headers(&program.name, &headers)
}

/// Packs all programs into one archive, in which the kernels that each carries lie once: the
/// dictionary reaches back over several programs.
fn pack_programs(folder: &Path) -> Result<()> {
    let (bin, archive) = (folder.join("bin"), folder.join("bin.tar"));
    succeed(
        Command::new("tar")
            .args(["--sort=name", "--create", "--file"])
            .arg(&archive)
            .arg("--directory")
            .arg(&bin)
            .arg("."),
    )?;
    let options = ["--threads=1", "--lzma2=preset=6,dict=192MiB"];
    succeed(Command::new("xz").args(options).arg(&archive))?;
    fs::remove_dir_all(&bin).with_context(|| format!("cannot remove {}", bin.display()))
}

/// Refuses a program that would not start elsewhere.
pub(crate) fn check_headers(name: &str, headers: &str) -> Result<(u32, u32)> {
    let mut newest = (0, 0);
    for line in headers.lines() {
        if line.contains("(RPATH)") || line.contains("(RUNPATH)") {
            bail!("{name}: expected no search path of this machine in the program, found {line}");
        }
        if let Some((_, library)) = line.split_once("Shared library: [") {
            let known = LIBRARIES.iter().any(|known| library.starts_with(known));
            ensure!(
                known,
                "{name}: expected libraries among {LIBRARIES:?}, found {}",
                library.trim_end_matches(']')
            );
        }
        for version in line.split("GLIBC_").skip(1) {
            let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
            if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) {
                newest = newest.max((major, minor));
            }
        }
    }
    Ok(newest)
}

/// All files with their lengths, the largest first.
fn lengths_below(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let files = files_below(folder)?.into_iter().map(|path| {
        let len_bytes = path.metadata()?.len();
        Ok((path, len_bytes))
    });
    let mut files: Vec<_> = files.collect::<Result<_>>()?;
    files.sort_by_key(|file| std::cmp::Reverse(file.1));
    Ok(files)
}

/// Refuses a folder that is too large to be carried, naming its largest files.
fn check_len_bytes(files: &[(PathBuf, u64)]) -> Result<()> {
    let found: u64 = files.iter().map(|file| file.1).sum();
    if found < MOST_BYTES {
        return Ok(());
    }
    let largest =
        files.iter().take(3).map(|(path, len_bytes)| format!("{} ({len_bytes})", path.display()));
    let largest: Vec<_> = largest.collect();
    bail!(
        "the folder: expected less than {MOST_BYTES} bytes, found {found}; the largest files are \
         {}",
        largest.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_would_not_start_elsewhere_are_refused() {
        let needed = |library: &str| format!(" 0x1 (NEEDED)  Shared library: [{library}]\n");
        let plain = needed("libcuda.so.1") + &needed("ld-linux-x86-64.so.2");
        let versions = "  0x0: Name: GLIBC_2.9  Flags: none\n  0x1: Name: GLIBC_2.34  Flags: \
                        none\n  0x2: Name: GLIBC_2.2.5\n";
        assert_eq!(check_headers("laws", &(plain.clone() + versions)).unwrap(), (2, 34));
        let error = check_headers("laws", &(plain.clone() + &needed("libssl.so.3"))).unwrap_err();
        assert!(error.to_string().ends_with("found libssl.so.3"), "{error}");
        let runpath = plain + " 0x1d (RUNPATH)  Library runpath: [/here]\n";
        assert!(check_headers("laws", &runpath).is_err());
    }

    #[test]
    fn a_folder_that_is_too_large_names_its_largest_files() {
        let file = |name: &str, len_bytes| (PathBuf::from(name), len_bytes);
        assert!(check_len_bytes(&[file("a", MOST_BYTES - 1)]).is_ok());
        let error = check_len_bytes(&[file("a", MOST_BYTES - 1), file("b", 1)]).unwrap_err();
        assert!(error.to_string().contains("a (67108863), b (1)"), "{error}");
    }

    #[test]
    fn a_folder_in_use_is_refused_before_anything_is_built() {
        let error = pack(&workspace_root().join("tools")).unwrap_err();
        assert!(error.to_string().contains("expected a new or empty folder"), "{error}");
    }
}

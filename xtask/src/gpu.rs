//! `gpu`: the CUDA tests on a real device.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::emulate::{split, test};
use crate::workspace_root;

/// Where drivers put their library; the last one is WSL's.
const LIBRARY_FOLDERS: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/cuda/compat",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

/// Asks a driver for its devices without linking with it.
const PROBE: &str = "
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
count = ctypes.c_int()
for status in (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))):
    if status: sys.exit('the driver does not start, with code %d' % status)
if not count.value: sys.exit('the driver has no device')
name = ctypes.create_string_buffer(256)
cuda.cuDeviceGetName(name, 255, 0)
print('%d device(s), the first is %s' % (count.value, name.value.decode()))
";

/// Runs the CUDA tests on the first device of this machine.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = split(arguments);
    if !own.is_empty() {
        bail!("expected `gpu [-- TEST ARGUMENTS]`, found {own:?}");
    }
    let library = find_driver().context(
        "there is no CUDA driver: libcuda.so.1 is in none of the usual folders nor in LD_LIBRARY_PATH; `cargo xtask emulate` runs these tests without a GPU",
    )?;
    println!("driver: {}", library.display());
    println!("{}", probe(&library)?);
    let folder = workspace_root().join("target/gpu");
    link_folder(&folder.join("lib64"), &library)?;
    let mut search = vec![folder.join("lib64")];
    search.extend(library_path());
    let environment: [(OsString, OsString); 2] = [
        ("CUDA_LIBRARY_PATH".into(), folder.into_os_string()),
        ("LD_LIBRARY_PATH".into(), std::env::join_paths(search)?),
    ];
    test(
        &workspace_root().join("target/on-gpu"),
        &environment,
        test_arguments,
    )
}

fn library_path() -> Vec<PathBuf> {
    let value = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&value)
        .filter(|path| !path.as_os_str().is_empty())
        .collect()
}

fn find_driver() -> Option<PathBuf> {
    library_path()
        .into_iter()
        .chain(LIBRARY_FOLDERS.map(PathBuf::from))
        .map(|folder| folder.join("libcuda.so.1"))
        .find(|path| path.exists())
}

fn probe(library: &Path) -> Result<String> {
    let output = Command::new("python3")
        .args(["-c", PROBE])
        .arg(library)
        .output()
        .context("cannot start python3, which looks for the device")?;
    ensure!(
        output.status.success(),
        "{}: {}; `cargo xtask emulate` runs these tests without a GPU",
        library.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Makes the folder that the build links with: drivers often come without the plain `libcuda.so`.
fn link_folder(folder: &Path, library: &Path) -> Result<()> {
    let making = || format!("cannot fill {}", folder.display());
    std::fs::create_dir_all(folder).with_context(making)?;
    for name in ["libcuda.so", "libcuda.so.1"] {
        let link = folder.join(name);
        if link.symlink_metadata().is_ok() {
            std::fs::remove_file(&link).with_context(making)?;
        }
        std::os::unix::fs::symlink(library, &link).with_context(making)?;
    }
    Ok(())
}

//! `gpu`: the proof on a real device, here or packed for another machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::commands::must;
use crate::emulate::split;
use crate::{bundle, folders, target_folder};

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

/// Packs the proof into a folder, or runs it on the first device of this machine.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, script_arguments) = split(arguments);
    match own {
        [flag, folder] if flag == "--bundle" && script_arguments.is_empty() => {
            bundle::pack(Path::new(folder))
        }
        [] => run_here(script_arguments),
        _ => {
            bail!("expected `gpu [-- RUN.SH ARGUMENTS]` or `gpu --bundle DIR`, found {arguments:?}")
        }
    }
}

/// Packs that bundle below `target` and runs it at once.
fn run_here(script_arguments: &[String]) -> Result<()> {
    let library = find_driver().context(
        "there is no CUDA driver: libcuda.so.1 is in none of the usual folders nor in \
         LD_LIBRARY_PATH; `cargo xtask emulate` runs the tests without a GPU, `cargo xtask gpu \
         --bundle DIR` packs all for a machine with one",
    )?;
    println!("driver: {}", library.display());
    println!("{}", probe(&library)?);
    let folder = target_folder().join("gpu");
    folders::empty(&folder)?;
    bundle::pack(&folder)?;
    let mut search: Vec<PathBuf> = library.parent().map(Path::to_path_buf).into_iter().collect();
    search.extend(library_path());
    let mut script = Command::new("bash");
    script
        .arg(folder.join("run.sh"))
        .arg("--out")
        .arg(target_folder().join("gpu-results"))
        .args(script_arguments)
        .env("LD_LIBRARY_PATH", std::env::join_paths(search)?);
    must(&mut script, "the proof failed; its table says where")
}

fn library_path() -> Vec<PathBuf> {
    let value = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
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
        "{}: {}; `cargo xtask emulate` runs the tests without a GPU",
        library.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

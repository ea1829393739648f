//! Kernels with one change that breaks them, built as emulated drivers: a test that runs on one
//! must fail.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fusestep_cuda_emulator::{Options, build};

use super::cuda;

/// A change of the kernels.
pub(crate) struct Mutant {
    /// A name for messages.
    pub(crate) name: &'static str,
    /// File, text that it has once, and what stands in its place.
    pub(crate) edits: &'static [(&'static str, &'static str, &'static str)],
}

/// A copy of the kernels with one mutant, built as an emulated driver; of the `.cu` files only
/// those named, for the others would only take time to compile.
fn build_mutant(mutant: &Mutant, kernel_names: &[&str], folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let kernels = folder.join("kernels");
    fs::create_dir_all(kernels.join("ptx")).unwrap();
    let mut done = 0;
    for entry in fs::read_dir(&source).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.ends_with(".cuh") && !kernel_names.contains(&name.as_str()) {
            continue;
        }
        let mut text = fs::read_to_string(source.join(&name)).unwrap();
        for (_, from, to) in mutant.edits.iter().filter(|edit| edit.0 == name) {
            assert_eq!(text.matches(from).count(), 1, "{}: {from}", mutant.name);
            text = text.replace(from, to);
            done += 1;
        }
        fs::write(kernels.join(name), only_f32(&text)).unwrap();
    }
    assert_eq!(done, mutant.edits.len(), "{}", mutant.name);
    // In one place for all mutants: the emulator itself is compiled once.
    let built = folder.with_file_name("built");
    let library = build(&kernels, &built, &Options::default()).unwrap();
    library.parent().unwrap().to_owned()
}

/// A table of entries in which every format is f32: compiling the others is most of the time.
fn only_f32(source: &str) -> String {
    let lines = source.lines().map(|line| match line.split_once("> ") {
        Some((format, name)) if format.starts_with("typedef storage::") => {
            format!("typedef storage::Plain<float, float, float> {name}\n")
        }
        _ => format!("{line}\n"),
    });
    lines.collect()
}

/// Requires that the ignored test `alone` of this file passes on a driver built from the kernels as
/// they are, and fails on every mutant.
pub(crate) fn check_mutants(mutants: &[Mutant], kernel_names: &[&str], alone: &str) {
    if !cuda().device_info().name.contains("emulator") {
        println!("skipped: only the emulated driver is built from sources");
        return;
    }
    let name = format!("fusestep-mutants-{}-{alone}", std::process::id());
    let root = std::env::temp_dir().join(name);
    let untouched = Mutant { name: "untouched", edits: &[] };
    for (mutant, survives) in
        std::iter::once((&untouched, true)).chain(mutants.iter().map(|mutant| (mutant, false)))
    {
        let library = build_mutant(mutant, kernel_names, &root.join(mutant.name));
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", alone, "--ignored"])
            .env("LD_LIBRARY_PATH", &library)
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("running 1 test"), "{text}");
        assert_eq!(output.status.success(), survives, "{}: {text}", mutant.name);
    }
    fs::remove_dir_all(&root).unwrap();
}

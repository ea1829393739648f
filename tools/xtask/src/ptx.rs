//! `cargo xtask ptx [--check [--recorded]]`: CUDA C++ to PTX with a pinned compiler, byte for byte
//! the same on every machine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

#[path = "../../../kernels/src/single_entry.rs"]
mod single_entry;

mod record;

use crate::{
    commands, machine_code, parallel, ptxas, target_folder,
    wheels::{self, NVRTC},
    workspace_root,
};

/// Options that results depend on: no contraction, correctly rounded division and root, subnormals
/// kept.
const OPTIONS: [&str; 6] = [
    "--gpu-architecture=compute_70",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "--std=c++17",
];

/// The version of the ISA as the compiler writes it, and as the text is to have it: the oldest with
/// arguments of 32 KB, which drivers from 530 on read. The assembler refuses what a version lacks,
/// so that what it takes needs no later one.
const ISA: (&str, &str) = ("\n.version 8.4\n", "\n.version 8.1\n");

/// What stands above the table of registers.
const REGISTERS_HEAD: &str = "# Registers of every kernel

Per thread, by `ptxas` for each promised device; no entry keeps anything on a stack or spills.
Behind them, instructions that move 16 bytes between a thread and memory, by `nvdisasm`: all of an
entry's paths, so the f32 path of an Adam with AMSGrad counts twice. Sums of LARS and LAMB read
element by element, neighbouring threads side by side, as the fixed tree has them; Adam with bf16
in all lists takes 8 bytes at a time where there is a fifth, because 16 would take too many
registers.

";

/// What happens to PTX once it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Write,
    Check,
}

/// Compiles every kernel, writes or compares its PTX, assembles it for all promised devices, and
/// writes or compares machine code. With `--recorded` nothing is compiled while the record of the
/// last time fits sources and results.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = workspace_root();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mode = match words[..] {
        [] => Mode::Write,
        ["--check"] => Mode::Check,
        ["--check", "--recorded"] => {
            let found = fs::read_to_string(record::path(&root)).unwrap_or_default();
            if found == record::of_files(&root)? {
                println!("ptx: sources and results are those of {}", record::path(&root).display());
                return Ok(());
            }
            Mode::Check
        }
        _ => bail!("`ptx` takes nothing, --check, or --check --recorded"),
    };
    let kernels = root.join("kernels");
    let checked_in = kernels.join("ptx");
    let fresh = target_folder().join("ptx");
    for folder in [&checked_in, &fresh] {
        fs::create_dir_all(folder)?;
    }
    let compiler = Compiler::fetch(&root)?;
    let stems = stems(&kernels)?;
    let mut differences = Vec::new();
    parallel::map(&stems, |stem| {
        let compiled = fresh.join(format!("{stem}.ptx"));
        compiler.compile(&kernels.join(format!("{stem}.cu")), &compiled)
    })?;
    for stem in &stems {
        let compiled = fresh.join(format!("{stem}.ptx"));
        let target = checked_in.join(format!("{stem}.ptx"));
        match mode {
            Mode::Write => {
                fs::copy(&compiled, &target)?;
            }
            Mode::Check => differences.extend(compare(&target, &compiled)?),
        }
    }
    differences.extend(orphans(&checked_in, &stems)?);
    if !differences.is_empty() {
        bail!("{}\nrun `cargo xtask ptx`", differences.join("\n"));
    }
    let folder = fresh.join("entries");
    let entries = split_entries(&fresh, &stems, &folder)?;
    let registers = ptxas::report(&folder, &entries)?;
    let bundles = kernels.join("machine_code");
    let differences = machine_code::bundle(mode, &bundles, &folder, &entries)?;
    if !differences.is_empty() {
        bail!("{}\nrun `cargo xtask ptx`", differences.join("\n"));
    }
    let page = fresh.join("registers.md");
    fs::write(&page, format!("{REGISTERS_HEAD}{registers}"))?;
    println!("registers of every entry: {}", page.display());
    let record = record::of_files(&root)?;
    match mode {
        Mode::Write => fs::write(record::path(&root), record)?,
        Mode::Check => ensure!(
            fs::read_to_string(record::path(&root)).is_ok_and(|found| found == record),
            "{}: expected the record of these files; run `cargo xtask ptx`",
            record::path(&root).display()
        ),
    }
    Ok(())
}

/// The names of all kernels, sorted.
fn stems(kernels: &Path) -> Result<Vec<String>> {
    let mut stems = Vec::new();
    for entry in fs::read_dir(kernels)? {
        let path = entry?.path();
        if path.extension().is_some_and(|found| found == "cu") {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            stems.push(stem.context("a kernel's name is not utf-8")?.to_owned());
        }
    }
    stems.sort();
    Ok(stems)
}

/// Writes every entry as a module of its own, which is what drivers load, and returns the names,
/// sorted.
fn split_entries(modules: &Path, stems: &[String], folder: &Path) -> Result<Vec<String>> {
    fs::create_dir_all(folder)?;
    let mut entries = Vec::new();
    for stem in stems {
        let path = modules.join(format!("{stem}.ptx"));
        let module = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        for line in module.lines() {
            let Some(rest) = line.strip_prefix(".visible .entry ") else {
                continue;
            };
            let entry = rest.trim_end_matches('(');
            let text = single_entry::single_entry(&module, entry)
                .with_context(|| format!("{}: `{entry}` has no end", path.display()))?;
            fs::write(folder.join(format!("{entry}.ptx")), text)?;
            entries.push(entry.to_owned());
        }
    }
    entries.sort();
    Ok(entries)
}

/// The pinned compiler, and where sources include from.
struct Compiler {
    driver: PathBuf,
    library: PathBuf,
    include_folder: PathBuf,
}

impl Compiler {
    fn fetch(root: &Path) -> Result<Self> {
        Ok(Self {
            driver: root.join("tools/xtask/nvrtc.py"),
            library: wheels::file_below(&NVRTC.unpacked()?, "libnvrtc.so.12")?,
            include_folder: root.join("kernels"),
        })
    }

    fn compile(&self, source: &Path, out: &Path) -> Result<()> {
        let mut command = commands::python();
        command
            .arg(&self.driver)
            .args([self.library.as_path(), source, out])
            .args(OPTIONS)
            .arg(format!("--include-path={}", self.include_folder.display()));
        let log = commands::output(&mut command).with_context(|| source.display().to_string())?;
        print!("{log}");
        let (written, wanted) = ISA;
        let text = fs::read_to_string(out)?;
        ensure!(
            text.matches(written).count() == 1,
            "{}: expected `{}` of the compiler, found another version",
            out.display(),
            written.trim()
        );
        Ok(fs::write(out, text.replacen(written, wanted, 1))?)
    }
}

/// Says where the checked-in file departs from the compiled one, if it does.
fn compare(checked_in: &Path, compiled: &Path) -> Result<Option<String>> {
    let name = checked_in.display();
    let Ok(found) = fs::read(checked_in) else {
        return Ok(Some(format!("{name}: missing")));
    };
    let expected = fs::read(compiled)?;
    if found == expected {
        return Ok(None);
    }
    let line = |bytes: &[u8], index| -> String {
        bytes
            .split(|&byte| byte == b'\n')
            .nth(index)
            .map_or("end of file".into(), |line| format!("`{}`", String::from_utf8_lossy(line)))
    };
    let index = first_difference(&expected, &found);
    Ok(Some(format!(
        "{name}:{}: expected {}, found {}",
        index + 1,
        line(&expected, index),
        line(&found, index)
    )))
}

/// Index of the first line in which two different texts differ.
fn first_difference(expected: &[u8], found: &[u8]) -> usize {
    let same = expected.iter().zip(found).take_while(|(left, right)| left == right);
    same.filter(|&(&byte, _)| byte == b'\n').count()
}

/// PTX that no source stands behind any more.
fn orphans(checked_in: &Path, stems: &[String]) -> Result<Vec<String>> {
    let mut orphans = Vec::new();
    for entry in fs::read_dir(checked_in)? {
        let path: PathBuf = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        if !stem.is_some_and(|stem| stems.iter().any(|known| known == stem)) {
            orphans.push(format!("{}: no kernel has this name; remove it", path.display()));
        }
    }
    Ok(orphans)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_differing_line_is_named() {
        assert_eq!(first_difference(b"a\nb\nc", b"a\nb\nd"), 2);
        assert_eq!(first_difference(b"x\nb", b"y\nb"), 0);
        assert_eq!(first_difference(b"a\nb\n", b"a\nb\nc"), 2);
        assert_eq!(first_difference(b"a\nb", b"a\nbc"), 1);
    }
}

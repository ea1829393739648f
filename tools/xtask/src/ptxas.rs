//! Assembles PTX for the promised devices and lists what each entry needs.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::commands;
use crate::parallel;
use crate::sass::{self, Wide};
use crate::wheels::{self, NVDISASM, PTXAS};

/// V100, A100, H100 and H200, B200.
const DEVICES: [&str; 4] = ["sm_70", "sm_80", "sm_90", "sm_100"];

/// What the assembler says about one entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Entry {
    name: String,
    registers: u32,
    stack_bytes: u32,
    spill_bytes: u32,
}

/// Assembles `ENTRY.ptx` of `folder` to `ENTRY.DEVICE.cubin` for every promised device, and returns
/// a table of one row per entry with its registers on every device and its accesses of 16 bytes on
/// some.
///
/// # Errors
/// If an entry spills, or keeps anything on a stack: its argument block was copied to local memory,
/// or an array index is not constant. As [`sass::count`].
pub(crate) fn report(folder: &Path, entries: &[String]) -> Result<String> {
    let assembler = wheels::file_below(&PTXAS.unpacked()?, "ptxas")?;
    make_executable(&assembler)?;
    let disassembler = wheels::file_below(&NVDISASM.unpacked()?, "nvdisasm")?;
    make_executable(&disassembler)?;
    let wide_heads = sass::DEVICES.map(|device| format!("16-byte loads, stores on {device}"));
    let mut table = format!("| entry | {} | {} |\n", DEVICES.join(" | "), wide_heads.join(" | "));
    let columns = DEVICES.len() + wide_heads.len();
    table += &format!("|---|{}\n", "---|".repeat(columns));
    let jobs = jobs(&DEVICES, entries);
    let reports =
        parallel::map(&jobs, |(device, entry)| assemble(&assembler, device, folder, entry))?;
    let wide = wide(&disassembler, folder, entries)?;
    let mut failures = Vec::new();
    for ((device, _), entry) in jobs.iter().zip(&reports) {
        if entry.spill_bytes + entry.stack_bytes > 0 {
            failures.push(format!(
                "{} on {device}: expected 0 bytes of stack and spills, found {} and {}",
                entry.name, entry.stack_bytes, entry.spill_bytes
            ));
        }
    }
    for (index, name) in entries.iter().enumerate() {
        let registers = reports.iter().skip(index).step_by(entries.len());
        let registers = registers.map(|entry| entry.registers.to_string());
        let wide = wide.iter().map(|entries| {
            let Wide { loads, stores } = entries.get(name).copied().unwrap_or_default();
            format!("{loads}, {stores}")
        });
        let cells: Vec<String> = registers.chain(wide).collect();
        table += &format!("| `{name}` | {} |\n", cells.join(" | "));
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    println!("{table}registers per thread; no stack and no spills");
    Ok(table)
}

/// Each device with each entry, device by device.
fn jobs<'e>(devices: &[&'static str], entries: &'e [String]) -> Vec<(&'static str, &'e str)> {
    let of_device = |&device| entries.iter().map(move |entry| (device, entry.as_str()));
    devices.iter().flat_map(of_device).collect()
}

/// The accesses of 16 bytes of all entries, for each device that is looked at.
fn wide(
    disassembler: &Path,
    folder: &Path,
    entries: &[String],
) -> Result<Vec<BTreeMap<String, Wide>>> {
    let counts = parallel::map(&jobs(&sass::DEVICES, entries), |(device, entry)| {
        sass::count(disassembler, &folder.join(format!("{entry}.{device}.cubin")))
    })?;
    let of_devices = counts.chunks(entries.len());
    Ok(of_devices
        .map(|counts| counts.iter().flatten())
        .map(|counts| counts.map(|(name, wide)| (name.clone(), *wide)).collect())
        .collect())
}

fn assemble(assembler: &Path, device: &str, folder: &Path, entry: &str) -> Result<Entry> {
    let ptx = folder.join(format!("{entry}.ptx"));
    let mut command = Command::new(assembler);
    command
        .args(["--verbose", "--gpu-name", device, "--output-file"])
        .args([ptx.with_extension(format!("{device}.cubin")).as_path(), &ptx]);
    let log = commands::output(&mut command)
        .with_context(|| format!("{} for {device}", ptx.display()))?;
    let mut found = parse(&log);
    match (found.pop(), found.pop()) {
        (Some(only), None) if only.name == entry => Ok(only),
        _ => bail!(
            "{} for {device}: expected this entry alone, found in the log\n{log}",
            ptx.display()
        ),
    }
}

/// Reads the assembler's report, in which an entry's lines follow its name.
fn parse(log: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            entries.push(Entry { name, ..Entry::default() });
        }
        let Some(entry) = entries.last_mut() else {
            continue;
        };
        if let Some((_, rest)) = line.split_once("Used ") {
            entry.registers = number(rest);
        }
        for part in line.split(',').map(str::trim) {
            if part.ends_with("bytes stack frame") {
                entry.stack_bytes += number(part);
            } else if part.ends_with("bytes spill stores") || part.ends_with("bytes spill loads") {
                entry.spill_bytes += number(part);
            }
        }
    }
    entries
}

/// The number a text starts with. A text that starts with none counts as the largest, so that a
/// changed report cannot pass.
fn number(text: &str) -> u32 {
    let first = text.split_whitespace().next();
    first.and_then(|word| word.parse().ok()).unwrap_or(u32::MAX / 4)
}

/// Lets a file be started: zip files do not carry the permission.
#[cfg(unix)]
pub(crate) fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mut permissions = path.metadata()?.permissions();
    permissions.set_mode(0o755);
    Ok(std::fs::set_permissions(path, permissions)?)
}

#[cfg(not(unix))]
pub(crate) fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_stack_and_spills_are_read() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 60 registers, used 0 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
";
        let entry = |name: &str, registers, stack_bytes, spill_bytes| Entry {
            name: name.into(),
            registers,
            stack_bytes,
            spill_bytes,
        };
        assert_eq!(parse(log), [entry("first", 60, 0, 0), entry("second", 255, 16, 12)]);
    }
}

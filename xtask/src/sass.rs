//! Counts, in the machine code of each entry, the accesses of 16 bytes to device memory.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::wheels;

/// Devices whose machine code is looked through.
pub(crate) const DEVICES: [&str; 2] = ["sm_80", "sm_90"];

/// Accesses of 16 bytes by one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wide {
    pub(crate) loads: u32,
    pub(crate) stores: u32,
}

/// Those of every entry of one assembled file.
///
/// # Errors
/// If the file cannot be disassembled, or an entry has fewer than it should; see [`missing`].
pub(crate) fn count(disassembler: &Path, cubin: &Path) -> Result<BTreeMap<String, Wide>> {
    let mut command = Command::new(disassembler);
    command.arg("-c").arg(cubin);
    let text = wheels::output(&mut command).with_context(|| cubin.display().to_string())?;
    let entries = parse(&text);
    if entries.is_empty() {
        bail!("{}: the disassembler names no entry", cubin.display());
    }
    for (name, wide) in &entries {
        if let Some(expected) = missing(name, *wide) {
            bail!(
                "{name} in {}: expected {expected} of 16 bytes, found none",
                cubin.display()
            );
        }
    }
    Ok(entries)
}

/// Reads a listing, in which an entry's section is headed by its name.
fn parse(text: &str) -> BTreeMap<String, Wide> {
    let mut entries = BTreeMap::new();
    let mut entry: Option<&mut Wide> = None;
    for line in text.lines() {
        if line.starts_with("//--") {
            entry = line.split_once(".text.").map(|(_, rest)| {
                let name = rest.split_whitespace().next().unwrap_or_default();
                entries.entry(name.to_owned()).or_default()
            });
        }
        let Some(entry) = &mut entry else {
            continue;
        };
        let wide = |operation: &str| {
            let words = line.split_whitespace();
            words
                .filter(|word| word.starts_with(operation) && word.contains(".128"))
                .count() as u32
        };
        entry.loads += wide("LDG.");
        entry.stores += wide("STG.");
    }
    entries
}

/// What an entry should have and has not. Entries for f32 and f64 move packs of 16 bytes, but for
/// those that derive sets, conclude a reduction, or take sums by themselves, whose lanes the fixed
/// tree puts side by side; nor do measured updates of LARS and LAMB, which take the sums over what
/// they change in the same way. With 16 bits it depends on the registers.
fn missing(name: &str, wide: Wide) -> Option<&'static str> {
    let of_dtype = name.split('_').any(|part| matches!(part, "f32" | "f64"));
    let without = ["_sets_", "_sums_", "_s16", "amp_finish"];
    let normed = name.starts_with("lars_momentum_") || name.starts_with("lamb_");
    let by_lane = normed && name.ends_with("_measured");
    if !of_dtype || by_lane || without.iter().any(|part| name.contains(part)) {
        return None;
    }
    match wide {
        Wide { loads: 0, .. } => Some("loads"),
        Wide { stores: 0, .. } if !name.starts_with("amp_norm") => Some("stores"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\
//--------------------- .text.fused_adam_f32 --------------------------
\t.section\t.text.fused_adam_f32,\"ax\",@progbits
        /*0090*/                   LDG.E.128 R4, desc[UR6][R2.64+0x10] ;
        /*00a0*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR6][R2.64] ;
        /*00b0*/                   LDG.E R2, desc[UR6][R2.64+0x20] ;
        /*00c0*/                   STG.E.128 desc[UR6][R2.64], R4 ;
//--------------------- .nv.shared.reserved --------------------------
        /*0090*/                   LDG.E.128 R4, desc[UR6][R2.64+0x10] ;
//--------------------- .text.fused_adam_sets_f32_resident --------------------------
        /*0090*/                   LDG.E.64 R4, desc[UR6][R2.64+0x10] ;
";

    #[test]
    fn accesses_are_counted_by_entry() {
        let entries = parse(LISTING);
        let wide = |loads, stores| Wide { loads, stores };
        assert_eq!(entries["fused_adam_f32"], wide(2, 1));
        assert_eq!(entries["fused_adam_sets_f32_resident"], wide(0, 0));
        assert_eq!(entries.len(), 2);
    }

    #[test]
    fn an_entry_without_packs_is_noticed() {
        let wide = |loads, stores| Wide { loads, stores };
        assert_eq!(missing("lion_f32", wide(0, 3)), Some("loads"));
        assert_eq!(missing("lion_f64_resident", wide(3, 0)), Some("stores"));
        assert_eq!(missing("amp_norm_f32", wide(3, 0)), None);
        assert_eq!(missing("lion_sets_f32_resident", wide(0, 0)), None);
        assert_eq!(missing("lamb_f32_measured", wide(0, 0)), None);
        assert_eq!(missing("lion_f32_measured", wide(0, 1)), Some("loads"));
        assert_eq!(missing("lion_bf16", wide(0, 0)), None);
        assert_eq!(missing("lion_f32_s16", wide(0, 0)), None);
    }
}

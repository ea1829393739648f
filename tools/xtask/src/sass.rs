//! Counts, in the machine code of each entry, the accesses of 16 bytes to device memory.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::commands;

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
/// If the file cannot be disassembled, or an entry loads or stores other than it should; see
/// [`missing`] and [`expected_stores`].
pub(crate) fn count(disassembler: &Path, cubin: &Path) -> Result<BTreeMap<String, Wide>> {
    let mut command = Command::new(disassembler);
    command.arg("-c").arg(cubin);
    let text = commands::output(&mut command).with_context(|| cubin.display().to_string())?;
    let entries = parse(&text);
    if entries.is_empty() {
        bail!("{}: the disassembler names no entry", cubin.display());
    }
    for (name, wide) in &entries {
        if let Some(expected) = missing(name, *wide) {
            bail!("{name} in {}: expected {expected} of 16 bytes, found none", cubin.display());
        }
        let Some(expected) = expected_stores(name) else {
            continue;
        };
        if wide.stores != expected || wide.loads == 0 {
            bail!(
                "{name} in {}: expected {expected} stores of 16 bytes and some loads, found {} and \
                 {}",
                cubin.display(),
                wide.stores,
                wide.loads
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
            words.filter(|word| word.starts_with(operation) && word.contains(".128")).count() as u32
        };
        entry.loads += wide("LDG.");
        entry.stores += wide("STG.");
    }
    entries
}

/// What an entry should have and has not. Entries for f32 and f64 move packs of 16 bytes, but for
/// those that derive step scalars or take sums for LARS and LAMB, whose lanes the fixed tree puts
/// side by side; norms load and copies for norms of updates store them whatever the dtype. Else it
/// depends on the registers with 16 bits.
fn missing(name: &str, wide: Wide) -> Option<&'static str> {
    let of_dtype = name.split('_').any(|part| matches!(part, "f32" | "f64"));
    let of_updates = name.starts_with("update_sums_");
    let keeps = name.starts_with("update_sums_keep_");
    let excluded = ["_sets_", "_sums_", "_s16", "amp_"];
    let moves = keeps || !excluded.iter().any(|part| name.contains(part));
    let sums = name.starts_with("amp_norm_") || of_updates && !keeps;
    if wide.loads == 0 && (sums || moves && of_dtype) {
        Some("loads")
    } else if wide.stores == 0 && (keeps || moves && of_dtype) {
        Some("stores")
    } else {
        None
    }
}

/// A way through a kernel: the lists of state that it writes, and how often each pack of a list is
/// stored in its code: once for each pack in flight, and once for the rest behind those.
type Way = (u32, u32);

/// The ways through the kernels that write tensors.
const WAYS: [(&str, &[Way]); 10] = [
    ("adagrad_", &[(1, 3)]),
    ("adamax_", &[(2, 1)]),
    ("fused_adam_", &[(2, 1), (3, 1)]),
    ("fused_sgd_", &[(0, 3), (1, 3)]),
    ("lamb_update_", &[(2, 1)]),
    ("lars_momentum_update_", &[(1, 1)]),
    ("lion_", &[(1, 3)]),
    ("nadam_", &[(2, 1)]),
    ("rmsprop_", &[(1, 3), (2, 1), (3, 1)]),
    ("schedule_free_", &[(2, 1)]),
];

/// Stores of 16 bytes that an entry should have: one for each list of 32 or 64 bits that it writes,
/// on each of its [`WAYS`]. None where it depends on the registers: with all lists of 16 bits, and
/// element-wise with state of 16 bits or bf16 rounded at random.
fn expected_stores(name: &str) -> Option<u32> {
    let (stem, ways) = WAYS.iter().find(|(stem, _)| name.starts_with(stem))?;
    let normed = stem.ends_with("_update_");
    // Besides the lists of state: the parameter, or its master.
    let (others, with_states) = match &name[stem.len()..] {
        "f32" | "f64" | "f16_m32" | "bf16_m32" => (1, 1),
        "f16" | "bf16_r16" => (0, 1),
        "bf16" if normed => (0, 1),
        "f32_s16" | "bf16_m32_s16" if normed => (1, 0),
        _ => return None,
    };
    let stores = ways.iter().map(|(states, packs)| (others + states * with_states) * packs);
    Some(stores.sum())
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
//--------------------- .text.fused_adam_sets_f32 --------------------------
        /*0090*/                   LDG.E.64 R4, desc[UR6][R2.64+0x10] ;
";

    #[test]
    fn accesses_are_counted_by_entry() {
        let entries = parse(LISTING);
        let wide = |loads, stores| Wide { loads, stores };
        assert_eq!(entries["fused_adam_f32"], wide(2, 1));
        assert_eq!(entries["fused_adam_sets_f32"], wide(0, 0));
        assert_eq!(entries.len(), 2);
    }

    #[test]
    fn an_entry_without_packs_is_noticed() {
        let wide = |loads, stores| Wide { loads, stores };
        for (name, loads, stores, expected) in [
            ("lion_f32", 0, 3, Some("loads")),
            ("rank_order_f64", 3, 0, Some("stores")),
            ("rank_order_u8", 0, 0, None),
            ("amp_norm_bf16", 0, 0, Some("loads")),
            ("amp_norm_f32", 3, 0, None),
            ("amp_finish", 0, 0, None),
            ("lion_sets_f32", 0, 0, None),
            ("lion_bf16", 0, 0, None),
            ("lion_f32_s16", 0, 0, None),
            ("lamb_sums_f32", 0, 0, None),
            ("update_sums_f32", 0, 0, Some("loads")),
            ("update_sums_keep_f32", 0, 2, Some("loads")),
            ("update_sums_keep_bf16", 0, 2, None),
            ("update_sums_keep_bf16", 1, 0, Some("stores")),
        ] {
            assert_eq!(missing(name, wide(loads, stores)), expected, "{name}");
        }
    }

    #[test]
    fn stores_follow_from_the_lists_that_are_written() {
        for (name, expected) in [
            ("lars_momentum_update_f32", Some(2)),
            ("lamb_update_f64", Some(3)),
            ("lamb_update_bf16_m32", Some(3)),
            ("lamb_update_bf16", Some(2)),
            ("lamb_update_bf16_m32_s16", Some(1)),
            ("lamb_update_bf16_s16", None),
            ("fused_adam_f32", Some(7)),
            ("fused_sgd_f64", Some(9)),
            ("rmsprop_f32", Some(13)),
            ("rmsprop_f16", Some(8)),
            ("lion_bf16", None),
            ("lion_f32_s16", None),
            ("lion_sets_f32", None),
            ("lars_momentum_sums_f32", None),
            ("amp_finish", None),
        ] {
            assert_eq!(expected_stores(name), expected, "{name}");
        }
    }
}

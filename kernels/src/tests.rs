use std::{collections::BTreeSet, fs, path::Path};

use fusestep_launch::{ARGUMENT_BYTES_CLASSIC, ARGUMENT_BYTES_LARGE};

use super::*;

fn files_with_extension(folder: &Path, extension: &str) -> BTreeSet<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect()
}

/// Entries as the source declares them, on one line each.
fn declared_entries(source: &str) -> BTreeSet<&str> {
    source
        .lines()
        .filter_map(|line| line.strip_prefix("extern \"C\" __global__ void __launch_bounds__("))
        .map(|rest| rest.split_once(") ").unwrap().1.split_once('(').unwrap().0)
        .collect()
}

#[test]
fn every_source_has_its_ptx_and_both_are_embedded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let embedded: BTreeSet<String> = stems().map(str::to_owned).collect();
    assert_eq!(files_with_extension(root, "cu"), embedded);
    assert_eq!(files_with_extension(&root.join("ptx"), "ptx"), embedded);
    let embedded: BTreeSet<String> = headers()
        .iter()
        .map(|(name, _)| name.trim_end_matches(".cuh").to_owned())
        .collect();
    assert_eq!(files_with_extension(root, "cuh"), embedded);
}

#[test]
fn every_declared_entry_is_in_the_ptx_for_every_argument_block() {
    for stem in stems() {
        let declared = declared_entries(source(stem).unwrap());
        let found: BTreeSet<&str> = entries(stem).unwrap().into_iter().collect();
        assert!(!declared.is_empty(), "{stem}: no entry found in the source");
        assert_eq!(declared, found, "{stem}: run `cargo xtask ptx`");
        for name in declared {
            if stem == "rank_order" {
                assert_eq!(stem_of_entry(name), Some(stem));
                let parameter = format!(".param .align 8 .b8 {name}_param_0[56]");
                assert!(ptx(stem).unwrap().contains(&parameter), "{parameter}");
                continue;
            }
            let base = name
                .strip_suffix("_4k")
                .or_else(|| name.strip_suffix("_32k"))
                .or_else(|| name.strip_suffix("_resident"))
                .or_else(|| name.strip_suffix("_measured"))
                .unwrap_or_else(|| {
                    panic!("{name}: expected the suffix _4k, _32k, _resident or _measured")
                });
            assert_eq!(stem_of_entry(base), Some(stem));
            use ArgumentBlock::{Classic, Large, Measured, Resident};
            let blocks: &[ArgumentBlock] = match base {
                // One block, with fixed arguments.
                "amp_finish" => &[Classic, Large],
                // Derives sets where they lie.
                _ if base.starts_with(&format!("{stem}_sets_")) => &[Resident],
                "amp_norm_f16" | "amp_norm_bf16" | "amp_norm_f32" | "amp_norm_f64" => {
                    &[Classic, Large, Resident]
                }
                // All that update.
                _ => &[Classic, Large, Resident, Measured],
            };
            for &block in blocks {
                let name = entry(base, block);
                assert!(found.contains(name.as_str()), "{name} is missing");
                let parameter =
                    format!(".param .align 8 .b8 {name}_param_0[{}]", block.len_bytes());
                assert!(ptx(stem).unwrap().contains(&parameter), "{parameter}");
            }
        }
    }
}

#[test]
fn ptx_rounds_every_operation_once() {
    let contracted = [
        "fma.", "mad.rn.f", ".approx", ".full.", ".ftz", "rsqrt", "rcp",
    ];
    for stem in stems() {
        let mut derives_sets = false;
        for line in ptx(stem).unwrap().lines() {
            if line.contains(".entry ") {
                derives_sets = line.contains("_sets_");
            }
            for word in contracted {
                // What the host computes with a fused operation, exactly and in f64.
                let is_of_sets = derives_sets && line.contains("fma.rn.f64");
                assert!(
                    is_of_sets || !line.contains(word),
                    "{stem}: `{word}` in `{}`",
                    line.trim()
                );
            }
        }
    }
}

#[test]
fn ptx_is_for_the_oldest_device_and_driver_promised() {
    for stem in stems() {
        let text = ptx(stem).unwrap();
        assert!(text.contains("\n.version 8.4\n"), "{stem}: ISA version");
        assert!(text.contains("\n.target sm_70\n"), "{stem}: target");
    }
}

#[test]
fn argument_blocks_hold_every_table_that_fits_the_limits() {
    for (block, limit) in [
        (ArgumentBlock::Classic, ARGUMENT_BYTES_CLASSIC),
        (ArgumentBlock::Large, ARGUMENT_BYTES_LARGE),
    ] {
        // Tables are made of parts of 8 bytes, so the largest table within the limit is the limit
        // rounded down.
        assert_eq!(block.len_bytes(), limit / 8 * 8);
    }
}

#[test]
fn argument_blocks_are_chosen_by_bytes() {
    assert_eq!(ArgumentBlock::for_bytes(0), Some(ArgumentBlock::Classic));
    assert_eq!(ArgumentBlock::for_bytes(4096), Some(ArgumentBlock::Classic));
    assert_eq!(ArgumentBlock::for_bytes(4097), Some(ArgumentBlock::Large));
    assert_eq!(ArgumentBlock::for_bytes(32_760), Some(ArgumentBlock::Large));
    assert_eq!(ArgumentBlock::for_bytes(32_761), None);
}

#[test]
fn a_stem_is_not_taken_for_the_prefix_of_another_word() {
    assert_eq!(stem_of_entry("fused_adam_f32"), Some("fused_adam"));
    assert_eq!(stem_of_entry("fused_adamax_f32"), None);
    assert_eq!(ptx("fused"), None);
}

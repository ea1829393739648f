use std::{collections::BTreeSet, fs, path::Path};

use fusestep_launch::ARGUMENT_BYTES_LARGE;

use super::*;

fn files_with_extension(folder: &Path, extension: &str) -> BTreeSet<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn every_source_has_its_ptx_and_both_are_embedded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let embedded: BTreeSet<String> = stems().map(str::to_owned).collect();
    assert_eq!(files_with_extension(root, "cu"), embedded);
    assert_eq!(files_with_extension(&root.join("ptx"), "ptx"), embedded);
    let embedded: BTreeSet<String> =
        headers().iter().map(|(name, _)| name.trim_end_matches(".cuh").to_owned()).collect();
    assert_eq!(files_with_extension(root, "cuh"), embedded);
}

/// The names of `formats` in the table of entries.
fn formats() -> Vec<&'static str> {
    let (_, table) = headers().iter().find(|(name, _)| *name == "entries.cuh").unwrap();
    let names =
        table.lines().filter_map(|line| line.strip_prefix("typedef storage::")?.rsplit_once(' '));
    names.map(|(_, name)| name.trim_end_matches(';')).collect()
}

/// The entries that a kernel should have, as name and bytes of arguments.
fn expected_entries(stem: &str) -> BTreeSet<(String, usize)> {
    let dtypes = ["f32", "f64", "f16", "bf16"];
    let table = |name: String| (name, TABLE_BYTES);
    match stem {
        "rank_order" => {
            let dtypes = dtypes.into_iter().chain(["i32", "i64", "u16", "u8"]);
            let names = dtypes.map(|dtype| (format!("{stem}_{dtype}"), 56));
            names.collect()
        }
        "accumulate" => dtypes.map(|dtype| (format!("{stem}_{dtype}"), 40)).into(),
        "amp" => {
            let norms = dtypes.map(|dtype| table(format!("amp_norm_{dtype}")));
            let finish = ("amp_finish".to_owned(), 104);
            let fold = ("amp_fold".to_owned(), 32);
            norms.into_iter().chain([finish, fold]).collect()
        }
        "tensor_sums" => [("fold", 40), ("place", 32_736)]
            .map(|(part, bytes)| (format!("{stem}_{part}"), bytes))
            .into(),
        "update_sums" => {
            let values = dtypes.into_iter().chain(["bf16_r16", "bf16_r8"]);
            let parts = values.flat_map(|value| [format!("keep_{value}"), value.to_owned()]);
            parts.map(|part| table(format!("{stem}_{part}"))).collect()
        }
        _ => {
            let parts: &[&str] = match stem {
                "lamb" | "lars_momentum" => &["_sums", "_update"],
                _ => &[""],
            };
            let updates = parts.iter().flat_map(|part| {
                // Schedule-Free keeps nothing that codes stand for.
                let has = |format: &&str| stem != "schedule_free" || !format.ends_with("_s8");
                let names = formats().into_iter().filter(has);
                names.map(move |format| table(format!("{stem}{part}_{format}")))
            });
            let of_step_scalars =
                ["f32", "f64"].map(|t| (format!("{stem}_sets_{t}"), STEP_SCALARS_ENTRY_BYTES));
            updates.chain(of_step_scalars).collect()
        }
    }
}

#[test]
fn the_ptx_has_every_entry_of_the_tables_and_no_other() {
    assert_eq!(formats().len(), 16);
    for stem in stems() {
        let expected = expected_entries(stem);
        let found: BTreeSet<&str> = entries(stem).unwrap().into_iter().collect();
        let names: BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, found, "{stem}: run `cargo xtask ptx`");
        for (name, bytes) in &expected {
            assert_eq!(stem_of_entry(name), Some(stem));
            let parameter = format!(".param .align 8 .b8 {name}_param_0[{bytes}]");
            assert!(ptx(stem).unwrap().contains(&parameter), "{parameter}");
        }
    }
}

#[test]
fn ptx_rounds_every_operation_once() {
    // `rcp.rn` is 1 / x, rounded once.
    let contracted = ["fma.", "mad.rn.f", ".approx", ".full.", ".ftz", "rsqrt"];
    for stem in stems() {
        let mut derives_step_scalars = false;
        for line in ptx(stem).unwrap().lines() {
            if line.contains(".entry ") {
                derives_step_scalars = line.contains("_sets_");
            }
            for word in contracted {
                // What the host computes with a fused operation, exactly and in f64.
                let is_of_step_scalars = derives_step_scalars && line.contains("fma.rn.f64");
                assert!(
                    is_of_step_scalars || !line.contains(word),
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
        assert!(text.contains("\n.version 8.1\n"), "{stem}: ISA version");
        assert!(text.contains("\n.target sm_70\n"), "{stem}: target");
    }
}

#[test]
fn every_entry_is_a_module_of_its_own() {
    for stem in stems() {
        let module = ptx(stem).unwrap();
        let declared = |text: &str| text.matches("\n.shared ").count();
        for entry in entries(stem).unwrap() {
            let text = entry_ptx(entry).unwrap();
            assert_eq!(text.matches(".entry").count(), 1, "{entry}");
            assert!(text.contains(&format!("\n.visible .entry {entry}(\n")));
            assert!(text.starts_with(".version 8.1\n.target sm_70\n.address_size 64\n"));
            assert_eq!(declared(&text), declared(module), "{entry}");
            let body = module.split(&format!(".entry {entry}(")).nth(1).unwrap();
            let body = body.split("\n}\n").next().unwrap();
            assert!(text.contains(body), "{entry}");
        }
    }
    assert_eq!(entry_ptx("fused_adam_f8"), None);
    assert_eq!(entry_ptx("adamw_f32"), None);
}

/// Every build carries the text, and every regeneration lands in the history.
#[test]
fn the_ptx_of_all_kernels_is_at_most_9_mb() {
    let bytes: usize = stems().map(|stem| ptx(stem).unwrap().len()).sum();
    assert!(bytes <= 9_000_000, "{bytes} bytes");
}

#[test]
fn argument_blocks_hold_every_table_that_fits_the_limits() {
    // Tables are made of parts of 8 bytes, so the largest within the limit is the limit rounded
    // down.
    assert_eq!(TABLE_BYTES, ARGUMENT_BYTES_LARGE / 8 * 8);
}

#[test]
fn a_stem_is_not_taken_for_the_prefix_of_another_word() {
    assert_eq!(stem_of_entry("fused_adam_f32"), Some("fused_adam"));
    assert_eq!(stem_of_entry("fused_adamax_f32"), None);
    assert_eq!(ptx("fused"), None);
}

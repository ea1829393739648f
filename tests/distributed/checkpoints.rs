//! Saved on some ranks, resumed on others; damage is named and changes nothing.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_checkpoint::{FolderLock, Manifest, load, save};
use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, PlanError, Run, RunToLoad, RunToSave, Topology, ZeroStage};
use fusestep_tensor::Role;
use xxhash_rust::xxh3::xxh3_64;

use crate::run::{Case, Mixed, whole_params};

/// Runs the steps `from..to` of a case; loads before if `from` is above 0, and saves after.
fn part(case: &Case, folder: &Path, from: u64, to: u64) -> Vec<Vec<u8>> {
    let outcomes = run_ranks(case.world, &Options::default(), |mut comm| {
        let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut comms = Comms::direct(&mut comm);
        let mut state = plan.allocate(&backend).unwrap();
        if from > 0 {
            let caller = load(RunToLoad::of(&plan, &mut state, &backend), folder).unwrap();
            assert_eq!(caller["at"], from.to_string());
        } else {
            for (param, desc) in plan.params().iter().enumerate() {
                state.write(&backend, Role::Param, &desc.name, &case.first_values(param)).unwrap();
            }
        }
        for step in from..to {
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for (param, desc) in plan.params().iter().enumerate() {
                // Equal gradients on all ranks, so that their mean does not depend on how many
                // there are.
                if !case.lacks_gradient(0, step, param) {
                    let bytes = case.gradient(0, step, param);
                    run.push_grad(&desc.name, &bytes).unwrap();
                }
            }
            run.step().unwrap();
        }
        let caller = BTreeMap::from([("at".to_owned(), to.to_string())]);
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder, caller).unwrap();
        whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    });
    let last = outcomes.unwrap().pop().unwrap();
    last.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[test]
fn a_run_saved_on_4_ranks_goes_on_exactly_on_1_2_4_and_5() {
    for mixed in [Mixed::No, Mixed::Yes] {
        let base = Case {
            world: 4,
            zero: ZeroStage::Two,
            mixed,
            clip: Some(1.0),
            scaled: Some(64.0),
            without_gradient: vec![(0, 1, 4)],
            ..Case::default()
        };
        let folder = tempfile::tempdir().unwrap();
        part(&base, folder.path(), 0, 2);
        for (world, zero) in [
            (1, ZeroStage::None),
            (2, ZeroStage::Three),
            (4, ZeroStage::Two),
            (4, ZeroStage::None),
            (5, ZeroStage::One),
        ] {
            let other = Case { world, zero, ..base.clone() };
            let whole = tempfile::tempdir().unwrap();
            // World sizes are powers of two but the last, whose mean of equal gradients may round.
            let copy = tempfile::tempdir().unwrap();
            copy_all(folder.path(), copy.path());
            let resumed = part(&other, copy.path(), 2, 4);
            if world != 5 {
                assert!(resumed == part(&other, whole.path(), 0, 4), "{world} {zero:?}");
            }
        }
    }
}

/// Copies what lies in a folder.
pub(crate) fn copy_all(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            fs::create_dir(&target).unwrap();
            copy_all(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn small(world: usize) -> Case {
    Case { numels: vec![40, 3, 0, 9], world, zero: ZeroStage::Two, steps: 1, ..Case::default() }
}

fn loaded(case: &Case, folder: &Path) -> Result<(), PlanError> {
    let topology = Topology::new(0, case.world).unwrap();
    let plan = case.planner().plan_for(&case.params(), topology).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    let before = format!("{:?}", state);
    let outcome = load(RunToLoad::of(&plan, &mut state, &backend), folder);
    if outcome.is_err() {
        assert_eq!(format!("{:?}", state), before, "a load that failed has changed the state");
    }
    outcome.map(drop)
}

#[test]
fn damage_is_refused_with_the_name_of_what_is_wrong() {
    let case = small(3);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    loaded(&case, folder.path()).unwrap();
    let manifest = Manifest::read(folder.path()).unwrap();
    let shard = folder.path().join(&manifest.generation).join("shard-00001.safetensors");
    let intact = fs::read(&shard).unwrap();
    let header = 8 + u64::from_le_bytes(intact[..8].try_into().unwrap()) as usize;
    assert!(header > 8 && header < intact.len());
    for length in (0..=header).chain([intact.len() / 2, intact.len() - 1]) {
        fs::write(&shard, &intact[..length]).unwrap();
        let error = loaded(&case, folder.path()).unwrap_err().to_string();
        assert!(error.contains("shard-00001") && error.contains("length"), "{error}");
    }
    for bit in (0..intact.len() * 8).step_by(37) {
        let mut damaged = intact.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        fs::write(&shard, damaged).unwrap();
        let error = loaded(&case, folder.path()).unwrap_err().to_string();
        assert!(error.contains("shard-00001") && error.contains("checksum"), "{error}");
    }
    let mut last = intact.clone();
    *last.last_mut().unwrap() ^= 1;
    fs::write(&shard, &last).unwrap();
    let error = loaded(&case, folder.path()).unwrap_err().to_string();
    assert!(error.contains('@'), "the tensor is named: {error}");
    fs::remove_file(&shard).unwrap();
    assert!(loaded(&case, folder.path()).unwrap_err().to_string().contains("shard-00001"));
    let foreign = tempfile::tempdir().unwrap();
    part(&case, foreign.path(), 0, 2);
    let other = Manifest::read(foreign.path()).unwrap();
    let other = foreign.path().join(&other.generation).join("shard-00001.safetensors");
    fs::copy(other, &shard).unwrap();
    let error = loaded(&case, folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("shard-00001") && error.contains("checksum"),
        "a shard of another run: {error}"
    );
    fs::write(&shard, &intact).unwrap();
    loaded(&case, folder.path()).unwrap();
}

#[test]
fn damaged_manifests_are_refused_with_the_name_of_what_is_wrong() {
    let case = small(3);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    let path = folder.path().join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    for length in 0..text.trim_end().len() {
        fs::write(&path, &text[..length]).unwrap();
        let error = loaded(&case, folder.path()).unwrap_err().to_string();
        assert!(error.contains("manifest"), "{length}: {error}");
    }
    // Any change of a value is known by the checksum.
    for (from, to) in [
        ("\"step\": 1", "\"step\": 2"),
        ("\"skipped\": 0", "\"skipped\": 1"),
        ("\"steps_of\": {}", "\"steps_of\": {\"layer0.weight0\": 0}"),
        ("\"at\": \"1\"", "\"at\": \"0\""),
        ("\"checkpoint\": \"", "\"checkpoint\": \"0"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replace(from, to)).unwrap();
        let error = loaded(&case, folder.path()).unwrap_err().to_string();
        assert!(error.contains("checksum"), "{to}: {error}");
    }
}

#[test]
fn manifests_without_a_checksum_are_held_to_what_can_be() {
    let case = small(3);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    let path = folder.path().join("manifest.json");
    let sum = Manifest::read(folder.path()).unwrap().xxh3;
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace("\"version\": 5", "\"version\": 1");
    fs::write(&path, &text).unwrap();
    let error = loaded(&case, folder.path()).unwrap_err().to_string();
    assert!(error.contains("checksum"), "{error}");
    let text = text.replace(&sum, "");
    fs::write(&path, &text).unwrap();
    loaded(&case, folder.path()).unwrap();
    for (from, to, named) in [
        ("\"version\": 1", "\"version\": 6", "newer fusestep"),
        ("\"step\": 1", "\"step\": 18446744073709551615", "9007199254740992 at most"),
        ("fusestep-checkpoint", "something-else", "format"),
        ("\"optimizer\": \"", "\"optimizer\": \"un", "optimizer"),
        ("shard-00001", "../shard-00001", "file name"),
        ("layer0.weight0@moment1", "layer9.weight0@moment1", "layer0.weight0@moment1"),
        ("\"steps_of\": {}", "\"steps_of\": {\"nobody\": 1}", "nobody"),
        ("\"steps_of\": {}", "\"steps_of\": {\"layer0.weight0\": 9}", "at most the 1"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replace(from, to)).unwrap();
        let error = loaded(&case, folder.path()).unwrap_err().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
    fs::remove_file(&path).unwrap();
    assert!(loaded(&case, folder.path()).unwrap_err().to_string().contains("manifest"));
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let case = small(2);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    for (numels, named) in [
        (vec![40, 4, 0, 9], ["layer0.weight1@moment1", "[3]", "layer0.weight1@param"]),
        (vec![40, 3, 0], ["layer1.weight3@moment1", "no such tensor", "2 others"]),
    ] {
        let other = Case { numels, ..case.clone() };
        let error = loaded(&other, folder.path()).unwrap_err().to_string();
        for part in named {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    let rule = fusestep_lion::Lion::default().into();
    let error = loaded(&Case { rule, ..case }, folder.path()).unwrap_err().to_string();
    assert!(error.contains("optimizer"), "{error}");
}

#[test]
fn resharded_checkpoints_hold_the_same_tensors() {
    let case = small(3);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    let manifest = Manifest::read(folder.path()).unwrap();
    let tensors = manifest.read_tensors(folder.path()).unwrap();
    for count in [1, 2, 7] {
        let other = tempfile::tempdir().unwrap();
        manifest.reshard(folder.path(), other.path(), count).unwrap();
        let again = Manifest::read(other.path()).unwrap();
        // The model's file beside them.
        assert_eq!(again.shards.len(), count + 1);
        assert_eq!(again.read_tensors(other.path()).unwrap(), tensors);
        loaded(&case, other.path()).unwrap();
    }
}

#[test]
fn the_old_checkpoint_is_kept_until_the_new_one_is_whole() {
    let case = small(2);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    let old = Manifest::read(folder.path()).unwrap();
    // What a killed run leaves behind: a marked generation without a manifest, on the list of those
    // that were begun. What others leave is not on it and stays.
    let (half, foreign) =
        (folder.path().join("step-00000002-a"), folder.path().join("step-00000009-a"));
    for half in [&half, &foreign] {
        fs::create_dir(half).unwrap();
        fs::write(half.join("shard-00007.safetensors"), b"half").unwrap();
    }
    fs::copy(folder.path().join(&old.generation).join("mark.json"), half.join("mark.json"))
        .unwrap();
    let list = |sum: &str| {
        let (id, name) = (&old.checkpoint, "step-00000002-a");
        let what = r#""format":"fusestep-generations","version":1"#;
        format!(r#"{{{what},"checkpoint":"{id}","generations":["{name}"],"xxh3":"{sum}"}}"#)
    };
    let list = list(&format!("{:016x}", xxh3_64(list("").as_bytes())));
    fs::write(folder.path().join(".fusestep-generations"), list).unwrap();
    assert_eq!(Manifest::read(folder.path()).unwrap(), old);
    loaded(&case, folder.path()).unwrap();
    part(&case, folder.path(), 1, 2);
    let new = Manifest::read(folder.path()).unwrap();
    assert_eq!((new.step, new.generation.as_str()), (2, "step-00000002-a"));
    assert!(
        !half.join("shard-00007.safetensors").exists()
            && foreign.join("shard-00007.safetensors").exists()
    );
    assert!(!folder.path().join(&old.generation).exists(), "the old one is gone");
    loaded(&case, folder.path()).unwrap();
}

#[test]
fn saving_twice_at_one_step_never_writes_over_the_files_that_count() {
    let case = small(2);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    let first = Manifest::read(folder.path()).unwrap();
    // No step in between, and other ranks: the pieces differ, so one file of each kind would be a
    // mixture.
    part(&Case { world: 3, ..case.clone() }, folder.path(), 1, 1);
    let second = Manifest::read(folder.path()).unwrap();
    assert_eq!(first.step, second.step);
    assert_ne!(first.generation, second.generation);
    part(&case, folder.path(), 1, 1);
    assert_eq!(Manifest::read(folder.path()).unwrap().generation, first.generation);
    loaded(&case, folder.path()).unwrap();
}

#[test]
fn a_manifest_cannot_ask_for_more_memory_than_its_files() {
    let case = small(2);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    let mut manifest = Manifest::read(folder.path()).unwrap();
    for spec in manifest.tensors.values_mut() {
        spec.shape = fusestep_tensor::Shape::new([1 << 50]).unwrap();
    }
    let error = manifest.read_tensors(folder.path()).unwrap_err().to_string();
    assert!(error.contains("at most the"), "{error}");
}

#[test]
fn a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_old_checkpoint() {
    let case = small(2);
    let folder = tempfile::tempdir().unwrap();
    part(&case, folder.path(), 0, 1);
    let old = Manifest::read(folder.path()).unwrap();
    // Files where the next generation's folder would be: nobody can write there, not even root.
    for turn in ["step-00000002-a", "step-00000002-b"] {
        fs::write(folder.path().join(turn), b"in the way").unwrap();
    }
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut comms = Comms::direct(&mut comm);
        let mut state = plan.allocate(&backend).unwrap();
        load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
        let bytes = case.gradient(0, 1, 0);
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        run.push_grad("layer0.weight0", &bytes).unwrap();
        run.step().unwrap();
        let saved = save(
            RunToSave::of(&plan, &state, &backend),
            &mut comms,
            folder.path(),
            BTreeMap::new(),
        );
        saved.unwrap_err().to_string()
    });
    let errors: Vec<String> = outcomes.unwrap().into_iter().map(|error| error.unwrap()).collect();
    assert!(errors[0].contains("step-00000002-a and step-00000002-b"), "{}", errors[0]);
    assert_eq!(errors[1], format!("rank 0: {}", errors[0]));
    assert_eq!(Manifest::read(folder.path()).unwrap(), old);
    loaded(&case, folder.path()).unwrap();
}

#[test]
fn two_runs_cannot_save_into_one_folder() {
    let folder = tempfile::tempdir().unwrap();
    let lock = FolderLock::take(folder.path()).unwrap();
    let error = FolderLock::take(folder.path()).unwrap_err().to_string();
    assert!(error.contains("another run"), "{error}");
    drop(lock);
    FolderLock::take(folder.path()).unwrap();
    let error = FolderLock::take(&folder.path().join("none")).unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
}

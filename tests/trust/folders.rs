//! Checkpoint folders beside files of others, under faults, and on ranks that do not share a file
//! system.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_checkpoint::{CheckpointFolder, Manifest, Saves, load, save};
use fusestep_collective::{Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{
    Comms, Plan, PlanError, Planner, Run, RunToLoad, RunToSave, Shard, State, Topology, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use fusestep_tensor_file::{Files, TensorFile, serialize};
use fusestep_testkit::{Fault, SimulatedDisk};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) const FOLDER: &str = "/run/checkpoint";

/// Whole slots, of which two ranks have half each.
const PARAMS: [(&str, u64); 2] = [("a", 128), ("b", 64)];

fn plan(topology: Topology) -> Plan {
    let params =
        PARAMS.map(|(name, numel)| ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::F32));
    let planner = Planner::new(Adam::default().into()).with(Shard::new(ZeroStage::One));
    planner.plan_for(&params, topology).unwrap()
}

/// One rank that has made so many steps.
struct Trained {
    plan: Plan,
    state: State,
    backend: CpuBackend,
}

impl Trained {
    fn new(topology: Topology) -> Self {
        let plan = plan(topology);
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let state = plan.allocate(&backend).unwrap();
        Self { plan, state, backend }
    }

    fn step(&mut self, comms: &mut Comms<'_>) {
        let mut run = Run::of(&self.plan, &mut self.state, &self.backend, comms);
        for (name, numel) in PARAMS {
            let bytes: Vec<u8> =
                (0..numel).flat_map(|at| (at as f32 - 2.5).to_le_bytes()).collect();
            run.push_grad(name, &bytes).unwrap();
        }
        run.step().unwrap();
    }

    fn save(&self, comms: &mut Comms<'_>, folder: CheckpointFolder<'_>) -> Result<(), PlanError> {
        save(RunToSave::of(&self.plan, &self.state, &self.backend), comms, folder, BTreeMap::new())
    }

    fn value(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4 * PARAMS[0].1 as usize];
        self.state.read(&self.backend, Role::Param, "a", &mut bytes).unwrap();
        bytes
    }
}

/// Two ranks make one more step than the checkpoint has and save; each rank's outcome.
pub(crate) fn step_and_save(folder: CheckpointFolder<'_>) -> Vec<Result<(), String>> {
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let mut run = Trained::new(Topology::of(&comm));
        let mut comms = Comms::direct(&mut comm);
        if Manifest::read_if_any(folder).map_err(|error| error.to_string())?.is_some() {
            load(RunToLoad::of(&run.plan, &mut run.state, &run.backend), folder)
                .map_err(|error| error.to_string())?;
        }
        run.step(&mut comms);
        run.save(&mut comms, folder).map_err(|error| error.to_string())
    });
    outcomes.unwrap().into_iter().map(|outcome| outcome.unwrap()).collect()
}

/// The step that the checkpoint has, which must be whole, and the values there; 0 without one.
pub(crate) fn held(folder: CheckpointFolder<'_>) -> (u64, Vec<u8>) {
    if Manifest::read_if_any(folder).unwrap().is_none() {
        return (0, Vec::new());
    }
    loaded(folder).unwrap()
}

pub(crate) fn loaded(folder: CheckpointFolder<'_>) -> Result<(u64, Vec<u8>), PlanError> {
    let mut run = Trained::new(Topology::new(0, 1).unwrap());
    load(RunToLoad::of(&run.plan, &mut run.state, &run.backend), folder)?;
    Ok((run.state.step(), run.value()))
}

/// Makes a manifest that was changed one with a right checksum, in its folder.
pub(crate) fn sign(mut manifest: Manifest, folder: &Path) {
    manifest.xxh3 = String::new();
    let sum = xxh3_64(&serde_json::to_vec(&manifest).unwrap());
    manifest.xxh3 = format!("{sum:016x}");
    let text = serde_json::to_vec_pretty(&manifest).unwrap();
    fs::write(folder.join("manifest.json"), text).unwrap();
}

pub(crate) fn expect_saved(outcomes: Vec<Result<(), String>>) {
    for outcome in outcomes {
        outcome.unwrap();
    }
}

#[test]
fn nothing_of_others_is_written_over_or_removed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let strangers = [
        "step-1000/mine",
        "step-by-step-notes/a",
        "step-00000002-a/mine",
        "notes.txt",
        "shard-00000.safetensors",
        "step-00000009-a/shard-00000.safetensors",
    ];
    for name in strangers {
        fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        fs::write(at(name), name).unwrap();
    }
    expect_saved(step_and_save(folder.path().into()));
    // A generation of another checkpoint, where the third save would go.
    let other = tempfile::tempdir().unwrap();
    expect_saved(step_and_save(other.path().into()));
    let theirs = "step-00000003-a";
    fs::rename(other.path().join("step-00000001-a"), at(theirs)).unwrap();
    let bytes = || fs::read(at(theirs).join("shard-00001.safetensors")).unwrap();
    let before = bytes();
    for _ in 0..2 {
        expect_saved(step_and_save(folder.path().into()));
    }
    for name in strangers {
        assert_eq!(fs::read_to_string(at(name)).unwrap(), name);
    }
    assert_eq!(bytes(), before);
    assert_eq!(Manifest::read(folder.path()).unwrap().generation, "step-00000003-b");
    // One that a stranger has put into a generation stays as well, and so does the way to save.
    let generation = Manifest::read(folder.path()).unwrap().generation;
    fs::write(at(&generation).join("mine"), "x").unwrap();
    for _ in 0..2 {
        expect_saved(step_and_save(folder.path().into()));
    }
    assert_eq!(fs::read_to_string(at(&generation).join("mine")).unwrap(), "x");
    assert!(!at(&generation).join("shard-00000.safetensors").exists());
    assert_eq!(held(folder.path().into()).0, 5);
}

#[test]
fn another_programs_or_a_damaged_manifest_is_not_replaced() {
    for text in ["{}", "{\"weights\": 3}", "not JSON", "{\"format\": \"pt\", \"version\": 1}"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manifest.json");
        fs::write(&path, text).unwrap();
        let outcomes = run_ranks(2, &Options::default(), |mut comm| {
            let mut run = Trained::new(Topology::of(&comm));
            let mut comms = Comms::direct(&mut comm);
            run.step(&mut comms);
            run.save(&mut comms, folder.path().into()).unwrap_err().to_string()
        });
        for (rank, error) in outcomes.unwrap().into_iter().enumerate() {
            let error = error.unwrap();
            assert!(error.contains("manifest.json"), "{error}");
            assert_eq!(error.starts_with("rank 0: "), rank > 0, "{error}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

#[test]
fn ranks_that_do_not_see_one_folder_are_told_so() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let topology = Topology::of(&comm);
        let mut run = Trained::new(topology);
        let mut comms = Comms::direct(&mut comm);
        run.step(&mut comms);
        run.save(&mut comms, folders[topology.rank].path().into()).unwrap_err().to_string()
    });
    for (rank, error) in outcomes.unwrap().into_iter().enumerate() {
        let error = error.unwrap();
        assert!(error.contains("file system that they share"), "{error}");
        assert_eq!(error.starts_with("rank 1: "), rank == 0, "{error}");
    }
    assert!(Manifest::read_if_any(folders[0].path()).unwrap().is_none());
}

/// As `train` saves: the error comes at the end of the save, on every rank, and nothing counts.
#[test]
fn ranks_that_do_not_see_one_folder_are_told_so_behind_training() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let topology = Topology::of(&comm);
        let mut run = Trained::new(topology);
        let mut comms = Comms::direct(&mut comm);
        run.step(&mut comms);
        let (mut saves, own) = (Saves::new(), folders[topology.rank].path());
        let to_save = RunToSave::of(&run.plan, &run.state, &run.backend);
        let begun = saves.begin(to_save, &mut comms, own, BTreeMap::new());
        begun.unwrap();
        let error = saves.finish(&mut comms).unwrap_err();
        assert!(!saves.in_flight());
        error.to_string()
    });
    for (rank, error) in outcomes.unwrap().into_iter().enumerate() {
        let error = error.unwrap();
        assert!(error.contains("file system that they share"), "{error}");
        assert_eq!(error.starts_with("rank 1: "), rank == 0, "{error}");
    }
    for folder in &folders {
        assert!(Manifest::read_if_any(folder.path()).unwrap().is_none());
    }
}

#[test]
fn overlapping_ranges_with_a_hole_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    expect_saved(step_and_save(folder.path().into()));
    let manifest = Manifest::read(folder.path()).unwrap();
    // The model's file is the first.
    let path =
        |shard: usize| folder.path().join(&manifest.generation).join(&manifest.shards[shard].file);
    let length = |shard: usize| {
        let file = TensorFile::read(&path(shard)).unwrap();
        file.entries().values().map(|entry| entry.shape.numel()).sum::<u64>()
    };
    assert_eq!(length(1), length(2));
    let mut short = manifest.clone();
    let mut copied = manifest.clone();
    copied.shards[2] = manifest.shards[1].clone();
    copied.shards[2].file = manifest.shards[2].file.clone();
    // The second file becomes a copy of the first one's ranges: as many elements in all, some twice
    // and some never.
    let second = TensorFile::read(&path(2)).unwrap();
    fs::copy(path(1), path(2)).unwrap();
    let error = copied.read_tensors(folder.path()).unwrap_err().to_string();
    assert!(error.contains("once") || error.contains("in all shards"), "{error}");
    assert!(error.contains('@'), "the tensor is named: {error}");
    // The second file without its last range: nothing is twice, but a tensor's end is missing.
    let entries = second.entries().iter();
    let left: Vec<_> = entries
        .filter(|(name, _)| *name != "b@moment1")
        .map(|(name, entry)| (name.clone(), entry.with_bytes(second.bytes(name).unwrap())))
        .collect();
    let bytes = serialize(&path(2), &left, second.metadata().clone()).unwrap();
    fs::write(path(2), &bytes).unwrap();
    short.shards[2].len_bytes = bytes.len() as u64;
    short.shards[2].xxh3 = format!("{:016x}", xxh3_64(&bytes));
    let error = short.read_tensors(folder.path()).unwrap_err().to_string();
    assert!(error.contains("b@moment1") && error.contains("in all shards"), "{error}");
}

#[test]
fn the_first_save_is_there_after_a_loss_of_power_in_folders_that_it_made() {
    // Also if a process has made them that died before it could do anything else.
    for (seed, are_made) in (0..40).flat_map(|seed| [(seed, false), (seed, true)]) {
        let disk = SimulatedDisk::new(seed, []);
        if are_made {
            disk.create_folder(Path::new(FOLDER)).unwrap();
        }
        let folder = CheckpointFolder::of(&disk, Path::new(FOLDER));
        expect_saved(step_and_save(folder));
        disk.add_fault(disk.calls(), Fault::PowerLoss);
        let _ = disk.list(Path::new(FOLDER));
        disk.restart();
        assert_eq!(held(folder).0, 1, "seed {seed}, {are_made}");
    }
}

#[test]
fn a_save_cut_off_or_refused_anywhere_keeps_the_old_checkpoint_or_has_made_the_new_one() {
    let (mut old, mut new, mut refused) = (0, 0, 0);
    for fault in [Fault::PowerLoss, Fault::Error, Fault::Full] {
        for seed in 0..40u64 {
            for at in 0..60 {
                let disk = SimulatedDisk::new(seed, []);
                disk.create_folder(Path::new("/run")).unwrap();
                disk.sync_folder(Path::new("/")).unwrap();
                let folder = CheckpointFolder::of(&disk, Path::new(FOLDER));
                expect_saved(step_and_save(folder));
                let first = held(folder);
                let calls = disk.calls();
                disk.add_fault(calls + at, fault);
                let outcomes = step_and_save(folder);
                if disk.calls() <= calls + at {
                    break;
                }
                if fault == Fault::PowerLoss {
                    disk.restart();
                }
                disk.make_room();
                let found = held(folder);
                assert!(
                    (1..=2).contains(&found.0),
                    "{fault:?} at {at}, seed {seed}: step {}",
                    found.0
                );
                if found.0 == 1 {
                    assert_eq!(found, first);
                }
                let all_saved = outcomes.iter().all(Result::is_ok);
                assert!(
                    !all_saved || found.0 == 2,
                    "{fault:?} at {at}, seed {seed}: an acknowledged save is lost"
                );
                old += usize::from(found.0 == 1);
                new += usize::from(found.0 == 2);
                refused += usize::from(!all_saved);
                // Whatever was left behind, the run goes on and saves.
                expect_saved(step_and_save(folder));
                assert_eq!(held(folder).0, found.0 + 1);
                if fault != Fault::Error {
                    break_if_leaking(&disk);
                }
            }
        }
    }
    assert!(old > 100 && new > 100 && refused > 100, "{old} old, {new} new, {refused} refused");
}

/// Saves of one step take turns in two folders, so what the save before has left undone decides
/// what the next one writes over.
#[test]
fn saves_of_one_step_never_write_over_what_a_loss_of_power_brings_back() {
    let (mut brought_back, mut cut_off) = (0, 0);
    for fault in [Fault::Error, Fault::PowerLoss] {
        for (at, power) in (0..40).flat_map(|at| (0..40).map(move |power| (at, power))) {
            let disk = SimulatedDisk::new(at * 40 + power, []);
            disk.create_folder(Path::new("/run")).unwrap();
            disk.sync_folder(Path::new("/")).unwrap();
            let folder = CheckpointFolder::of(&disk, Path::new(FOLDER));
            let mut run = Trained::new(Topology::new(0, 1).unwrap());
            let mut rank = Solo::default();
            run.step(&mut Comms::direct(&mut rank));
            let save = || run.save(&mut Comms::direct(&mut Solo::default()), folder);
            save().unwrap();
            let first = held(folder);
            disk.add_fault(disk.calls() + at, fault);
            cut_off += usize::from(save().is_err());
            if fault == Fault::PowerLoss {
                // If it is through already, the power fails with whatever is next.
                let _ = disk.sync_folder(Path::new("/"));
                disk.restart();
            }
            disk.clear_faults();
            disk.add_fault(disk.calls() + power, Fault::PowerLoss);
            let generation = |folder| Manifest::read(folder).unwrap().generation;
            let before = generation(folder);
            let saved = save();
            assert!(saved.is_ok() || disk.is_dead(), "{fault:?} at {at}: {saved:?}");
            disk.restart();
            disk.clear_faults();
            assert_eq!(held(folder), first, "{fault:?} at {at}, power at {power}");
            brought_back += usize::from(saved.is_err() && generation(folder) != before);
            save().unwrap();
            assert_eq!(held(folder), first, "{fault:?} at {at}, power at {power}");
        }
    }
    assert!(cut_off > 100 && brought_back > 10, "{cut_off} cut off, {brought_back} brought back");
}

/// One generation of two shards and a mark, and a manifest; parts of a save that was cut off are
/// gone with its generation.
fn break_if_leaking(disk: &SimulatedDisk) {
    let files = disk.files();
    let generations = files.iter().filter(|path| path.ends_with("mark.json")).count();
    assert!(generations <= 2, "{files:?}");
}

//! File systems in which something happens meanwhile: a run saves while another reads, or a rank
//! does not see another's file.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use fusestep_checkpoint::{CheckpointFolder, Manifest, load, save};
use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{Comms, LocalSgd, Planner, Run, RunToLoad, RunToSave, Topology};
use fusestep_tensor::{DType, ParamDesc, Shape};
use fusestep_tensor_file::{FileKind, Files, Lock, Look};
use fusestep_testkit::SimulatedDisk;

use super::folders::{FOLDER, expect_saved, step_and_save};

/// A disk as someone sees it who is not alone.
#[derive(Debug)]
struct Shared<'a> {
    disk: &'a SimulatedDisk,
    /// How often another run saves just before a shard is read, and how.
    saves: AtomicUsize,
    save: fn(CheckpointFolder<'_>) -> Vec<Result<(), String>>,
    /// Files that are not seen, by how their names end.
    hidden: &'static str,
}

impl Shared<'_> {
    fn takes_one(&self) -> bool {
        let left = |saves: usize| saves.checked_sub(1);
        let taken = self.saves.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left);
        taken.is_ok()
    }

    fn hides(&self, path: &Path) -> bool {
        !self.hidden.is_empty() && path.to_string_lossy().ends_with(self.hidden)
    }
}

impl Files for Shared<'_> {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let shard = path.extension().is_some_and(|name| name == "safetensors");
        if shard && self.takes_one() {
            expect_saved((self.save)(CheckpointFolder::of(self.disk, Path::new(FOLDER))));
        }
        self.disk.read(path)
    }
    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        if self.hides(path) {
            return Err(ErrorKind::NotFound.into());
        }
        self.disk.kind(path)
    }
    fn look(&self, path: &Path) -> io::Result<Look> {
        self.disk.look(path)
    }
    fn lock(&self, path: &Path) -> io::Result<Lock> {
        self.disk.lock(path)
    }
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.disk.write_new(path, bytes)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.link(from, to)
    }
    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.disk.sync_folder(path)
    }
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.disk.create_folder(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.disk.list(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_file(path)
    }
    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_folder(path)
    }
}

#[test]
fn a_reader_begins_again_when_a_run_has_saved() {
    for saves in [0, 1, 2, 5] {
        let disk = SimulatedDisk::new(1, []);
        expect_saved(step_and_save(CheckpointFolder::of(&disk, Path::new(FOLDER))));
        let shared =
            Shared { disk: &disk, saves: AtomicUsize::new(saves), save: step_and_save, hidden: "" };
        let folder = CheckpointFolder::of(&shared, Path::new(FOLDER));
        let (manifest, _) = Manifest::read_whole(folder).unwrap();
        assert_eq!(shared.saves.load(Ordering::SeqCst), 0);
        assert!(manifest.step >= 1 && manifest.step <= 1 + saves as u64);
        assert_eq!(saves == 0, manifest.step == 1);
    }
}

/// Two ranks with parameters of their own make one more step than the checkpoint has and save.
fn step_apart_and_save(folder: CheckpointFolder<'_>) -> Vec<Result<(), String>> {
    let params = [ParamDesc::new("a", Shape::new([8]).unwrap(), DType::F32)];
    let seldom = LocalSgd::every(NonZeroU64::new(100).unwrap());
    let planner = Planner::new(Adam::default().into()).with(seldom);
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let plan = planner.plan_for(&params, Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        let mut comms = Comms::direct(&mut comm);
        if Manifest::read_if_any(folder).unwrap().is_some() {
            load(RunToLoad::of(&plan, &mut state, &backend), folder).unwrap();
        }
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        run.push_grad("a", &[1; 32]).unwrap();
        run.step().unwrap();
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder, BTreeMap::new())
            .map_err(|error| error.to_string())
    });
    let outcomes = outcomes.unwrap().into_iter();
    outcomes.map(|outcome| outcome.unwrap()).collect()
}

#[test]
fn resharding_begins_again_when_a_run_has_saved() {
    for (average, save) in
        [(false, step_and_save as fn(CheckpointFolder<'_>) -> _), (true, step_apart_and_save)]
    {
        for saves in [0, 1, 3] {
            let disk = SimulatedDisk::new(1, []);
            expect_saved(save(CheckpointFolder::of(&disk, Path::new(FOLDER))));
            let shared = Shared { disk: &disk, saves: AtomicUsize::new(saves), save, hidden: "" };
            let from = CheckpointFolder::of(&shared, Path::new(FOLDER));
            let to = CheckpointFolder::of(&disk, Path::new("/run/out"));
            let read = Manifest::read(from).unwrap();
            let written = if average {
                read.average(from, to, 3).unwrap()
            } else {
                read.reshard(from, to, 3).unwrap()
            };
            assert_eq!(shared.saves.load(Ordering::SeqCst), 0);
            assert_eq!(saves == 0, written.step == 1, "step {}", written.step);
            assert_eq!(Manifest::read_whole(to).unwrap().0, written);
        }
    }
}

#[test]
fn a_save_whose_files_rank_0_does_not_see_is_refused_and_the_old_one_kept() {
    let disk = SimulatedDisk::new(1, []);
    let folder = CheckpointFolder::of(&disk, Path::new(FOLDER));
    expect_saved(step_and_save(folder));
    let old = Manifest::read(folder).unwrap();
    let shared = Shared {
        disk: &disk,
        saves: AtomicUsize::new(0),
        save: step_and_save,
        hidden: "step-00000002-a/shard-00001.safetensors",
    };
    for outcome in step_and_save(CheckpointFolder::of(&shared, Path::new(FOLDER))) {
        let error = outcome.unwrap_err();
        assert!(error.contains("shard-00001.safetensors"), "{error}");
    }
    assert_eq!(Manifest::read(folder).unwrap(), old);
    expect_saved(step_and_save(folder));
}

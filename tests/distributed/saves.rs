//! Saves behind training: what they hold, when they count, and whom they tell of an error.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use fusestep_checkpoint::{
    CheckpointFolder, Checkpoints, Manifest, Saved, Saves, WholeTensors, save,
};
use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{
    Comms, Plan, PlanError, Run, RunToLoad, RunToSave, State, Topology, ZeroStage,
};
use fusestep_tensor::Role;
use fusestep_tensor_file::{Disk, FileKind, Files, Lock, Look};

use crate::run::{Case, Mixed, whole_params};

/// One rank of a case, on its way.
struct Rank<'a> {
    case: &'a Case,
    plan: Plan,
    backend: CpuBackend,
    state: State,
    comms: Comms<'a>,
    steps: u64,
}

impl<'a> Rank<'a> {
    fn new(case: &'a Case, comm: &'a mut dyn Communicator) -> Self {
        let topology = Topology::of(comm);
        let plan = case.planner().plan_for(&case.params(), topology).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            let first = case.first_values(param);
            state.write(&backend, Role::Param, &desc.name, &first).unwrap();
        }
        Self { case, plan, backend, state, comms: Comms::direct(comm), steps: 0 }
    }

    fn run(&mut self) -> Run<'_, 'a> {
        Run::of(&self.plan, &mut self.state, &self.backend, &mut self.comms)
    }

    /// One micro-step with gradients of this rank's own.
    fn step(&mut self) {
        let rank = self.comms.communicator().rank();
        let (case, step) = (self.case, self.steps);
        let mut run = self.run();
        for (param, desc) in run.plan().params().iter().enumerate() {
            run.push_grad(&desc.name, &case.gradient(rank, step, param)).unwrap();
        }
        run.step().unwrap();
        self.steps += 1;
    }

    fn save<'f>(&mut self, folder: impl Into<CheckpointFolder<'f>>) -> Result<(), PlanError> {
        let caller = texts(self.steps);
        save(RunToSave::of(&self.plan, &self.state, &self.backend), &mut self.comms, folder, caller)
    }

    fn begin(&mut self, saves: &mut Saves, folder: &Path) -> Result<(), PlanError> {
        let caller = texts(self.steps);
        let run = RunToSave::of(&self.plan, &self.state, &self.backend);
        saves.begin(run, &mut self.comms, folder, caller)
    }

    /// Begins a save whose caller has done seven steps.
    fn checkpoints(
        &mut self,
        checkpoints: &mut Checkpoints,
        folder: &Path,
    ) -> Result<(), PlanError> {
        let run = RunToSave::of(&self.plan, &self.state, &self.backend);
        checkpoints.begin(run, &mut self.comms, folder, 7)
    }

    fn resume(
        &mut self,
        checkpoints: &mut Checkpoints,
        folder: &Path,
    ) -> Result<Option<usize>, PlanError> {
        let run = RunToLoad::of(&self.plan, &mut self.state, &self.backend);
        checkpoints.resume(run, &mut self.comms, folder)
    }

    fn params(&mut self) -> Vec<Vec<u8>> {
        whole_params(&mut self.run())
    }

    fn poll(&mut self, saves: &mut Saves) -> Result<Option<Saved>, PlanError> {
        saves.poll(&mut self.comms)
    }

    fn finish(&mut self, saves: &mut Saves) -> Result<Option<Saved>, PlanError> {
        saves.finish(&mut self.comms)
    }
}

fn texts(steps: u64) -> BTreeMap<String, String> {
    BTreeMap::from([("at".to_owned(), steps.to_string())])
}

/// Runs `body` on every rank of a case.
fn on_ranks<R: Send>(case: &Case, body: impl Fn(usize, Rank<'_>) -> R + Sync) -> Vec<R> {
    let outcomes = run_ranks(case.world, &Options::default(), |mut comm| {
        let rank = Topology::of(&comm).rank;
        body(rank, Rank::new(case, &mut comm))
    });
    let outcomes = outcomes.unwrap().into_iter();
    outcomes
        .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}

fn small(world: usize, zero: ZeroStage) -> Case {
    Case { numels: vec![400, 3, 0, 90], mixed: Mixed::Yes, world, zero, ..Case::default() }
}

/// The tensors and the caller's texts of a checkpoint.
fn read<'f>(folder: impl Into<CheckpointFolder<'f>>) -> (WholeTensors, BTreeMap<String, String>) {
    let (manifest, whole) = Manifest::read_whole(folder).unwrap();
    (whole, manifest.caller)
}

#[test]
fn a_save_behind_holds_what_was_there_when_it_was_begun() {
    for (world, zero, merge) in [
        (1, ZeroStage::None, 1),
        (2, ZeroStage::None, 1),
        (2, ZeroStage::One, 2),
        (4, ZeroStage::Two, 2),
        (4, ZeroStage::Three, 1),
    ] {
        let case = Case { merge, ..small(world, zero) };
        let (line, behind) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let saved = on_ranks(&case, |_, mut rank| {
            let mut saves = Saves::new();
            for _ in 0..3 {
                rank.step();
            }
            rank.save(line.path()).unwrap();
            rank.begin(&mut saves, behind.path()).unwrap();
            let mut seen = None;
            for _ in 0..4 {
                seen = seen.or(rank.poll(&mut saves).unwrap());
                rank.step();
            }
            let seen = seen.or(rank.finish(&mut saves).unwrap());
            assert!(!saves.in_flight());
            seen.map(|saved| saved.step)
        });
        // In a merge window of two, three micro-steps are one update and a half.
        let updates = 3 / u64::from(merge);
        assert_eq!(saved, vec![Some(updates); world]);
        assert_eq!(read(line.path()), read(behind.path()), "{world} {zero:?} {merge}");
    }
}

#[test]
fn the_checkpoint_before_counts_until_a_save_is_complete_and_one_is_in_flight() {
    for world in [1, 2, 4] {
        let case = small(world, ZeroStage::Two);
        let (folder, line) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = || read(folder.path()).1["at"].clone();
        on_ranks(&case, |_, mut rank| {
            // Every part waits for its third look.
            let disk: Arc<dyn Files> = Arc::new(Disk);
            let mut saves = Saves::in_turns(disk, 3);
            rank.step();
            rank.save(folder.path()).unwrap();
            rank.step();
            rank.begin(&mut saves, folder.path()).unwrap();
            assert_eq!(rank.poll(&mut saves).unwrap(), None);
            assert_eq!(at(), "1");
            rank.step();
            // The next one completes the one before, and is copied to the same memory.
            rank.begin(&mut saves, folder.path()).unwrap();
            assert_eq!(at(), "2");
            rank.save(line.path()).unwrap();
            rank.step();
            let mut looks = 0;
            while rank.poll(&mut saves).unwrap().is_none() {
                looks += 1;
                assert!(looks < 20, "a save that does not end");
            }
            assert!(looks >= 2, "{looks}");
            assert_eq!(read(folder.path()), read(line.path()));
            assert_eq!(at(), "3");
            assert_eq!(rank.poll(&mut saves).unwrap(), None);
        });
    }
}

/// The machine's disk, but for one write that fails.
#[derive(Debug)]
struct OneFails {
    /// Writes before it; below 0 it is over.
    left: AtomicI64,
}

impl OneFails {
    fn never() -> Arc<Self> {
        let left = AtomicI64::new(-1);
        Arc::new(Self { left })
    }

    fn after(&self, writes: i64) {
        self.left.store(writes, Ordering::SeqCst);
    }
}

impl Files for OneFails {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        Disk.read(path)
    }
    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        Disk.kind(path)
    }
    fn look(&self, path: &Path) -> io::Result<Look> {
        Disk.look(path)
    }
    fn lock(&self, path: &Path) -> io::Result<Lock> {
        Disk.lock(path)
    }
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        match self.left.fetch_sub(1, Ordering::SeqCst) {
            0 => Err(io::Error::other("a disk that is full")),
            _ => Disk.write_new(path, bytes),
        }
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.link(from, to)
    }
    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        Disk.sync_folder(path)
    }
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        Disk.create_folder(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        Disk.list(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        Disk.remove_file(path)
    }
    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        Disk.remove_folder(path)
    }
}

#[test]
fn an_error_behind_comes_on_all_ranks_in_one_call_and_costs_nothing_else() {
    // Rank 0 writes list, mark, model, shard and manifest; the others a shard.
    let of_rank_0 = (0..5).flat_map(|write| [(1, 0, write), (2, 0, write)]);
    for (world, culprit, write) in of_rank_0.chain([(2, 1, 0), (4, 3, 0)]) {
        let case = small(world, ZeroStage::One);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let at = || read(path).1["at"].clone();
        on_ranks(&case, |own, mut rank| {
            let files = OneFails::never();
            let mut saves = Saves::in_turns(files.clone(), 1);
            rank.step();
            rank.begin(&mut saves, path).unwrap();
            rank.finish(&mut saves).unwrap().unwrap();
            rank.step();
            if own == culprit {
                files.after(write);
            }
            rank.begin(&mut saves, path).unwrap();
            let mut calls = 0;
            let error = loop {
                match rank.poll(&mut saves) {
                    Ok(None) => calls += 1,
                    Ok(saved) => panic!("{saved:?}"),
                    Err(error) => break error,
                }
                assert!(calls < 9, "no error");
            };
            assert!(error.to_string().contains("a disk that is full"), "{error}");
            let of_another = matches!(error, PlanError::OtherRank { rank, .. } if rank == culprit);
            assert_eq!(of_another, own != culprit, "{error}");
            assert!(!saves.in_flight());
            assert_eq!(at(), "1");
            // Nothing is lost: training goes on, and so do saves.
            rank.step();
            rank.begin(&mut saves, path).unwrap();
            rank.finish(&mut saves).unwrap().unwrap();
            assert_eq!(at(), "3");
        });
    }
}

/// Looks whether the checkpoint's model is these parameters, with a reader that is none of ours.
fn check_model(case: &Case, folder: &Path, params: &[Vec<u8>]) {
    let generation = Manifest::read(folder).unwrap().generation;
    let bytes = std::fs::read(folder.join(generation).join("model.safetensors")).unwrap();
    let model = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(model.len(), case.params().len());
    for (desc, expected) in case.params().iter().zip(params) {
        let found = model.tensor(&desc.name).unwrap();
        assert_eq!(found.data(), expected);
        let dims: Vec<u64> = found.shape().iter().map(|&dim| dim as u64).collect();
        assert_eq!(dims, desc.shape.dims());
    }
}

#[test]
fn the_model_is_a_plain_file_of_whole_parameters() {
    for (world, zero) in
        [(1, ZeroStage::None), (2, ZeroStage::One), (4, ZeroStage::Two), (2, ZeroStage::Three)]
    {
        let case = small(world, zero);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let params = on_ranks(&case, |_, mut rank| {
            rank.step();
            rank.save(path).unwrap();
            rank.params()
        });
        if zero != ZeroStage::Three {
            check_model(&case, path, &params[0]);
            continue;
        }
        // No rank has whole parameters there; who has all files writes them whole.
        let manifest = Manifest::read(path).unwrap();
        let model = path.join(&manifest.generation).join("model.safetensors");
        assert!(!model.exists());
        let again = tempfile::tempdir().unwrap();
        manifest.reshard(path, again.path(), 1).unwrap();
        check_model(&case, again.path(), &params[0]);
    }
}

#[test]
fn ranks_go_on_from_one_checkpoint_or_none_of_them_does() {
    let case = small(2, ZeroStage::One);
    let (folder, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    on_ranks(&case, |own, mut rank| {
        let mut checkpoints = Checkpoints::default();
        rank.step();
        let begun = rank.checkpoints(&mut checkpoints, folder.path());
        begun.unwrap();
        let finished = checkpoints.finish(&mut rank.comms).unwrap();
        assert_eq!(finished, Some(Saved { step: 1 }));
        rank.step();
        let before = rank.params();
        let seen = if own == 0 { folder.path() } else { empty.path() };
        let error = rank.resume(&mut checkpoints, seen).unwrap_err().to_string();
        assert!(error.contains("none on rank 1"), "{error}");
        assert!(rank.params() == before, "a resume that failed changed values");
        assert_eq!(rank.resume(&mut checkpoints, empty.path()).unwrap(), None);
        assert_eq!(rank.resume(&mut checkpoints, folder.path()).unwrap(), Some(7));
        assert!(rank.params() != before);
    });
}

#[test]
fn texts_of_ranks_come_back_to_as_many_and_common_ones_to_any_number() {
    let folder = tempfile::tempdir().unwrap();
    let remembered = |world: usize, text: &(dyn Fn(usize) -> Option<String> + Sync)| {
        let case = small(world, ZeroStage::Two);
        on_ranks(&case, |own, mut rank| {
            let mut checkpoints = Checkpoints::default();
            if let Some(text) = text(own) {
                checkpoints.remembered_mut().set("rng", text);
                rank.checkpoints(&mut checkpoints, folder.path()).unwrap();
                checkpoints.finish(&mut rank.comms).unwrap();
            } else {
                rank.resume(&mut checkpoints, folder.path()).unwrap();
            }
            checkpoints.remembered().get("rng").map(str::to_owned)
        })
    };
    let of = |texts: &[&str]| -> Vec<_> { texts.iter().map(|t| Some((*t).to_owned())).collect() };
    remembered(2, &|rank| Some(format!("{{\"seed\":\"ü{rank}\"}}")));
    let own = of(&["{\"seed\":\"ü0\"}", "{\"seed\":\"ü1\"}"]);
    assert_eq!(remembered(2, &|_| None), own);
    assert_eq!(remembered(1, &|_| None), [None]);
    assert_eq!(remembered(4, &|_| None), vec![None; 4]);
    remembered(2, &|_| Some("alike".to_owned()));
    assert_eq!(remembered(4, &|_| None), of(&["alike"; 4]));
}

//! Whole training runs under a seed: ranks, their calls, saves, deaths, stalls, losses of power,
//! full disks and bit rot.
//!
//! One rank runs at a time and the seed decides which, so a failing seed fails again in the same
//! way. Every run keeps these promises:
//!
//! ```text
//! a run ends in the bits of a run without faults, whatever happened on the way
//! a rank that fails says why; no rank panics, and no rank waits for ever
//! a save that was acknowledged is there afterwards, and every rank goes on from it or from a newer
//! one, unless bits have rotted: the loader says so then
//! an error comes only after a fault has happened; a fault drawn but never reached does not count
//! the disk keeps the checkpoint, and no files that were given up
//! ```
//!
//! Before each run several writers share a pair of files, as `writers` says.

#[macro_use]
mod disk_files;

mod communicator;
mod rank;
mod scenario;
mod schedule;
mod writers;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fusestep_checkpoint::{CheckpointFolder, Manifest};
use fusestep_tensor_file::Files;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use self::communicator::{RankFiles, SimulatedRank};
use self::rank::{AT, CANNOT_LOAD, FOLDER, Told, run_rank};
use self::scenario::Scenario;
use self::schedule::{RankFault, Schedule};
use crate::{Fault, Seen, SimulatedDisk};

/// Tries of a run that may have faults; later tries have none.
const FAULTY_TRIES: usize = 4;

/// Most tries of a run; a run that has not ended by then never will.
const MOST_TRIES: usize = 20;

/// Counts of events of a simulated run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Story {
    /// Times that the run was begun or resumed.
    pub tries: u64,
    /// Faults that have happened: deaths and stalls of ranks, losses of power, errors of the disk,
    /// writes to a full disk, and rotten bits.
    pub faults: u64,
    /// Errors that ranks have ended in.
    pub errors: u64,
    /// Saves that were acknowledged.
    pub saves: u64,
    /// Times that a run went on from a checkpoint.
    pub resumes: u64,
    /// Writes to a pair of files, by several writers, that were acknowledged.
    pub writes: u64,
    /// Calls between ranks and to the disk.
    pub events: u64,
}

impl std::ops::AddAssign for Story {
    fn add_assign(&mut self, other: Self) {
        self.tries += other.tries;
        self.faults += other.faults;
        self.errors += other.errors;
        self.saves += other.saves;
        self.resumes += other.resumes;
        self.writes += other.writes;
        self.events += other.events;
    }
}

/// Runs the simulation of a seed.
///
/// # Errors
/// The promise that was not kept, in words; the same seed always gives the same words.
pub fn simulate(seed: u64) -> Result<Story, String> {
    let writes = writers::run(seed).map_err(|error| format!("several writers: {error}"))?;
    let scenario = Scenario::draw(seed);
    let reference = {
        let disk = Arc::new(new_disk(seed));
        let ranks = run_once(&scenario, &disk, seed, scenario.worlds()[0], BTreeMap::new());
        one_hash(&ranks.outcomes).map_err(|error| format!("without faults: {error}"))?
    };
    let mut world = Simulation {
        rng: ChaCha8Rng::seed_from_u64(seed ^ 0x5eed),
        disk: Arc::new(new_disk(seed)),
        scenario,
        acknowledged: 0,
        rotten: false,
        ended_in_peace: false,
        story: Story { writes, ..Story::default() },
    };
    let found = world.run()?;
    if found != reference {
        return Err(format!(
            "expected the bits of a run without faults, {reference}, found {found}"
        ));
    }
    world.check_left_over()?;
    Ok(world.story)
}

fn new_disk(seed: u64) -> SimulatedDisk {
    let disk = SimulatedDisk::new(seed, []);
    // A fresh disk has no faults.
    let _ = disk.create_folder(Path::new("/run"));
    let _ = disk.sync_folder(Path::new("/"));
    disk
}

struct Simulation {
    rng: ChaCha8Rng,
    disk: Arc<SimulatedDisk>,
    scenario: Scenario,
    /// Micro-steps of the newest checkpoint that was acknowledged.
    acknowledged: u64,
    /// Whether a bit of the disk was flipped since it was last empty.
    rotten: bool,
    /// Whether the last try has saved and gone through no fault.
    ended_in_peace: bool,
    story: Story,
}

/// Outcome of one try.
struct Tried {
    /// Each rank's parameters in the end, as a hash.
    outcomes: Vec<Result<String, String>>,
    /// Micro-steps at which ranks went on, 0 without a checkpoint, of the ranks that got so far.
    resumed: Vec<u64>,
    events: u64,
    /// Deaths and stalls that have happened.
    faults: u64,
    acknowledged: u64,
    saves: u64,
}

fn one_hash(outcomes: &[Result<String, String>]) -> Result<String, String> {
    let (first, others) = outcomes.split_first().ok_or("no ranks")?;
    let first = first.clone()?;
    for hash in others {
        let hash = hash.clone()?;
        if hash != first {
            return Err(format!("{DIFFER}, found {first} and {hash}"));
        }
    }
    Ok(first)
}

impl Simulation {
    fn run(&mut self) -> Result<String, String> {
        let mut last = String::new();
        for number in 0..MOST_TRIES {
            self.story.tries += 1;
            let worlds = self.scenario.worlds();
            let world = worlds[self.rng.random_range(0..worlds.len())];
            let may_fail = number < FAULTY_TRIES;
            let mut faults = BTreeMap::new();
            let mut happened = 0;
            if may_fail {
                self.put_faults(&mut faults);
                happened += u64::from(self.rot());
            }
            let of_disk = self.disk.faults();
            let seed = self.rng.random();
            self.disk.act_as(self.story.tries, Seen::Here);
            let tried = run_once(&self.scenario, &self.disk, seed, world, faults);
            happened += tried.faults + self.disk.faults() - of_disk;
            self.story.faults += happened;
            self.story.events += tried.events;
            self.story.saves += tried.saves;
            self.disk.clear_faults();
            self.disk.end(self.story.tries);
            if self.disk.is_dead() {
                self.disk.restart();
            }
            self.disk.make_room();
            // Checked against saves acknowledged before this try, since its own saves may come
            // after the resume.
            self.check_resumed(&tried.resumed)?;
            self.acknowledged = self.acknowledged.max(tried.acknowledged);
            self.ended_in_peace = happened == 0 && tried.saves > 0;
            match one_hash(&tried.outcomes) {
                Ok(hash) => return Ok(hash),
                Err(error) => {
                    self.after(&error, &tried, happened)?;
                    last = error;
                }
            }
        }
        Err(format!(
            "expected an end within {MOST_TRIES} tries, found none; the last error: {last}"
        ))
    }

    /// Draws the faults of the next try.
    fn put_faults(&mut self, faults: &mut BTreeMap<u64, RankFault>) {
        let count = self.rng.random_range(0..3);
        for _ in 0..count {
            // A resume's first calls more often than their number would have it.
            let most = if self.rng.random_bool(0.2) { 3 } else { 60 };
            let disk_call = self.disk.calls() + self.rng.random_range(0..most);
            match self.rng.random_range(0..6) {
                0 | 1 => {
                    faults.insert(self.rng.random_range(0..250), RankFault::Death);
                }
                2 => {
                    faults.insert(self.rng.random_range(0..250), RankFault::Stall);
                }
                3 => self.disk.add_fault(disk_call, Fault::PowerLoss),
                4 => self.disk.add_fault(disk_call, Fault::Error),
                _ => self.disk.add_fault(disk_call, Fault::Full),
            }
        }
    }

    /// Flips a bit of the disk now and then; whether this happened.
    fn rot(&mut self) -> bool {
        let rotten = self.rng.random_bool(0.05) && self.disk.rot().is_some();
        self.rotten |= rotten;
        rotten
    }

    /// Checks that every rank went on from the newest acknowledged save, or from a newer one.
    fn check_resumed(&mut self, resumed: &[u64]) -> Result<(), String> {
        self.story.resumes += u64::from(resumed.iter().any(|&at| at > 0));
        match resumed.iter().find(|&&at| at < self.acknowledged) {
            None => Ok(()),
            Some(at) => Err(format!(
                "a save of micro-step {} was acknowledged, and a rank went on from {at}",
                self.acknowledged
            )),
        }
    }

    /// Says whether a failed try was allowed to fail.
    fn after(&mut self, error: &str, tried: &Tried, happened: u64) -> Result<(), String> {
        let errors = tried.outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
        for error in errors.clone() {
            if error.starts_with(PANICKED) || error.contains("wait for each other") {
                return Err(error.clone());
            }
        }
        if error.starts_with(DIFFER) {
            return Err(error.to_owned());
        }
        self.story.errors += errors.count() as u64;
        if self.rotten && (happened == 0 || error.contains(CANNOT_LOAD)) {
            // Rotten files are thrown away, as their owner would do, whatever was refused because
            // of them.
            self.disk = Arc::new(new_disk(self.scenario.seed ^ 1));
            (self.rotten, self.acknowledged) = (false, 0);
            return Ok(());
        }
        if happened == 0 {
            return Err(format!("no fault has happened, and yet: {error}"));
        }
        Ok(())
    }

    /// Checks that the newest save is there. If nothing has gone wrong since, nothing else may be
    /// left.
    fn check_left_over(&self) -> Result<(), String> {
        let folder = CheckpointFolder::of(&*self.disk, Path::new(FOLDER));
        let manifest = match Manifest::read_if_any(folder) {
            Ok(Some(manifest)) => manifest,
            Ok(None) if self.acknowledged == 0 => return Ok(()),
            Ok(None) => return Err("no manifest in the end, and yet saves acknowledged".to_owned()),
            Err(_) if self.rotten => return Ok(()),
            Err(error) => return Err(format!("in the end: {error}")),
        };
        let at = manifest.caller.get(AT).and_then(|at| at.parse().ok());
        if at < Some(self.acknowledged) {
            let expected = self.acknowledged;
            return Err(format!(
                "in the end: expected micro-step {expected} or more, found {at:?}"
            ));
        }
        if self.rotten || !self.ended_in_peace {
            return Ok(());
        }
        let generation = Path::new(FOLDER).join(&manifest.generation);
        let shards = manifest.shards.iter().map(|shard| generation.join(&shard.file));
        let mut known: BTreeSet<PathBuf> = shards.collect();
        known.insert(generation.join("mark.json"));
        known.insert(Path::new(FOLDER).join("manifest.json"));
        let files = self.disk.files();
        let left: Vec<_> = files.iter().filter(|path| !known.contains(*path)).collect();
        if !left.is_empty() {
            return Err(format!("left behind: {left:?}"));
        }
        Ok(())
    }
}

/// Beginning of the text of a panic, which is never an error of a run.
const PANICKED: &str = "panicked";

/// Beginning of an error that no fault excuses: ranks have ended with different values.
const DIFFER: &str = "expected the same parameters on all ranks";

/// Runs all ranks once, from the checkpoint if there is one, to the end or an error.
fn run_once(
    scenario: &Scenario,
    disk: &Arc<SimulatedDisk>,
    seed: u64,
    world: usize,
    faults: BTreeMap<u64, RankFault>,
) -> Tried {
    let schedule = Arc::new(Schedule::new(seed, world, faults));
    let (acknowledged, saves) = (AtomicU64::new(0), AtomicU64::new(0));
    let resumed = Mutex::new(Vec::new());
    let outcomes = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (schedule, disk) = (Arc::clone(&schedule), Arc::clone(disk));
                let (acknowledged, saves, resumed) = (&acknowledged, &saves, &resumed);
                scope.spawn(move || {
                    schedule.begin(rank);
                    let files = RankFiles { disk, schedule: Arc::clone(&schedule), rank };
                    let shares = scenario.shares_memory;
                    let mut comm = SimulatedRank::new(Arc::clone(&schedule), rank, world, shares);
                    let saved = |at| {
                        acknowledged.fetch_max(at, Ordering::SeqCst);
                        saves.fetch_add(u64::from(rank == 0), Ordering::SeqCst);
                    };
                    let resumed = |at| {
                        let resumed = resumed.lock();
                        resumed.unwrap_or_else(PoisonError::into_inner).push(at);
                    };
                    let told = Told { resumed: &resumed, saved: &saved };
                    let ran = catch_unwind(AssertUnwindSafe(|| {
                        run_rank(scenario, &mut comm, Arc::new(files), told)
                    }));
                    schedule.end(rank);
                    ran.unwrap_or_else(|panic| {
                        let text = panic.downcast_ref::<String>().cloned();
                        let text =
                            text.or_else(|| Some((*panic.downcast_ref::<&str>()?).to_owned()));
                        Err(format!("{PANICKED}: {}", text.unwrap_or_default()))
                    })
                })
            })
            .collect();
        let joined = ranks.into_iter().map(|rank| rank.join());
        joined.map(|joined| joined.unwrap_or_else(|_| Err(PANICKED.to_owned()))).collect()
    });
    Tried {
        outcomes,
        resumed: resumed.into_inner().unwrap_or_else(PoisonError::into_inner),
        events: schedule.events(),
        faults: schedule.faults(),
        acknowledged: acknowledged.into_inner(),
        saves: saves.into_inner(),
    }
}

//! Whole training runs under a seed: ranks, their calls, saves, deaths, stalls, losses of power,
//! full disks and bit rot.
//!
//! One rank runs at a time and the seed decides which, so a failing seed fails again in the same
//! way. Every run is held to this:
//!
//! ```text
//! it ends in the bits of a run without faults, whatever happened on the way
//! whoever fails says why; nobody panics, and nobody waits for ever
//! a save that was acknowledged is there afterwards, unless bits have rotted:
//! the loader says so then
//! without a fault there is no error
//! what is left on the disk is the checkpoint, and not what was given up
//! ```

mod communicator;
mod rank;
mod scenario;
mod schedule;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_planner::{CheckpointFolder, Manifest};
use fusestep_tensor_file::Files;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use self::communicator::{RankFiles, SimulatedRank};
use self::rank::run_rank;
use self::scenario::Scenario;
use self::schedule::{RankFault, Schedule};
use crate::{Fault, SimulatedDisk};

/// Where runs save.
const FOLDER: &str = "/run/checkpoint";

/// Tries of a run that may have faults; those behind them have none.
const FAULTY_TRIES: usize = 4;

/// Tries after which a run that does not end is one that never will.
const MOST_TRIES: usize = 20;

/// What the caller's text of a checkpoint is called: micro-steps that are over.
const AT: &str = "at";

/// What a simulated run has gone through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Story {
    /// Times that the run was begun or resumed.
    pub tries: u64,
    /// Ranks that died or stalled, losses of power, errors of the disk, full disks, rotten bits.
    pub faults: u64,
    /// Errors that ranks have ended in.
    pub errors: u64,
    /// Saves that were acknowledged.
    pub saves: u64,
    /// Times that a run went on from a checkpoint.
    pub resumes: u64,
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
        self.events += other.events;
    }
}

/// Runs a seed.
///
/// # Errors
/// What was promised and not kept, in words; the same for the same seed.
pub fn simulate(seed: u64) -> Result<Story, String> {
    let scenario = Scenario::draw(seed);
    let reference = {
        let disk = Arc::new(new_disk(seed));
        let ranks = run_once(
            &scenario,
            &disk,
            (seed, scenario.worlds()[0]),
            BTreeMap::new(),
        );
        one_hash(&ranks.outcomes).map_err(|error| format!("without faults: {error}"))?
    };
    let mut world = Simulation {
        rng: ChaCha8Rng::seed_from_u64(seed ^ 0x5eed),
        disk: Arc::new(new_disk(seed)),
        scenario,
        acknowledged: 0,
        rotten: false,
        story: Story::default(),
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
    story: Story,
}

/// What one try ended in.
struct Tried {
    outcomes: Vec<Result<Ended, String>>,
    events: u64,
    acknowledged: u64,
    saves: u64,
}

/// What a rank that has come to the end has.
#[derive(Clone, Debug)]
struct Ended {
    hash: String,
    resumed_at: u64,
}

fn one_hash(outcomes: &[Result<Ended, String>]) -> Result<String, String> {
    let mut hashes = outcomes
        .iter()
        .map(|outcome| outcome.as_ref().map(|ended| ended.hash.clone()));
    let first = hashes.next().ok_or("no ranks")?.map_err(String::clone)?;
    for hash in hashes {
        let hash = hash.map_err(String::clone)?;
        if hash != first {
            return Err(format!(
                "expected the same parameters on all ranks, found {first} and {hash}"
            ));
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
            let mut put = 0;
            if may_fail {
                put = self.put_faults(&mut faults);
            }
            let seed = self.rng.random();
            let tried = run_once(&self.scenario, &self.disk, (seed, world), faults);
            self.story.faults += put;
            self.story.events += tried.events;
            self.story.saves += tried.saves;
            self.acknowledged = self.acknowledged.max(tried.acknowledged);
            self.disk.clear_faults();
            if self.disk.is_dead() {
                self.disk.restart();
            }
            self.disk.make_room();
            if let Some(ended) = tried.outcomes.iter().flatten().next() {
                self.check_resumed(ended.resumed_at, tried.acknowledged)?;
            }
            match one_hash(&tried.outcomes) {
                Ok(hash) => return Ok(hash),
                Err(error) => {
                    self.after(&error, &tried, put)?;
                    last = error;
                }
            }
        }
        Err(format!(
            "expected an end within {MOST_TRIES} tries, found none; the last error: {last}"
        ))
    }

    /// Draws what goes wrong in the next try; how much.
    fn put_faults(&mut self, faults: &mut BTreeMap<u64, RankFault>) -> u64 {
        let count = self.rng.random_range(0..3);
        for _ in 0..count {
            let disk_call = self.disk.calls() + self.rng.random_range(0..60);
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
        if self.rng.random_bool(0.05) && self.disk.rot().is_some() {
            self.rotten = true;
            return count + 1;
        }
        count
    }

    fn check_resumed(&mut self, resumed_at: u64, acknowledged_now: u64) -> Result<(), String> {
        self.story.resumes += u64::from(resumed_at > 0);
        let before = if acknowledged_now < self.acknowledged {
            self.acknowledged
        } else {
            0
        };
        if resumed_at < before && !self.rotten {
            return Err(format!(
                "a save of micro-step {before} was acknowledged, and the run went on from \
                 {resumed_at}"
            ));
        }
        Ok(())
    }

    /// A try has failed: says whether it may have.
    fn after(&mut self, error: &str, tried: &Tried, put: u64) -> Result<(), String> {
        let errors = tried
            .outcomes
            .iter()
            .filter_map(|outcome| outcome.as_ref().err());
        for error in errors.clone() {
            if error.starts_with(PANICKED) || error.contains("wait for each other") {
                return Err(error.clone());
            }
        }
        self.story.errors += errors.count() as u64;
        if self.rotten && (put == 0 || error.contains(CANNOT_LOAD)) {
            // Whatever was refused for its sake: what is rotten is thrown away, as its owner would.
            self.disk = Arc::new(new_disk(self.scenario.seed ^ 1));
            (self.rotten, self.acknowledged) = (false, 0);
            return Ok(());
        }
        if put == 0 {
            return Err(format!("no fault, and yet: {error}"));
        }
        Ok(())
    }

    /// Nothing is left but one checkpoint and what single calls could not remove.
    fn check_left_over(&self) -> Result<(), String> {
        let folder = CheckpointFolder::of(&*self.disk, Path::new(FOLDER));
        let Ok(Some(manifest)) = Manifest::read_if_any(folder) else {
            return Ok(());
        };
        let shards = |path: &&std::path::PathBuf| path.to_string_lossy().ends_with(".safetensors");
        let of_others =
            |path: &&std::path::PathBuf| !path.to_string_lossy().contains(&manifest.generation);
        let files = self.disk.files();
        let left: Vec<_> = files.iter().filter(shards).filter(of_others).collect();
        // A removal that was itself cut off is made up for at the next save.
        if left.len() > 8 && self.story.faults == 0 {
            return Err(format!("left behind: {left:?}"));
        }
        Ok(())
    }
}

/// How an error begins that is no error.
const PANICKED: &str = "panicked";

/// How an error begins that a checkpoint was refused with.
const CANNOT_LOAD: &str = "cannot go on: ";

/// Runs all ranks once, from the checkpoint if there is one, to the end or an error.
fn run_once(
    scenario: &Scenario,
    disk: &Arc<SimulatedDisk>,
    (seed, world): (u64, usize),
    faults: BTreeMap<u64, RankFault>,
) -> Tried {
    let schedule = Arc::new(Schedule::new(seed, world, faults));
    let (acknowledged, saves) = (AtomicU64::new(0), AtomicU64::new(0));
    let outcomes = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (schedule, disk) = (Arc::clone(&schedule), Arc::clone(disk));
                let (acknowledged, saves) = (&acknowledged, &saves);
                scope.spawn(move || {
                    schedule.begin(rank);
                    let files = RankFiles {
                        disk,
                        schedule: Arc::clone(&schedule),
                        rank,
                    };
                    let shares = scenario.shares_memory;
                    let mut comm = SimulatedRank::new(Arc::clone(&schedule), rank, world, shares);
                    let saved = |at| {
                        acknowledged.fetch_max(at, Ordering::SeqCst);
                        saves.fetch_add(u64::from(rank == 0), Ordering::SeqCst);
                    };
                    let ran = catch_unwind(AssertUnwindSafe(|| {
                        run_rank(scenario, &mut comm, Arc::new(files), &saved)
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
        joined
            .map(|joined| joined.unwrap_or_else(|_| Err(PANICKED.to_owned())))
            .collect()
    });
    Tried {
        outcomes,
        events: schedule.events(),
        acknowledged: acknowledged.into_inner(),
        saves: saves.into_inner(),
    }
}

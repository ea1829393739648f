//! Two processes on one disk: the second begins at one of the first one's calls, and may stop in
//! its midst until the first has ended. Each may die at any of its calls.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use fusestep_tensor_file::{
    Claim, Files, Prepared, TensorFileError, Versions, finish_interrupted_in, remove_abandoned_in,
};

use crate::{Seen, SimulatedDisk};

/// Possible contents of the two files.
pub(super) type Pair = [String; 2];

/// A step: the places that it replaces, and the text that it writes there.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) places: Vec<PathBuf>,
    pub(super) text: String,
}

impl Step {
    /// Reads the files, changes them and writes them back.
    pub(super) fn run(
        &self,
        files: &dyn Files,
        meddled: impl FnOnce(),
    ) -> Result<(), TensorFileError> {
        let paths: Vec<&Path> = self.places.iter().map(PathBuf::as_path).collect();
        let claim = Claim::of_in(files, &paths)?;
        meddled();
        let prepared =
            paths.iter().map(|path| Prepared::bytes_in(files, path, self.text.as_bytes()));
        claim.commit(prepared.collect::<Result<_, _>>()?)
    }
}

/// Work of a process.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Step(Step),
    /// Reads both files as they were at one time.
    Read([PathBuf; 2]),
    /// Writes another file into a folder, and removes there what dead processes have left.
    Beside(PathBuf),
}

/// Outcome of a process's work; `None` of a reader that found a file missing.
pub(super) enum Outcome {
    Step(Result<(), TensorFileError>),
    Read(Result<Option<Pair>, TensorFileError>),
    Beside,
}

impl Work {
    fn run(&self, files: &dyn Files, meddled: impl FnOnce()) -> Outcome {
        match self {
            Work::Step(step) => Outcome::Step(step.run(files, meddled)),
            Work::Read(places) => Outcome::Read(read(files, places)),
            Work::Beside(folder) => {
                remove_abandoned_in(files, folder);
                Outcome::Beside
            }
        }
    }
}

fn read(files: &dyn Files, places: &[PathBuf; 2]) -> Result<Option<Pair>, TensorFileError> {
    for place in places {
        finish_interrupted_in(files, place)?;
    }
    let versions = Versions::of_in(files, &places.each_ref().map(PathBuf::as_path))?;
    let [Ok(first), Ok(second)] = places.each_ref().map(|place| files.read(place)) else {
        return Ok(None);
    };
    versions.require_same()?;
    Ok(Some([first, second].map(|bytes| String::from_utf8_lossy(&bytes).into_owned())))
}

/// A process and its fate.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) number: u64,
    pub(super) seen: Seen,
    pub(super) work: Work,
    /// The call at which it dies, if it comes so far: that call and all later ones fail.
    pub(super) death: Option<u64>,
    /// The call at which it lets the other process go on.
    pub(super) pause: u64,
}

/// End of a process's work.
pub(super) struct Ended {
    pub(super) work: Work,
    pub(super) outcome: Outcome,
    pub(super) has_died: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Host,
    Guest,
}

/// The turn of one of two processes.
#[derive(Debug)]
struct Baton {
    turn: Mutex<Turn>,
    passed: Condvar,
}

impl Baton {
    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_to(&self, turn: Turn) {
        *self.turn() = turn;
        self.passed.notify_all();
    }

    fn wait_for(&self, turn: Turn) {
        let waiting = self.passed.wait_while(self.turn(), |now| *now != turn);
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }
}

/// A disk as seen by one of the processes.
#[derive(Debug)]
struct Shared<'a> {
    disk: &'a SimulatedDisk,
    process: &'a Process,
    calls: AtomicU64,
    own: Turn,
    baton: &'a Baton,
    has_paused: &'a AtomicBool,
}

impl Shared<'_> {
    fn has_died(&self) -> bool {
        self.process.death.is_some_and(|at| self.calls.load(Ordering::SeqCst) > at)
    }

    fn disk(&self) -> io::Result<&SimulatedDisk> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        if self.process.death.is_some_and(|at| call >= at) {
            return Err(io::Error::other("this process is dead"));
        }
        if call == self.process.pause {
            self.has_paused.store(true, Ordering::SeqCst);
            self.baton.pass_to(if self.own == Turn::Host { Turn::Guest } else { Turn::Host });
            self.baton.wait_for(self.own);
        }
        self.disk.act_as(self.process.number, self.process.seen);
        Ok(self.disk)
    }
}

/// Runs a process, and another one beside it if the first one pauses; their ends, in that order.
pub(super) fn meet(
    disk: &SimulatedDisk,
    host: &Process,
    guest: Option<&Process>,
    meddled: impl FnOnce(),
) -> Vec<Ended> {
    let baton = Baton { turn: Mutex::new(Turn::Host), passed: Condvar::new() };
    let (ended, has_paused) = (Mutex::new(Vec::new()), AtomicBool::new(false));
    let run = |process: &Process, own, meddled: Box<dyn FnOnce() + '_>| {
        // Nobody goes on where there is no guest.
        let process = &match guest {
            Some(_) => process.clone(),
            None => Process { pause: u64::MAX, ..process.clone() },
        };
        let calls = AtomicU64::new(0);
        let (baton, has_paused) = (&baton, &has_paused);
        let files = Shared { disk, process, calls, own, baton, has_paused };
        let outcome = process.work.run(&files, meddled);
        disk.end(process.number);
        let (work, has_died) = (process.work.clone(), files.has_died());
        let end = Ended { work, outcome, has_died };
        ended.lock().unwrap_or_else(PoisonError::into_inner).push(end);
    };
    std::thread::scope(|scope| {
        if let Some(guest) = guest {
            let (run, baton, has_paused) = (&run, &baton, &has_paused);
            scope.spawn(move || {
                baton.wait_for(Turn::Guest);
                // The host may have ended before.
                if has_paused.load(Ordering::SeqCst) {
                    run(guest, Turn::Guest, Box::new(|| {}));
                }
                baton.pass_to(Turn::Host);
            });
        }
        run(host, Turn::Host, Box::new(meddled));
        baton.pass_to(Turn::Guest);
    });
    ended.into_inner().unwrap_or_else(PoisonError::into_inner)
}

files_of_disk!(Shared<'_>);

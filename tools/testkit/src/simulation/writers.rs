//! Several processes on one pair of files under a seed. Steps replace both files or one, readers
//! want both of one time, and others write beside them. A process may die, lose its power or meet
//! another one at any of its calls, and days may pass before the next comes. Other programs, which
//! know nothing of the steps, put versions of their own into the files.
//!
//! ```text
//! an acknowledged write stays, whichever writer comes next
//! both files are of one step, except for writes to one of them alone
//! a reader has the files of steps that count
//! an error comes only after a fault or a write of another program
//! ```

mod meeting;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fusestep_tensor_file::{Files, TensorFileError, finish_interrupted_in};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use self::meeting::{Ended, Outcome, Pair, Process, Step, Work, meet};
use crate::{Fault, Seen, SimulatedDisk};

/// Operations of the writers, one after the other.
const OPERATIONS: usize = 30;

/// Calls of a step on two files, about.
const CALLS: u64 = 100;

/// Time after which the system no longer asks who has left a file.
const DAYS: Duration = Duration::from_secs(2 * 24 * 60 * 60);

/// A write of another program to one of the files while a step runs.
struct Meddled {
    at: usize,
    text: String,
}

/// Events around processes while they ran.
struct Around {
    /// Whether a fault of the disk has happened.
    has_failed: bool,
    has_lost_power: bool,
    /// Whether there were two of them.
    has_company: bool,
}

/// Runs a seed and returns the number of acknowledged writes.
///
/// # Errors
/// The promise that was not kept, in words.
pub(super) fn run(seed: u64) -> Result<u64, String> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x3717e5);
    let disk = SimulatedDisk::new(seed, []);
    for folder in ["/run", "/state"] {
        // A fresh disk has no faults.
        let _ = disk.create_folder(Path::new(folder));
    }
    let _ = disk.sync_folder(Path::new("/"));
    if rng.random_bool(0.2) {
        disk.refuse_links();
    }
    let other = if rng.random_bool(0.5) { "/run/s" } else { "/state/s" };
    let mut writers = Writers {
        rng,
        disk,
        places: ["/run/p".into(), other.into()],
        possible: BTreeSet::from([Pair::default()]),
        written: vec![String::new()],
        acknowledged: 0,
        processes: 0,
        open: Open::No,
    };
    for _ in 0..OPERATIONS {
        match writers.rng.random_range(0..10) {
            0..7 => writers.step()?,
            7 => writers.beside(),
            _ => writers.overwrite(),
        }
        if writers.rng.random_bool(0.2) {
            writers.disk.pass(DAYS);
        }
        if writers.rng.random_bool(0.5) {
            writers.observe()?;
        }
    }
    writers.observe()?;
    // A pointer may be gone before its journal.
    for place in writers.places.clone() {
        let finished = finish_interrupted_in(&writers.disk, &place);
        finished.map_err(|error| format!("nobody writes: {error}"))?;
    }
    writers.observe()?;
    writers.check_left_over()?;
    Ok(writers.acknowledged)
}

struct Writers {
    rng: ChaCha8Rng,
    disk: SimulatedDisk,
    places: [PathBuf; 2],
    /// Possible contents of the files once interrupted steps are finished.
    possible: BTreeSet<Pair>,
    /// Every text that was ever written.
    written: Vec<String>,
    acknowledged: u64,
    /// Processes so far.
    processes: u64,
    open: Open,
}

/// Whether a step could neither be completed nor undone, as its error says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    No,
    Yes,
    /// Yes, and another program has since put versions into the files, perhaps those of the step.
    Overwritten,
}

impl Writers {
    /// Draws a step on both files in any order, or on one of them.
    fn draw(&mut self) -> Step {
        let mut places = self.places.to_vec();
        if self.rng.random_bool(0.5) {
            places.reverse();
        }
        if self.rng.random_bool(0.4) {
            places.truncate(1);
        }
        let text = format!("step {}", self.written.len());
        self.written.push(text.clone());
        Step { places, text }
    }

    /// The possible contents of the files once a step is done.
    fn after(&self, step: &Step) -> BTreeSet<Pair> {
        let replaced = |pair: &Pair| {
            let mut pair = pair.clone();
            for (text, place) in pair.iter_mut().zip(&self.places) {
                if step.places.contains(place) {
                    *text = step.text.clone();
                }
            }
            pair
        };
        self.possible.iter().map(replaced).collect()
    }

    /// Draws the work of a process that comes while a step runs.
    fn draw_work(&mut self) -> Work {
        match self.rng.random_range(0..4) {
            0 | 1 => Work::Step(self.draw()),
            2 => Work::Read(self.places.clone()),
            _ => Work::Beside(self.draw_folder()),
        }
    }

    fn draw_folder(&mut self) -> PathBuf {
        let place = &self.places[self.rng.random_range(0..2)];
        place.parent().unwrap_or(Path::new("/")).to_owned()
    }

    /// Draws the process that does some work, and its fate.
    fn process(&mut self, work: Work) -> Process {
        self.processes += 1;
        let seen = if self.rng.random_bool(0.7) { Seen::Here } else { Seen::Elsewhere };
        let death = self.rng.random_bool(0.3).then(|| self.rng.random_range(0..CALLS));
        Process {
            number: self.processes,
            seen,
            work,
            death,
            pause: self.rng.random_range(0..CALLS),
        }
    }

    /// Makes the calls from here on those of a process that is alone and has no faults.
    fn begin_alone(&mut self) {
        self.processes += 1;
        self.disk.act_as(self.processes, Seen::Here);
    }

    /// Draws faults of the disk at calls to come, all of one kind, and returns the kind.
    fn put_faults(&mut self) -> Option<Fault> {
        if !self.rng.random_bool(0.4) {
            return None;
        }
        let kind = [Fault::PowerLoss, Fault::Error, Fault::Full][self.rng.random_range(0..3)];
        for _ in 0..self.rng.random_range(1..4) {
            let call = self.disk.calls() + self.rng.random_range(0..CALLS / 2);
            self.disk.add_fault(call, kind);
        }
        Some(kind)
    }

    /// Runs a step, with the faults and the other process that are drawn for it.
    fn step(&mut self) -> Result<(), String> {
        let step = self.draw();
        let host = self.process(Work::Step(step.clone()));
        let guest = self.rng.random_bool(0.4).then(|| self.draw_work());
        let guest = guest.map(|work| self.process(work));
        let kind = self.put_faults();
        let is_alone = guest.is_none() && kind.is_none() && host.death.is_none();
        let meddled = (is_alone && self.rng.random_bool(0.4)).then(|| self.rng.random_range(0..2));
        let faults = self.disk.faults();
        let other = format!("of another {}", self.written.len());
        let mut ended = meet(&self.disk, &host, guest.as_ref(), || {
            if let Some(at) = meddled {
                self.disk.overwrite(&self.places[at], other.as_bytes());
            }
        });
        self.disk.clear_faults();
        self.disk.make_room();
        let has_lost_power = self.disk.is_dead();
        if has_lost_power {
            self.disk.restart();
        }
        if let Some(at) = meddled
            && let Some(Ended { outcome: Outcome::Step(outcome), .. }) = ended.pop()
        {
            return self.after_meddling(&step, Meddled { at, text: other }, outcome);
        }
        let around = Around {
            has_failed: self.disk.faults() > faults,
            has_lost_power,
            has_company: ended.len() > 1,
        };
        self.count(ended, &around)
    }

    /// Counts what processes have done that ended in this order.
    fn count(&mut self, ended: Vec<Ended>, around: &Around) -> Result<(), String> {
        let (before, mut seen) = (self.possible.clone(), Vec::new());
        for Ended { work, outcome, has_died } in ended {
            match (work, outcome) {
                (Work::Step(step), Outcome::Step(outcome)) => {
                    self.count_step(&step, outcome, has_died, around)?;
                }
                (_, Outcome::Read(Ok(pair))) => seen.extend(pair),
                (_, Outcome::Read(Err(error))) => {
                    let may_fail = has_died || around.has_failed;
                    let is_refused = matches!(
                        error,
                        TensorFileError::Busy { .. } | TensorFileError::Changed { .. }
                    );
                    if !may_fail && !is_refused {
                        self.excuse(&error, "a reader")?;
                    }
                }
                _ => {}
            }
        }
        let counts = |pair: &Pair| before.contains(pair) || self.possible.contains(pair);
        match seen.iter().find(|pair| !counts(pair)) {
            Some(pair) => {
                Err(format!("a reader expected {before:?} or {:?}, found {pair:?}", self.possible))
            }
            None => Ok(()),
        }
    }

    fn count_step(
        &mut self,
        step: &Step,
        outcome: Result<(), TensorFileError>,
        has_died: bool,
        around: &Around,
    ) -> Result<(), String> {
        match outcome {
            Ok(()) => self.acknowledge(step),
            Err(TensorFileError::Busy { .. }) if around.has_company => {}
            Err(error) if !has_died && !around.has_failed => {
                self.excuse(&error, "nothing has happened")?;
            }
            // The step counts or does not. An error of a pair without death says that the step does
            // not count, unless its renames could not be taken back.
            Err(error) => {
                let is_open = matches!(error, TensorFileError::Interrupted { .. });
                if is_open {
                    self.open = Open::Yes;
                }
                let is_dead = has_died || around.has_lost_power;
                if is_dead || is_open || step.places.len() == 1 {
                    let after = self.after(step);
                    self.possible.extend(after);
                }
            }
        }
        Ok(())
    }

    /// Writes another file beside one of the two.
    fn beside(&mut self) {
        let work = Work::Beside(self.draw_folder());
        let process = self.process(work);
        meet(&self.disk, &process, None, || {});
    }

    fn acknowledge(&mut self, step: &Step) {
        self.acknowledged += 1;
        if step.places.len() > 1 {
            self.open = Open::No;
        }
        self.possible = self.after(step);
    }

    /// Checks the outcome of a step during which another program has written one of the files.
    fn after_meddling(
        &mut self,
        step: &Step,
        Meddled { at, text }: Meddled,
        outcome: Result<(), TensorFileError>,
    ) -> Result<(), String> {
        match outcome {
            Err(TensorFileError::Changed { .. }) if step.places.contains(&self.places[at]) => {}
            Ok(()) if !step.places.contains(&self.places[at]) => {
                self.acknowledge(step);
            }
            // The step ended before it noticed the write.
            Err(error @ TensorFileError::Journal { .. }) => {
                return self.excuse(&error, "written again");
            }
            outcome => {
                return Err(format!("written by another program meanwhile, and yet {outcome:?}"));
            }
        }
        self.replace(at, &text);
        self.written.push(text);
        Ok(())
    }

    /// Handles the errors that need no fault: the old bytes were written again, or the bytes of a
    /// step that was undone, and only the user knows what was meant. The user keeps them.
    fn excuse(&mut self, error: &TensorFileError, why: &str) -> Result<(), String> {
        let text = error.to_string();
        if let TensorFileError::Journal { path, .. } = error
            && (text.contains("written again since")
                || self.open == Open::Overwritten && text.contains("in neither"))
        {
            return self.disk.remove_file(path).map_err(|error| error.to_string());
        }
        Err(format!("{why}, and yet: {text}"))
    }

    fn replace(&mut self, at: usize, text: &str) {
        let pairs = std::mem::take(&mut self.possible).into_iter();
        let replaced = pairs.map(|mut pair| {
            text.clone_into(&mut pair[at]);
            pair
        });
        self.possible = replaced.collect();
    }

    /// Writes versions of another program into the files, taken from the texts written before.
    fn overwrite(&mut self) {
        if self.open == Open::Yes {
            self.open = Open::Overwritten;
        }
        for at in 0..2 {
            if self.rng.random_bool(0.5) {
                let backup = self.written[self.rng.random_range(0..self.written.len())].clone();
                self.disk.overwrite(&self.places[at], backup.as_bytes());
                self.replace(at, &backup);
            }
        }
    }

    /// Finishes an interrupted step, as the next program would, and checks the contents of the
    /// files.
    fn observe(&mut self) -> Result<(), String> {
        let place = self.places[self.rng.random_range(0..2)].clone();
        self.begin_alone();
        if let Err(error) = finish_interrupted_in(&self.disk, &place) {
            self.excuse(&error, "nobody writes")?;
        }
        let text = |place: &PathBuf| {
            let bytes = self.disk.read(place).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let found = [text(&self.places[0]), text(&self.places[1])];
        if !self.possible.contains(&found) {
            return Err(format!("expected one of {:?}, found {found:?}", self.possible));
        }
        if self.possible.len() > 1 {
            // A step that failed behind its rename is seen, and a loss of power can still undo it.
            for place in &self.places {
                let synced = self.disk.sync_folder(place.parent().unwrap_or(Path::new("/")));
                synced.map_err(|error| error.to_string())?;
            }
        }
        self.possible = BTreeSet::from([found]);
        Ok(())
    }

    /// Checks that a step days later leaves nothing but the two files.
    fn check_left_over(&mut self) -> Result<(), String> {
        self.disk.pass(DAYS);
        self.begin_alone();
        let step = Step { places: self.places.to_vec(), text: "the last step".to_owned() };
        step.run(&self.disk, || {}).map_err(|error| format!("nobody writes: {error}"))?;
        let mut left = self.disk.files();
        left.retain(|path| !self.places.contains(path));
        if left.is_empty() { Ok(()) } else { Err(format!("left behind: {left:?}")) }
    }
}

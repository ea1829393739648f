//! Writer of files while training goes on: a thread, or the rank itself at a later call.

use std::thread::{Builder, JoinHandle};

use super::generation::Generation;
use super::shards::Written;
use crate::{PlanError, Result};

/// A part of a save that needs the disk and no other rank.
pub(super) type Job = Box<dyn FnOnce() -> Outcome + Send>;

pub(super) type Outcome = Result<Done>;

/// Results of a successful job; empty on ranks that had nothing to do.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// The generation whose folder is there.
    pub(super) begun: Option<Generation>,
    /// This rank's files, written and synced.
    pub(super) written: Written,
}

pub(super) enum Writer {
    /// A thread of its own for each job, so that a panic ends one job only.
    Thread(Option<JoinHandle<Outcome>>),
    /// The caller's thread, which runs a job when it has looked for its outcome `looks` times.
    Turns { looks: u32, job: Option<(Job, u32)> },
}

impl Writer {
    /// Begins a job. An earlier job is waited for first, and its outcome is lost.
    pub(super) fn begin(&mut self, job: Job) -> Result<()> {
        let _ = self.wait();
        match self {
            Writer::Thread(thread) => {
                let spawned = Builder::new().name("fusestep-save".to_owned()).spawn(job);
                *thread = Some(spawned.map_err(|error| refused(&error.to_string()))?);
            }
            Writer::Turns { looks, job: own } => *own = Some((job, *looks)),
        }
        Ok(())
    }

    /// The outcome of the job, if it is over.
    pub(super) fn look(&mut self) -> Option<Outcome> {
        let is_over = match self {
            Writer::Thread(thread) => thread.as_ref()?.is_finished(),
            Writer::Turns { job, .. } => {
                let (_, left) = job.as_mut()?;
                *left = left.saturating_sub(1);
                *left == 0
            }
        };
        if is_over { self.wait() } else { None }
    }

    /// Waits for the job; `None` if there is none.
    pub(super) fn wait(&mut self) -> Option<Outcome> {
        match self {
            Writer::Thread(thread) => {
                let panicked = "one that panicked; standard error says why";
                let ended = thread.take()?.join();
                Some(ended.unwrap_or_else(|_| Err(refused(panicked))))
            }
            Writer::Turns { job, .. } => job.take().map(|(job, _)| job()),
        }
    }
}

impl Drop for Writer {
    /// Waits until a job that a thread has begun is over.
    fn drop(&mut self) {
        if matches!(self, Writer::Thread(_)) {
            let _ = self.wait();
        }
    }
}

fn refused(found: &str) -> PlanError {
    let expected = "a thread that saves; save in line";
    super::refusal::refuse("checkpoint".as_ref(), "writer", expected, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_panics_is_told_of_once_and_the_next_one_is_done() {
        let mut writer = Writer::Thread(None);
        writer.begin(Box::new(|| panic!("on purpose"))).unwrap();
        let told = writer.wait().unwrap().unwrap_err().to_string();
        assert!(told.ends_with("found one that panicked; standard error says why"), "{told}");
        assert!(writer.wait().is_none() && writer.look().is_none());
        writer.begin(Box::new(|| Ok(Done::default()))).unwrap();
        writer.wait().unwrap().unwrap();
    }
}

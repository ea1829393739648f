//! Writer of files while training goes on: a thread, or the rank itself at a later call.

use std::thread::{Builder, JoinHandle};

use fusestep_planner::PlanError;

use crate::Result;
use crate::flight::Outcome;

/// Work of a save on the disk, of one rank.
pub(crate) type Work = Box<dyn FnOnce() -> Outcome + Send>;

pub(crate) enum Writer {
    /// A thread of its own for each job, so that a panic ends one job only.
    Thread(Option<JoinHandle<Outcome>>),
    /// The caller's thread, which runs a job when it has looked for its outcome `looks` times.
    Turns { looks: u32, work: Option<(Work, u32)> },
}

impl Writer {
    /// Begins a job. An earlier job is waited for first, and its outcome is lost.
    pub(crate) fn begin(&mut self, work: Work) -> Result<()> {
        let _ = self.wait();
        // A child of the save's span, also on a thread of its own.
        #[cfg(feature = "tracing")]
        let work: Work = {
            let span = tracing::info_span!(target: "fusestep", "write");
            Box::new(move || span.in_scope(work))
        };
        match self {
            Writer::Thread(thread) => {
                let spawned = Builder::new().name("fusestep-save".to_owned()).spawn(work);
                *thread = Some(spawned.map_err(|error| refused(&error.to_string()))?);
            }
            Writer::Turns { looks, work: own } => *own = Some((work, *looks)),
        }
        Ok(())
    }

    /// The outcome of the job, if it is over.
    pub(crate) fn look(&mut self) -> Option<Outcome> {
        let is_over = match self {
            Writer::Thread(thread) => thread.as_ref()?.is_finished(),
            Writer::Turns { work, .. } => {
                let (_, left) = work.as_mut()?;
                *left = left.saturating_sub(1);
                *left == 0
            }
        };
        if is_over { self.wait() } else { None }
    }

    /// Waits for the job; `None` if there is none.
    pub(crate) fn wait(&mut self) -> Option<Outcome> {
        match self {
            Writer::Thread(thread) => {
                let panicked = "one that panicked; standard error says why";
                let ended = thread.take()?.join();
                Some(ended.unwrap_or_else(|_| Err(refused(panicked))))
            }
            Writer::Turns { work, .. } => work.take().map(|(work, _)| work()),
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
    crate::refusal::refuse("checkpoint".as_ref(), "writer", expected, found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flight::Done;

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

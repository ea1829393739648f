//! Who writes files while training goes on: a thread, or the rank itself at a later call.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use super::generation::Generation;
use super::shards::Written;
use crate::{PlanError, Result};

/// A part of a save that needs the disk and no other rank.
pub(super) type Job = Box<dyn FnOnce() -> Outcome + Send>;

pub(super) type Outcome = Result<Done>;

/// What jobs that went well have done; nothing on ranks where nothing was to be done.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// The generation whose folder is there.
    pub(super) begun: Option<Generation>,
    /// This rank's files, written and synced.
    pub(super) written: Written,
}

pub(super) enum Writer {
    /// A thread, from the first job on.
    Thread(Option<Thread>),
    /// The caller's thread, when it has looked so many times for each job.
    Turns { looks: u32, job: Option<(Job, u32)> },
}

pub(super) struct Thread {
    jobs: Option<Sender<Job>>,
    done: Receiver<Outcome>,
    handle: Option<JoinHandle<()>>,
    busy: bool,
}

impl Writer {
    /// Hands over a job; one that is still being done ends first, and nobody hears of it.
    pub(super) fn begin(&mut self, job: Job) -> Result<()> {
        match self {
            Writer::Thread(thread) => {
                let thread = match thread {
                    Some(thread) => thread,
                    None => thread.insert(Thread::start()?),
                };
                if thread.busy {
                    let _ = thread.done.recv();
                }
                let jobs = thread.jobs.as_ref();
                let sent = jobs.is_some_and(|jobs| jobs.send(job).is_ok());
                thread.busy = sent;
                if sent { Ok(()) } else { Err(ended()) }
            }
            Writer::Turns { looks, job: own } => {
                if let Some((before, _)) = own.take() {
                    let _ = before();
                }
                *own = Some((job, *looks));
                Ok(())
            }
        }
    }

    /// What the job has come to, if it is over.
    pub(super) fn look(&mut self) -> Option<Outcome> {
        match self {
            Writer::Thread(thread) => {
                let thread = thread.as_mut().filter(|thread| thread.busy)?;
                let outcome = match thread.done.try_recv() {
                    Ok(outcome) => outcome,
                    Err(TryRecvError::Empty) => return None,
                    Err(TryRecvError::Disconnected) => Err(ended()),
                };
                thread.busy = false;
                Some(outcome)
            }
            Writer::Turns { job, .. } => {
                let (_, left) = job.as_mut()?;
                *left = left.saturating_sub(1);
                if *left > 0 {
                    return None;
                }
                job.take().map(|(job, _)| job())
            }
        }
    }

    /// Waits for the job; `None` if there is none.
    pub(super) fn wait(&mut self) -> Option<Outcome> {
        match self {
            Writer::Thread(thread) => {
                let thread = thread.as_mut().filter(|thread| thread.busy)?;
                thread.busy = false;
                Some(thread.done.recv().unwrap_or_else(|_| Err(ended())))
            }
            Writer::Turns { job, .. } => job.take().map(|(job, _)| job()),
        }
    }
}

impl Thread {
    fn start() -> Result<Self> {
        let (jobs, todo) = channel::<Job>();
        let (tell, done) = channel();
        let work = move || {
            for job in todo {
                // Nobody listens any more only where the optimizer is gone.
                let _ = tell.send(job());
            }
        };
        let name = "fusestep-save".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(work);
        let handle = spawned.map_err(|error| refused(&error.to_string()))?;
        Ok(Self { jobs: Some(jobs), done, handle: Some(handle), busy: false })
    }
}

impl Drop for Thread {
    /// Waits until what has been begun is on disk.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

fn ended() -> PlanError {
    refused("one that has ended")
}

fn refused(found: &str) -> PlanError {
    let expected = "a thread that saves; save in line";
    super::manifest::refuse("checkpoint".as_ref(), "writer", expected, found)
}

//! Calls that run while the caller goes on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use fusestep_tensor::Element;

use crate::{Aborter, CollectiveError, Collectives, Communicator, Membership, ReduceOp};

type Job = Box<dyn FnOnce(&mut dyn Communicator) + Send>;

/// A communicator on a thread of its own, which makes the calls given to it one after the other.
///
/// Calls of different communication streams overlap each other and the caller's work. Dropping a
/// communication stream lets it finish what was started.
///
/// ```
/// # use fusestep_collective::*;
/// # run_ranks(2, &Options::default(), |mut comm| {
/// let two = communication_streams(&mut comm, 2)?;
/// let first = two[0].all_reduce(vec![1.0f32; 8], ReduceOp::Sum);
/// let second = two[1].all_reduce(vec![2.0f32; 8], ReduceOp::Sum);
/// assert_eq!(second.wait()?, [4.0; 8]);
/// assert_eq!(first.wait()?, [2.0; 8]);
/// # Ok::<(), CollectiveError>(())
/// # }).unwrap().into_iter().for_each(|rank| rank.unwrap().unwrap());
/// ```
#[derive(Debug)]
pub struct CommStream {
    queue: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    aborter: Aborter,
    /// Number of calls given to the stream.
    started: AtomicU64,
}

/// A call that was started, and the buffer it will hand back.
///
/// Wait for every pending result. Dropping one without waiting closes the group on all ranks, since
/// nobody could tell any more whether the call had its effect.
#[must_use = "dropping a pending result closes the group; call `wait`"]
#[derive(Debug)]
pub struct Pending<B> {
    result: Option<mpsc::Receiver<Result<B, CollectiveError>>>,
    operation: &'static str,
    aborter: Aborter,
}

/// Most communication streams that a rank asks for at once, each a thread of its own.
pub const MAX_COMM_STREAMS: usize = 1024;

/// Makes `count` communication streams between the ranks of `comm`, each a group of its own.
///
/// All ranks call it with the same `count`.
///
/// # Errors
/// As [`Communicator::split`]; [`CollectiveError::Refused`] if a thread cannot be started, or for
/// more than [`MAX_COMM_STREAMS`].
pub fn communication_streams(
    comm: &mut dyn Communicator,
    count: usize,
) -> Result<Vec<CommStream>, CollectiveError> {
    if count > MAX_COMM_STREAMS {
        let reason = format!("expected at most {MAX_COMM_STREAMS}, found {count}; 2 are plenty");
        return Err(CollectiveError::refused(comm.rank(), "communication_streams", reason));
    }
    let everyone = Membership { colour: 0, key: 0 };
    let mut made = Vec::with_capacity(count);
    for _ in 0..count {
        if let Some(copy) = comm.split(Some(everyone))? {
            made.push(CommStream::new(copy)?);
        }
    }
    Ok(made)
}

impl CommStream {
    /// Moves a communicator to a thread of its own.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] with the operating system's reason if no thread can be started;
    /// the group is closed then.
    pub fn new(mut comm: Box<dyn Communicator>) -> Result<Self, CollectiveError> {
        let (queue, jobs) = mpsc::channel::<Job>();
        let (aborter, rank) = (comm.aborter(), comm.rank());
        let builder = std::thread::Builder::new().name(format!("stream-of-rank-{rank}"));
        let spawned = builder.spawn(move || {
            for job in jobs {
                job(&mut *comm);
            }
        });
        let thread = spawned.map_err(|error| {
            let reason = format!(
                "expected a thread of its own, found {error}; use fewer communication streams"
            );
            CollectiveError::refused(rank, "communication stream", reason)
        })?;
        Ok(Self { queue: Some(queue), thread: Some(thread), aborter, started: AtomicU64::new(0) })
    }

    /// Starts `work`, which makes one call or several on `buffer`, and returns at once.
    ///
    /// [`Pending::wait`] hands the buffer back. `operation` names the call in errors.
    pub fn start<B, W>(&self, operation: &'static str, mut buffer: B, work: W) -> Pending<B>
    where
        B: Send + 'static,
        W: FnOnce(&mut dyn Communicator, &mut B) -> Result<(), CollectiveError> + Send + 'static,
    {
        let (sender, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |comm| {
            let outcome = work(comm, &mut buffer);
            // Nobody listens if the pending result was dropped, which has closed the group already.
            let _ = sender.send(outcome.map(|()| buffer));
            // The device's work is watched from here; an error closes the group, and the next call
            // says so.
            let _ = comm.finish_on_device();
        });
        self.started.fetch_add(1, Ordering::Relaxed);
        if let Some(queue) = &self.queue {
            // Refused only if the communication stream's thread has panicked; then `job` is dropped
            // with its sender, and `wait` says so.
            let _ = queue.send(job);
        }
        Pending { result: Some(result), operation, aborter: self.aborter.clone() }
    }

    /// Starts an all-reduce of `buffer` over the stream's ranks and returns at once.
    ///
    /// All ranks start it with buffers of equal length. [`Pending::wait`] hands the buffer back
    /// with the result in it.
    pub fn all_reduce<T: Element>(&self, buffer: Vec<T>, reduce: ReduceOp) -> Pending<Vec<T>> {
        self.start("all-reduce", buffer, move |comm, buffer| comm.all_reduce(buffer, reduce))
    }

    /// Breaks the communication stream's group off, from any thread.
    pub fn aborter(&self) -> &Aborter {
        &self.aborter
    }
}

impl Drop for CommStream {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The communication stream's own thread is well and would only say that it has left.
            self.aborter.close(CollectiveError::Panicked {
                rank: self.aborter.rank(),
                calls: self.started.load(Ordering::Relaxed),
            });
        }
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic of a call was told to the other ranks by the communicator's own drop, and to
            // `wait` by the closed channel.
            let _ = thread.join();
        }
    }
}

impl<B> Pending<B> {
    /// The outcome that [`Self::wait`] would return, if the call is through. Otherwise the pending
    /// result itself, at once.
    ///
    /// # Errors
    /// `Err` is no failure: the call is still under way. Its own outcome lies within `Ok`.
    pub fn try_wait(mut self) -> Result<Result<B, CollectiveError>, Self> {
        let received = self.result.as_ref().map(mpsc::Receiver::try_recv);
        match received {
            Some(Err(mpsc::TryRecvError::Empty)) => Err(self),
            Some(Ok(outcome)) => {
                self.result = None;
                Ok(outcome)
            }
            _ => Ok(self.wait()),
        }
    }

    /// Waits until the call is done and hands the buffer back. The wait ends, since every wait
    /// within the call does.
    ///
    /// # Errors
    /// The error of the call.
    pub fn wait(mut self) -> Result<B, CollectiveError> {
        let received = self.result.take().map(|result| result.recv());
        match received {
            Some(Ok(outcome)) => outcome,
            _ => {
                let rank = self.aborter.rank();
                Err(CollectiveError::Aborted {
                    rank,
                    reason: format!(
                        "the communication stream's thread panicked before or in {}",
                        self.operation
                    ),
                })
            }
        }
    }
}

impl<B> Drop for Pending<B> {
    fn drop(&mut self) {
        if self.result.is_some() {
            self.aborter.close(CollectiveError::Dropped {
                rank: self.aborter.rank(),
                operation: self.operation,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::{Options, run_ranks};

    #[test]
    fn what_is_under_way_is_handed_back_and_what_is_through_hands_its_buffer_over() {
        let ranks = run_ranks(2, &Options::default(), |mut comm| {
            let stream = communication_streams(&mut comm, 1)?.remove(0);
            let (go, gate) = channel::<()>();
            let mut pending = stream.start("gated", vec![1.0f32; 4], move |comm, buffer| {
                // Disconnected is as good: the test has gone on.
                let _ = gate.recv();
                comm.all_reduce(buffer, ReduceOp::Sum)
            });
            pending = pending.try_wait().expect_err("nobody has opened the gate");
            drop(go);
            let buffer = loop {
                match pending.try_wait() {
                    Ok(outcome) => break outcome?,
                    Err(under_way) => pending = under_way,
                }
                std::thread::yield_now();
            };
            assert_eq!(buffer, [2.0; 4]);
            let failed = stream.start("failing", (), |_, ()| {
                Err(CollectiveError::Aborted { rank: 7, reason: "on purpose".to_owned() })
            });
            let outcome = match failed.try_wait() {
                Ok(outcome) => outcome,
                Err(under_way) => under_way.wait(),
            };
            let error = outcome.expect_err("it fails");
            assert!(error.to_string().contains("on purpose"));
            Ok::<(), CollectiveError>(())
        });
        for rank in ranks.unwrap() {
            rank.unwrap().unwrap();
        }
    }
}

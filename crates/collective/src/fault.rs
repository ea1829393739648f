//! Communicators that fail on purpose.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{
    Buffers, Call, CollectiveError, Collectives, Communicator, Membership, RankMemory,
    ReduceUpdate, Replica,
};

/// Time between two looks whether a group has failed.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// One fault: what happens at which call of which rank. A list of faults is a scenario, and can be
/// kept as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The rank that misbehaves.
    pub rank: usize,
    /// The number of the call, among the rank's calls, counted from 1; splits count too.
    pub call: u64,
    /// The way in which the rank misbehaves.
    pub kind: FaultKind,
}

/// Ways in which a rank misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The rank does not take part and says so.
    Fail,
    /// The rank comes late by this many milliseconds; harmless below the timeout.
    DelayMs(u64),
    /// The rank stays away for this many milliseconds, longer than the timeout, then goes on as if
    /// nothing had happened.
    StallMs(u64),
    /// The rank stays away until its group has failed without it, this many milliseconds at most.
    StallUntilFailed(u64),
    /// The rank panics instead of taking part.
    Kill,
    /// The rank flips the lowest bit of one byte of its input and tells nobody; the byte is counted
    /// modulo the input's length.
    Corrupt(usize),
    /// The rank takes part in a barrier first, so that its order of calls is another.
    Reorder,
}

/// A communicator that misbehaves as a scenario says.
#[derive(Debug)]
pub struct Faulty<C> {
    inner: C,
    faults: Vec<Fault>,
    calls: u64,
}

impl<C: Communicator> Faulty<C> {
    /// Wraps a communicator; faults of other ranks are left out.
    pub fn new(inner: C, scenario: &[Fault]) -> Self {
        let rank = inner.rank();
        let own = scenario.iter().filter(|fault| fault.rank == rank);
        Self { inner, faults: own.copied().collect(), calls: 0 }
    }

    /// Counts a call and misbehaves as far as a rank can before the call; returns the byte to
    /// corrupt.
    fn before_call(&mut self) -> Result<Option<usize>, CollectiveError> {
        self.calls += 1;
        let mut corrupt = None;
        for fault in self.faults.iter().filter(|fault| fault.call == self.calls) {
            match fault.kind {
                FaultKind::Fail => {
                    let reason = format!("fault at call {}", self.calls);
                    let error = CollectiveError::Aborted { rank: fault.rank, reason };
                    self.inner.aborter().close(error.clone());
                    return Err(error);
                }
                FaultKind::DelayMs(millis) | FaultKind::StallMs(millis) => {
                    std::thread::sleep(Duration::from_millis(millis));
                }
                FaultKind::StallUntilFailed(millis) => {
                    let (aborter, begun) = (self.inner.aborter(), Instant::now());
                    let most = Duration::from_millis(millis);
                    while aborter.failure().is_none() && begun.elapsed() < most {
                        std::thread::sleep(LOOK_EVERY);
                    }
                }
                // Without the panic hook: writing a backtrace can take longer than a short timeout,
                // and there is nothing to find.
                FaultKind::Kill => std::panic::resume_unwind(Box::new(format!(
                    "fault at call {}: rank {} is killed",
                    self.calls, fault.rank
                ))),
                FaultKind::Corrupt(byte) => corrupt = Some(byte),
                FaultKind::Reorder => self.inner.barrier()?,
            }
        }
        Ok(corrupt)
    }
}

impl<C: Communicator> Communicator for Faulty<C> {
    crate::forward_calls! {
        this => this.inner;
        rank, world_size, set_context, aborter, recorder, allocate, shares_memory, failure,
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        let Some(byte) = self.before_call()? else {
            return self.inner.execute(call);
        };
        let flip = |bytes: &mut [u8]| {
            if !bytes.is_empty() {
                bytes[byte % bytes.len()] ^= 1;
            }
        };
        match call.buffers {
            Buffers::InPlace(buffer) => {
                flip(buffer);
                let buffers = Buffers::InPlace(buffer);
                self.inner.execute(Call { buffers, ..call })
            }
            Buffers::OutOfPlace { send, receive } => {
                let mut send = send.to_vec();
                flip(&mut send);
                let buffers = Buffers::OutOfPlace { send: &send, receive };
                self.inner.execute(Call { buffers, ..call })
            }
        }
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        self.before_call()?;
        self.inner.split(membership)
    }

    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let Some(byte) = self.before_call()? else {
            return self.inner.reduce_update(call, work);
        };
        let mut grads = call.grads.to_vec();
        if !grads.is_empty() {
            let byte = byte % grads.len();
            grads[byte] ^= 1;
        }
        // Of lifetimes as short as that of these gradients.
        let shorter = call.replicas.into_iter().map(|replica| Replica { ..replica });
        let call = ReduceUpdate {
            grad_dtype: call.grad_dtype,
            grads: &grads,
            replicas: shorter.collect(),
            counts: call.counts,
        };
        self.inner.reduce_update(call, work)
    }
}

//! Exchange of data: messages are cut to lengths that MPI can count, and no call returns while MPI
//! uses its memory.

use std::time::{Duration, Instant};

use fusestep_collective::Fingerprint;

use crate::Compare;
use crate::by_messages::ByMessages;
use crate::library::{Kind, Request};
use crate::meeting::POLLING;

/// Polls between two looks at the clock.
const POLLS: u32 = 32;

/// Bytes that go to or come from a rank.
pub(crate) struct Message<'a> {
    pub(crate) peer: usize,
    pub(crate) kind: Kind,
    pub(crate) bytes: Bytes<'a>,
}

pub(crate) enum Bytes<'a> {
    Out(&'a [u8]),
    In(&'a mut [u8]),
}

impl<'a> Message<'a> {
    pub(crate) fn out(peer: usize, kind: Kind, bytes: &'a [u8]) -> Self {
        Self { peer, kind, bytes: Bytes::Out(bytes) }
    }

    pub(crate) fn into(peer: usize, kind: Kind, bytes: &'a mut [u8]) -> Self {
        Self { peer, kind, bytes: Bytes::In(bytes) }
    }
}

/// Moves all messages. Between two ranks, messages of a kind arrive in the order in which they are
/// given on both sides.
///
/// Ends the job if messages have not moved by the deadline: MPI cannot give back memory that a
/// message uses. Headers were exchanged before, so a missing rank is found earlier than here.
pub(crate) fn messages<'a>(
    comm: &mut ByMessages,
    messages: impl IntoIterator<Item = Message<'a>>,
    print: &Fingerprint,
) {
    let (group, pending) = (&comm.group, &mut comm.pending);
    let limit = group.options.chunk_limit_bytes.clamp(1, i32::MAX as usize);
    let fail = |reason: String| -> ! { group.die(group.failed(print.operation.name(), reason)) };
    pending.clear();
    // Held to the end of this function: what `pending` uses is borrowed until then.
    let mut held: Vec<Message<'a>> = messages.into_iter().collect();
    for message in &mut held {
        let (peer, kind) = (group.members[message.peer], message.kind);
        // SAFETY: the messages borrow their bytes until this function returns, which it does when
        // every request is done; it ends the process otherwise, and nothing here
        // panics in between. Chunks are cut to what an int counts.
        let mut start = |request: Result<Request, String>| match request {
            Ok(request) => pending.push((request, message.peer)),
            Err(reason) => fail(reason),
        };
        match &mut message.bytes {
            Bytes::Out(bytes) => {
                for chunk in bytes.chunks(limit) {
                    // SAFETY: as said above.
                    start(unsafe { group.mpi.send(chunk, peer, group.tag, kind) });
                }
            }
            Bytes::In(bytes) => {
                for chunk in bytes.chunks_mut(limit) {
                    // SAFETY: as said above.
                    start(unsafe { group.mpi.receive(chunk, peer, group.tag, kind) });
                }
            }
        }
    }
    let (begun, mut ending) = (Instant::now(), None);
    let unannounced = group.options.compare == Compare::FirstOfEach;
    let mut polls = 0u32;
    while !pending.is_empty() {
        pending.retain_mut(|(request, _)| match group.mpi.done(request) {
            Ok(done) => !done,
            Err(reason) => fail(reason),
        });
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(POLLS) {
            let waited = begun.elapsed();
            POLLING.pause(waited);
            if unannounced {
                group.poll();
                if group.is_ending() && since(&mut ending) > group.grace() {
                    group.die(group.settle_as_told());
                }
            }
            if waited > group.timeout.get() {
                let mut ranks: Vec<usize> = pending.iter().map(|(_, rank)| *rank).collect();
                ranks.sort_unstable();
                ranks.dedup();
                group.die(print.late(ranks, group.timeout.get()));
            }
        }
    }
    drop(held);
}

/// The time since the first call with this `first`.
fn since(first: &mut Option<Instant>) -> Duration {
    first.get_or_insert_with(Instant::now).elapsed()
}

//! Which bucket is reduced when, and who has its memory.

use super::comms::Reducing;
use super::words::Words;

/// Which buckets may start, in one order on all ranks.
///
/// A bucket starts when all its gradients have been given and all buckets before it have started. So ranks whose gradients become
/// ready in different orders still make their calls in one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ready {
    /// Gradients of each bucket.
    of: Vec<usize>,
    /// Those that each still waits for in this micro-step.
    missing: Vec<usize>,
    /// Buckets before this one have been started.
    next: usize,
}

impl Ready {
    /// Buckets of so many gradients each, none of them given.
    pub(crate) fn new(of: Vec<usize>) -> Self {
        Self {
            missing: of.clone(),
            of,
            next: 0,
        }
    }

    /// Counts a gradient of a bucket.
    pub(crate) fn given(&mut self, bucket: usize) {
        // Buckets of slices that each rank has for itself are not among them.
        if let Some(missing) = self.missing.get_mut(bucket) {
            *missing = missing.saturating_sub(1);
        }
    }

    /// The next bucket, if all its gradients are there.
    pub(crate) fn full(&self) -> Option<usize> {
        (self.missing.get(self.next) == Some(&0)).then_some(self.next)
    }

    /// The next bucket, full or not: after the backward pass nothing more will come.
    pub(crate) fn rest(&self) -> Option<usize> {
        (self.next < self.of.len()).then_some(self.next)
    }

    /// Counts the next bucket as started.
    pub(crate) fn start(&mut self) {
        self.next += 1;
    }

    /// Buckets that have started.
    pub(crate) fn started(&self) -> usize {
        self.next
    }

    /// Waits for all gradients again, in a micro-step whose buckets start from the first.
    pub(crate) fn again(&mut self) {
        self.next = 0;
        self.missing.clone_from(&self.of);
    }
}

/// A bucket's memory: whoever reduces it owns it, so nobody can touch it on its way.
#[derive(Debug)]
pub(crate) enum Slot {
    /// Gradients are being written.
    Filling(Words),
    /// A call has it.
    InFlight(Reducing),
    /// A call has failed with it.
    Lost,
}

impl Slot {
    /// The memory, to be written to; allocated if it was given back. `None` if a call has it.
    pub(crate) fn filling(&mut self, len_bytes: usize) -> Option<&mut Words> {
        match self {
            Slot::Filling(words) => {
                if words.bytes().len() != len_bytes {
                    *words = Words::zeroed(len_bytes);
                }
                Some(words)
            }
            Slot::InFlight(_) | Slot::Lost => None,
        }
    }

    /// The memory, to be given to a call; `None` if one has it already.
    pub(crate) fn take(&mut self) -> Option<Words> {
        match std::mem::replace(self, Slot::Lost) {
            Slot::Filling(words) => Some(words),
            other => {
                *self = other;
                None
            }
        }
    }
}

#[cfg(test)]
#[path = "ready_tests.rs"]
mod tests;

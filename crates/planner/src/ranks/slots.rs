//! Who has a bucket's memory.

use super::comms::Reducing;
use super::words::Words;
use super::{RankPlan, RankState};
use crate::PlanError;

/// A bucket's memory: whoever reduces it owns it, so nobody can touch it on its way.
#[derive(Debug)]
pub(crate) enum Slot {
    /// Gradients are being written, or are about to be.
    Filling(Words),
    /// A call has it.
    InFlight(Reducing),
    /// It has been reduced, and this rank's part is in its shard.
    Through,
    /// A call has failed with it.
    Lost,
}

/// The memory of all buckets.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    /// Memory of buckets that are through, for those that come.
    spare: Vec<Words>,
    /// Bytes of all of it, and the most there have been since they were last asked for.
    held_bytes: usize,
    peak_bytes: usize,
    /// So many buckets, the first, are through.
    through: usize,
}

impl Slots {
    pub(crate) fn new(slots: Vec<Slot>) -> Self {
        let mut new = Self {
            slots,
            spare: Vec::new(),
            held_bytes: 0,
            peak_bytes: 0,
            through: 0,
        };
        new.held_bytes = new.filling_bytes();
        new.peak_bytes = new.held_bytes;
        new
    }

    pub(crate) fn get(&self, index: usize) -> &Slot {
        &self.slots[index]
    }

    pub(crate) fn put(&mut self, index: usize, slot: Slot) {
        self.slots[index] = slot;
    }

    /// The slot's contents; it counts as lost until something is put back.
    pub(crate) fn take(&mut self, index: usize) -> Slot {
        std::mem::replace(&mut self.slots[index], Slot::Lost)
    }

    /// The memory of a bucket, to be written to; if it was given back, that of a bucket that is through, or new. `None` if a call
    /// has it.
    pub(crate) fn filling(&mut self, index: usize, len_bytes: usize) -> Option<&mut Words> {
        let Slot::Filling(words) = &mut self.slots[index] else {
            return None;
        };
        if words.bytes().len() != len_bytes {
            let fits = |spare: &Words| spare.held_bytes() >= len_bytes;
            let spare = self.spare.iter().position(fits);
            let reused = spare.map(|at| self.spare.swap_remove(at).reused(len_bytes));
            *words = match reused {
                Some(Ok(reused)) => reused,
                _ => {
                    let new = Words::zeroed(len_bytes);
                    self.held_bytes += len_bytes;
                    self.peak_bytes = self.peak_bytes.max(self.held_bytes);
                    new
                }
            };
        }
        Some(words)
    }

    /// The memory of a bucket, to be given to a call; `None` if one has it already.
    pub(crate) fn start(&mut self, index: usize) -> Option<Words> {
        match self.take(index) {
            Slot::Filling(words) => Some(words),
            other => {
                self.put(index, other);
                None
            }
        }
    }

    /// Takes the memory of a bucket that is through, for others.
    fn through(&mut self, index: usize, words: Words) {
        self.slots[index] = Slot::Through;
        self.through = index + 1;
        self.spare.push(words);
    }

    /// Gives back what no bucket has, and says the most bytes that there have been since the last time.
    pub(crate) fn settle(&mut self) -> usize {
        self.spare.clear();
        self.through = 0;
        self.held_bytes = self.filling_bytes();
        std::mem::replace(&mut self.peak_bytes, self.held_bytes)
    }

    /// Makes all slots fit to be written to: a call that has failed has kept the memory.
    pub(crate) fn restore(&mut self) {
        for slot in &mut self.slots {
            if !matches!(slot, Slot::Filling(_)) {
                *slot = Slot::Filling(Words::default());
            }
        }
        self.settle();
    }

    /// Bytes of buckets, on their way or not, and of what is kept for others.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    fn filling_bytes(&self) -> usize {
        let bytes = |slot: &Slot| match slot {
            Slot::Filling(words) => words.bytes().len(),
            Slot::InFlight(_) | Slot::Through | Slot::Lost => 0,
        };
        self.slots.iter().map(bytes).sum()
    }
}

impl RankPlan {
    /// Takes this rank's part out of the next buckets that are through, without waiting, so that those that come use their memory.
    /// Giving a gradient does so too. Returns how many have been started and not been taken.
    ///
    /// Below ZeRO stage 2 buckets keep their memory, and with shard groups they go on across groups when the step is run: nothing is
    /// taken then.
    ///
    /// # Errors
    /// [`PlanError::Collective`], and the state refuses further steps then.
    pub fn take_reduced(&self, state: &mut RankState) -> Result<usize, PlanError> {
        let groups = self.shard_place().world < self.topology().world;
        let started = state.ready.started();
        while state.slots.through < started {
            let index = state.slots.through;
            if self.keeps(index) || groups {
                break;
            }
            match state.slots.take(index) {
                Slot::InFlight(Reducing::Pending(pending)) => match pending.try_wait() {
                    Ok(Ok(words)) => {
                        self.take_own_part(state, index, &words);
                        state.slots.through(index, words);
                    }
                    Ok(Err(error)) => {
                        self.poison(state);
                        return Err(error.into());
                    }
                    Err(pending) => {
                        let pending = Slot::InFlight(Reducing::Pending(pending));
                        state.slots.put(index, pending);
                        break;
                    }
                },
                other => {
                    state.slots.put(index, other);
                    break;
                }
            }
        }
        Ok(started.saturating_sub(state.slots.through))
    }
}

//! A group of threads: the state that its ranks have in common.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::options::Options;
use crate::rendezvous::{Participant, Rendezvous, participants};
use crate::{Begun, CollectiveError, Fingerprint, Membership, Pair, behind};

/// Header that a rank brings to a round besides memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) fingerprint: Fingerprint,
    pub(super) placement: Placement,
    /// Nanoseconds from the group's beginning to the rank's arrival.
    pub(super) arrived_ns: u64,
    pub(super) membership: Option<Membership>,
}

impl Header {
    /// The header of a call that moves data.
    pub(super) fn of(begun: &Begun<'_>, placement: Placement) -> Self {
        let Begun { print: fingerprint, arrived_ns, .. } = *begun;
        Self { fingerprint, placement, arrived_ns, membership: None }
    }
}

/// Place of a rank's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// In the rank's writable memory, where its result goes too.
    Writable,
    /// In the rank's shared memory.
    Shared,
}

pub(super) type GroupParticipant = Participant<Header, CollectiveError>;
type GroupRendezvous = Rendezvous<Header, CollectiveError>;

/// A group of threads; each rank holds one reference.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) world_size: usize,
    pub(super) options: Options,
    pub(super) begun: Instant,
    rendezvous: GroupRendezvous,
    registry: Mutex<Registry>,
    /// For each rank the other side of the transfer that it waits in, plus 1; 0 if it is in none.
    /// The numbers name late ranks and guard nothing.
    transfers: Box<[AtomicUsize]>,
}

#[derive(Debug, Default)]
struct Registry {
    /// Participants of pairs, the sender's and the receiver's, until their ranks fetch them.
    pairs: HashMap<Pair, [Option<GroupParticipant>; 2]>,
    /// Participants of subgroups, by call and colour, until their ranks fetch them.
    forming: HashMap<(u64, u32), Forming>,
    /// Rendezvous of pairs, which must be told when the group is closed.
    pair_rendezvous: Vec<(Pair, GroupRendezvous)>,
    children: Vec<Weak<Group>>,
    /// The first error other than a rank's leaving.
    broken: Option<CollectiveError>,
    /// Ranks that left, each with the error that says so.
    left: Vec<(usize, CollectiveError)>,
}

#[derive(Debug)]
struct Forming {
    group: Arc<Group>,
    participants: Vec<Option<GroupParticipant>>,
}

impl Group {
    pub(super) fn new(world_size: usize, options: Options) -> (Arc<Self>, Vec<GroupParticipant>) {
        // A group of no ranks has a rendezvous too: one participant is made in any case.
        let mut participants = participants(world_size.max(1));
        let rendezvous = participants[0].of().clone();
        participants.truncate(world_size);
        let group = Arc::new(Self {
            world_size,
            options,
            begun: Instant::now(),
            rendezvous,
            registry: Mutex::default(),
            transfers: (0..world_size).map(|_| AtomicUsize::new(0)).collect(),
        });
        (group, participants)
    }

    /// Writes down the rank that `rank` waits for in a transfer, or that the transfer has ended.
    pub(super) fn set_transfer(&self, rank: usize, peer: Option<usize>) {
        self.transfers[rank].store(peer.map_or(0, |peer| peer + 1), Ordering::SeqCst);
    }

    /// The ranks that cause a delay for which `rank` blames the ranks `late`; see [`behind`].
    pub(super) fn behind(&self, rank: usize, late: &[usize]) -> Vec<usize> {
        behind(rank, self.world_size, late, |rank| {
            self.transfers[rank].load(Ordering::SeqCst).checked_sub(1)
        })
    }

    /// Closes the group, its transfers and its subgroups; returns the first error, which holds.
    ///
    /// A rank that leaves in peace ends the calls of all ranks and its own transfers. Transfers
    /// between other ranks go on, and an error of theirs is returned as it is. Subgroups go on too:
    /// the rank gives up its places there by itself.
    pub(super) fn close(&self, error: CollectiveError) -> CollectiveError {
        let first = self.rendezvous.fail(error.clone());
        let mut registry = self.registry();
        if let CollectiveError::Left { rank, .. } = error {
            for (_, rendezvous) in
                registry.pair_rendezvous.iter().filter(|(pair, _)| pair.has(rank))
            {
                rendezvous.fail(error.clone());
            }
            registry.left.push((rank, error));
            return first;
        }
        let error = registry.broken.get_or_insert(error).clone();
        for (_, rendezvous) in &registry.pair_rendezvous {
            rendezvous.fail(error.clone());
        }
        let children: Vec<_> = registry.children.iter().filter_map(Weak::upgrade).collect();
        drop(registry);
        for child in children {
            child.close(error.clone());
        }
        match first {
            CollectiveError::Left { .. } => error,
            first => first,
        }
    }

    /// The error that has closed the group: the first error, or else the first rank's leaving.
    pub(super) fn failure(&self) -> Option<CollectiveError> {
        let broken = self.registry().broken.clone();
        broken.or_else(|| self.rendezvous.failure())
    }

    /// The participant of one side of a pair for its transfers.
    pub(super) fn pair_participant(
        &self,
        pair: Pair,
        side: usize,
    ) -> Result<GroupParticipant, CollectiveError> {
        let mut registry = self.registry();
        let gone = |rank: usize| {
            let left = registry.left.iter().find(|(left, _)| *left == rank);
            left.map(|(_, error)| error)
        };
        let broken = registry.broken.as_ref();
        if let Some(error) = broken.or_else(|| gone(pair.sender)).or_else(|| gone(pair.receiver)) {
            return Err(error.clone());
        }
        let Registry { pairs, pair_rendezvous, .. } = &mut *registry;
        let waiting = pairs.entry(pair).or_insert_with(|| {
            let mut both = participants(2).into_iter();
            let [sender, receiver] = [both.next(), both.next()];
            pair_rendezvous
                .extend(sender.as_ref().map(|participant| (pair, participant.of().clone())));
            [sender, receiver]
        });
        let participant = waiting[side]
            .take()
            .expect("a rank keeps its participant of a pair and asks for it once");
        if waiting.iter().all(Option::is_none) {
            pairs.remove(&pair);
        }
        Ok(participant)
    }

    /// Place `rank` in the subgroup of `world_size` ranks that call number `call` makes for
    /// `colour`.
    pub(super) fn subgroup(
        &self,
        call: u64,
        colour: u32,
        rank: usize,
        world_size: usize,
    ) -> (Arc<Group>, GroupParticipant) {
        let mut registry = self.registry();
        let Registry { forming, children, .. } = &mut *registry;
        let subgroup = forming.entry((call, colour)).or_insert_with(|| {
            let (group, participants) = Group::new(world_size, self.options.clone());
            children.retain(|child| child.strong_count() > 0);
            children.push(Arc::downgrade(&group));
            let participants = participants.into_iter().map(Some).collect();
            Forming { group, participants }
        });
        let participant = subgroup.participants[rank]
            .take()
            .expect("each rank of a subgroup takes its own participant");
        let group = Arc::clone(&subgroup.group);
        if subgroup.participants.iter().all(Option::is_none) {
            forming.remove(&(call, colour));
        }
        // The group was closed in between: the subgroup was not yet in the list, so nobody told it.
        if let Some(error) = registry.broken.clone() {
            drop(registry);
            group.close(error);
        }
        (group, participant)
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The engine of ranks that are threads: one rank's side of a group.

use std::collections::HashMap;
use std::sync::Arc;

use super::group::{Group, GroupParticipant};
use crate::Pair;

/// One rank's engine in a group of threads.
#[derive(Debug)]
pub struct Threads {
    pub(super) group: Arc<Group>,
    pub(super) rank: usize,
    pub(super) participant: GroupParticipant,
    /// Ends of the parts of the writable memory, made anew by each call.
    pub(super) ends: Vec<usize>,
    /// Participants for transfers.
    pub(super) pairs: HashMap<Pair, GroupParticipant>,
}

impl Threads {
    pub(super) fn new(group: Arc<Group>, rank: usize, participant: GroupParticipant) -> Self {
        let ends = vec![0; group.world_size];
        Self { group, rank, participant, ends, pairs: HashMap::new() }
    }
}

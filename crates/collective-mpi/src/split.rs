//! How ranks come together in subgroups: they exchange memberships, and those of one colour take a
//! tag that no other group has.

use std::sync::Arc;

use fusestep_collective::{CollectiveError, Fingerprint, Membership};

use crate::communicator::MpiCommunicator;
use crate::group::{Founding, Group};
use crate::meeting::Party;
use crate::native::Native;
use crate::wire::Header;

/// A subgroup that all its ranks know of.
pub(crate) struct Subgroup {
    founding: Founding,
    /// The number that its leader gave it.
    number: u32,
}

/// Finds this rank's subgroup, if it joins one.
pub(crate) fn join(
    comm: &mut MpiCommunicator,
    print: Fingerprint,
    membership: Option<Membership>,
) -> Result<Option<Subgroup>, CollectiveError> {
    let own =
        Header { fingerprint: print, membership, proposal: comm.group.engine.reserve_group() };
    let rank = comm.group.rank;
    let headers = comm.meet(Party::All(print.sequence), own)?;
    let Some(own) = membership else {
        return Ok(None);
    };
    let ranks = own.members(headers.len(), |other| headers[other].membership);
    let leader = ranks.iter().copied().min().unwrap_or(rank);
    let number = headers[leader].proposal;
    let place = ranks.iter().position(|&other| other == rank).unwrap_or(0);
    let group = &comm.group;
    let leader = group.members[leader];
    let tag = group.engine.group_tag(leader, number);
    let tag = tag.ok_or_else(|| {
        let reason = format!(
            "expected tags for one more group, found none left after {number} groups led by \
             process {leader}; split less often and keep the groups"
        );
        CollectiveError::refused(rank, "split", reason)
    })?;
    let mut options = group.options.clone();
    options.timeout = group.timeout();
    options.dump_folder = options.dump_folder.map(|folder| folder.join(format!("group-{tag}")));
    let founding = Founding {
        members: ranks.iter().map(|&other| group.members[other]).collect(),
        rank: place,
        tag,
        options,
    };
    Ok(Some(Subgroup { founding, number }))
}

impl Subgroup {
    /// Founds it, with MPI's own group beside it where `parent` has one.
    pub(crate) fn found(
        self,
        parent: &MpiCommunicator,
    ) -> Result<(Arc<Group>, Option<Native>), CollectiveError> {
        let native = match &parent.native {
            None => None,
            Some(native) => {
                // All are here, but MPI's own setting up does not come back by itself.
                let _watched = parent.group.watched(parent.group.now_ns());
                let made = native.of_members(&self.founding.members, self.number);
                Some(made.map_err(|reason| parent.group.refused("split", reason))?)
            }
        };
        let engine = Arc::clone(&parent.group.engine);
        let group = Group::new(engine, self.founding, Some(Arc::clone(&parent.group)));
        Ok((group, native))
    }
}

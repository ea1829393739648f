//! Split of a group: ranks exchange memberships, and ranks of one colour take a tag that no other
//! group has.

use std::sync::Arc;

use fusestep_collective::{Begun, CollectiveError, Membership};

use crate::by_messages::ByMessages;
use crate::group::{Founding, Group};
use crate::party::Party;
use crate::wire::Header;

/// Makes this rank's engine in its subgroup, if it joins one, with a communicator of MPI's own if
/// the group has one.
pub(crate) fn join(
    comm: &mut ByMessages,
    begun: &mut Begun<'_>,
    membership: Option<Membership>,
) -> Result<Option<ByMessages>, CollectiveError> {
    let (fingerprint, rank) = (begun.print, comm.group.rank);
    let own = Header { fingerprint, membership, proposal: comm.group.mpi.reserve_group() };
    let headers = comm.meet(begun, Party::All(fingerprint.sequence), own)?;
    let Some(own) = membership else {
        return Ok(None);
    };
    let ranks = own.members(headers.len(), |other| headers[other].membership);
    let leader = ranks.iter().copied().min().unwrap_or(rank);
    let number = headers[leader].proposal;
    let place = ranks.iter().position(|&other| other == rank).unwrap_or(0);
    let group = &comm.group;
    let leader = group.members[leader];
    let tag = group.mpi.group_tag(leader, number);
    let tag = tag.ok_or_else(|| {
        let reason = format!(
            "expected tags for one more group, found none left after {number} groups led by \
             process {leader}; split less often and keep the groups"
        );
        CollectiveError::refused(rank, "split", reason)
    })?;
    let members: Vec<usize> = ranks.iter().map(|&other| group.members[other]).collect();
    let native = match &comm.native {
        None => None,
        Some(native) => {
            // All ranks have come, but this call of MPI has no timeout of its own.
            let _watched = group.watched(group.now_ns());
            let made = native.of_members(&members, number);
            Some(made.map_err(|reason| group.failed("split", reason))?)
        }
    };
    let mut options = group.options.clone();
    options.timeout = group.timeout.get();
    let founding = Founding { members, rank: place, tag, options };
    let joined = Group::new(Arc::clone(&group.mpi), founding, Some(Arc::clone(group)));
    Ok(Some(ByMessages::new(joined, native)))
}

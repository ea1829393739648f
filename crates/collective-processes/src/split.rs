//! How ranks come together in subgroups: two rounds that move nothing.

use std::sync::Arc;

use fusestep_collective::{CollectiveError, Membership};

use crate::card::Cards;
use crate::communicator::ProcessCommunicator;
use crate::group::{Founding, Group};
use crate::task::Task;

/// Exchanges memberships, then the place where the group's leader has put its block.
pub(crate) fn form(
    comm: &mut ProcessCommunicator,
    mut task: Task,
    membership: Option<Membership>,
) -> Result<Option<Founding>, CollectiveError> {
    task.card.membership = membership;
    let all: Vec<Option<Membership>> = round(comm, &task, |cards| {
        let parties = 0..cards.parties();
        parties.map(|party| cards.membership(party)).collect()
    })?;
    let ranks = membership.map_or(Vec::new(), |own| own.members(all.len(), |rank| all[rank]));
    let own = comm.group.rank;
    let mut memory = None;
    if ranks.first() == Some(&own) {
        let made = Group::found(&comm.group.session, ranks.len());
        let made = made.map_err(|error| {
            let reason = format!("expected shared memory for one more group, found {error}");
            comm.refused("split", reason)
        })?;
        task.card.block = made.offset();
        memory = Some(made);
    }
    let blocks: Vec<u64> = round(comm, &task, |cards| {
        let parties = 0..cards.parties();
        parties.map(|party| cards.block(party)).collect()
    })?;
    let place = ranks.iter().position(|&other| other == own);
    Ok(place.map(|rank| Founding {
        block: blocks[ranks[0]],
        members: ranks.iter().map(|&rank| comm.group.members[rank]).collect(),
        rank,
        memory,
        parent: Some(Arc::clone(&comm.group)),
    }))
}

/// A round that moves nothing; what `read` makes of the cards.
fn round<R>(
    comm: &mut ProcessCommunicator,
    task: &Task,
    read: impl FnOnce(Cards<'_>) -> R,
) -> Result<R, CollectiveError> {
    let ProcessCommunicator { group, place, recorder, .. } = comm;
    let ranks = place.ranks.clone();
    let outcome = group.round(place, task, 0, |cards| {
        task.agree(recorder, cards, &ranks)?;
        Ok(read(cards))
    });
    outcome.unwrap_or_else(|broken| Err(comm.settle(broken, &mut None, false)))
}

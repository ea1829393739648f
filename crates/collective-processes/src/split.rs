//! Splits: ranks come together in subgroups by two rounds that move no elements.

use std::sync::Arc;

use fusestep_collective::{Begun, CollectiveError, Membership};

use crate::card::Cards;
use crate::engine::Processes;
use crate::group::{Founding, Group};
use crate::task::Task;

impl Processes {
    /// Exchanges memberships, then the offset of the block that each subgroup's leader has made.
    pub(crate) fn form(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Founding>, CollectiveError> {
        let mut task = Task::new(begun, &self.group);
        task.card.membership = membership;
        let all: Vec<Option<Membership>> = self.round(begun, &task, |cards| {
            let parties = 0..cards.parties();
            parties.map(|party| cards.membership(party)).collect()
        })?;
        let ranks = membership.map_or(Vec::new(), |own| own.members(all.len(), |rank| all[rank]));
        let own = self.group.rank;
        let mut memory = None;
        if ranks.first() == Some(&own) {
            let made = Group::found(&self.group.session, ranks.len());
            let made = made.map_err(|error| {
                let reason = format!("expected shared memory for one more group, found {error}");
                self.refused("split", reason)
            })?;
            task.card.block = made.offset();
            memory = Some(made);
        }
        let blocks: Vec<u64> = self.round(begun, &task, |cards| {
            let parties = 0..cards.parties();
            parties.map(|party| cards.block(party)).collect()
        })?;
        let place = ranks.iter().position(|&other| other == own);
        Ok(place.map(|rank| Founding {
            block: blocks[ranks[0]],
            members: ranks.iter().map(|&rank| self.group.members[rank]).collect(),
            rank,
            memory,
            parent: Some(Arc::clone(&self.group)),
        }))
    }

    /// Holds a round that moves no elements; returns what `read` makes of the cards.
    fn round<R>(
        &mut self,
        begun: &mut Begun<'_>,
        task: &Task,
        read: impl FnOnce(Cards<'_>) -> R,
    ) -> Result<R, CollectiveError> {
        let Self { group, place, .. } = self;
        let ranks = place.ranks.clone();
        let outcome = group.round(place, task, 0, |cards| {
            task.agree(begun, cards, &ranks)?;
            Ok(read(cards))
        });
        outcome.unwrap_or_else(|broken| Err(self.settle(begun, broken, &mut None, false)))
    }
}

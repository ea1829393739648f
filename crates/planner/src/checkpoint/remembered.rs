//! Texts of a rank's own in a checkpoint: random state, its place in the data.

use std::collections::BTreeMap;

use super::agree;
use crate::comms::Comms;
use crate::{Plan, PlanError, Topology};

/// What a checkpoint's texts of all ranks are called, and those of rank `r` with `#r` behind.
const KEY: &str = "remembered";

/// Texts under names, such as a serialized random generator, that go with a rank's checkpoint and
/// come back with it.
///
/// Each rank has its own. They come back on as many ranks as they were saved on; on another number
/// only if all ranks had the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remembered(BTreeMap<String, String>);

impl Remembered {
    /// Puts a text under a name, in place of the one there.
    pub fn set(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.0.insert(name.into(), text.into());
    }

    /// The text under a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Adds the texts of all ranks to those that rank 0 saves. All ranks call it.
    ///
    /// # Errors
    /// [`PlanError::Collective`].
    pub fn gather(
        &self,
        plan: &Plan,
        comms: &mut Comms<'_>,
        caller: &mut BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        let own = if self.0.is_empty() {
            String::new()
        } else {
            serde_json::to_string(&self.0).unwrap_or_default()
        };
        let all = agree::gather_texts(plan, comms, &own)?;
        if all.iter().all(|text| *text == all[0]) {
            if !all[0].is_empty() {
                caller.insert(KEY.to_owned(), own);
            }
            return Ok(());
        }
        for (rank, text) in all.into_iter().enumerate() {
            caller.insert(format!("{KEY}#{rank}"), text);
        }
        Ok(())
    }

    /// Takes over what a checkpoint's texts have for this rank; nothing of what was set before
    /// stays.
    pub fn restore(&mut self, topology: Topology, caller: &BTreeMap<String, String>) {
        let of_rank = |rank: usize| caller.get(&format!("{KEY}#{rank}"));
        let as_many = of_rank(topology.world.saturating_sub(1)).is_some()
            && of_rank(topology.world).is_none();
        let own = caller.get(KEY).or_else(|| of_rank(topology.rank).filter(|_| as_many));
        let read = own.and_then(|text| serde_json::from_str(text).ok());
        self.0 = read.unwrap_or_default();
    }
}

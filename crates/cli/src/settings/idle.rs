//! Settings that would do nothing beside others, or on one rank.

use anyhow::anyhow;
use fusestep::OptionError;

use super::{Settings, Subcommand, expected_several};
use crate::output::note;
use crate::planning::{flag_of, refused};

impl<S: Subcommand> Settings<S> {
    /// Refuses settings of many ranks without `what`, the flag of their number. A world of one that
    /// is asked for may be one of several that are tried, so that a note tells what it leaves
    /// without effect.
    ///
    /// # Errors
    /// A setting that would do nothing.
    pub(crate) fn require_several(&self, ranks: Option<usize>, what: &str) -> anyhow::Result<()> {
        if ranks.is_some_and(|count| count > 1) {
            return Ok(());
        }
        if ranks.is_some() {
            // What is refused has no note.
            self.given.check(1).map_err(refused)?;
            let idle = self.given.idle_alone().map_err(refused)?;
            let flags: Vec<String> = idle.into_iter().map(flag_of).collect();
            if !flags.is_empty() {
                note(&format!("note: {}: no effect on one rank", flags.join(", ")));
            }
            return Ok(());
        }
        match self.given.check_alone() {
            Err(OptionError::NeedsRanks { name, .. }) => {
                let found = expected_several(ranks, what);
                Err(anyhow!("{}: {found}; it has no effect on one rank", flag_of(name)))
            }
            checked => checked.map_err(refused),
        }
    }

    /// Whether ranks average parameters in place of gradients.
    pub(crate) fn averages(&self) -> bool {
        self.given.averages()
    }
}

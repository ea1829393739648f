//! Settings that would do nothing beside others, or on one rank.

use anyhow::{anyhow, bail, ensure};
use fusestep::{Changed, OptionError, Section};
use fusestep_tensor::{ParamDesc, counted, grouped};

use super::{Settings, Subcommand, expected_several};
use crate::output::note;
use crate::planning::{flag_of, refused};

/// Most buckets that a cap may ask for. Plans of more take minutes to make, and steps have as many
/// calls.
const MOST_BUCKETS: u64 = 1 << 14;

/// The setting that cuts gradients into buckets.
const CAP: &str = "bucket_cap_mib";

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

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
        self.changed().iter().any(|changed| changed.section == Section::Averages)
    }

    fn changed(&self) -> Vec<Changed> {
        self.given.changed().unwrap_or_default()
    }

    /// Refuses settings of how gradients are reduced, where none are.
    ///
    /// # Errors
    /// The first of them.
    pub(super) fn require_reduced(&self) -> anyhow::Result<()> {
        let changed = self.changed();
        let first_of = |section| changed.iter().find(|changed| changed.section == section);
        let Some(averages) = first_of(Section::Averages) else {
            return Ok(());
        };
        let in_backward = first_of(Section::Backward).is_some();
        let idle = changed.iter().find(|changed| match changed.name {
            // Updates during the backward pass are cut by it, whatever ranks do.
            CAP => !in_backward,
            "reduced" => true,
            _ => changed.section == Section::Calls,
        });
        match idle {
            Some(idle) => bail!(
                "{} and {}: ranks average parameters and send no gradients; remove one",
                flag_of(averages.name),
                flag_of(idle.name)
            ),
            None => Ok(()),
        }
    }

    /// Refuses a cap that cuts a model's gradients into more buckets than a plan can have.
    ///
    /// # Errors
    /// The cap, and the least that works.
    pub(super) fn require_few_buckets(&self, params: &[ParamDesc]) -> anyhow::Result<()> {
        let Some(cap) = self.given.bucket_cap_mib else {
            return Ok(());
        };
        let elements: u64 = params.iter().map(ParamDesc::numel).sum();
        let width = params.iter().map(|param| param.dtype.len_bytes()).max().unwrap_or(1) as u64;
        // A bucket has an element at least.
        let of_bucket = ((cap * MIB) as u64 / width).max(1);
        let buckets = elements.div_ceil(of_bucket);
        let least = (elements.div_ceil(MOST_BUCKETS) * width) as f64 / MIB;
        // Rounded up to two digits, which are all that is printed.
        let unit = 10f64.powi(least.log10().floor() as i32 - 1);
        let least = format!("{:.1e}", (least / unit).ceil() * unit);
        ensure!(
            buckets <= MOST_BUCKETS,
            "{}: expected at most {} of this model's gradients, found some {}; give {} or more",
            flag_of(CAP),
            counted(MOST_BUCKETS, "bucket"),
            grouped(buckets),
            least.parse::<f64>().unwrap_or(1.0)
        );
        Ok(())
    }
}

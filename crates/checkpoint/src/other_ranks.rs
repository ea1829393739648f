//! Values that belong to single ranks, converted so that any number of ranks can resume.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep_planner::PlanError;

use crate::averaged::{ListOfRanks, ListsOfRanks, NoMean};
use crate::manifest::Manifest;
use crate::own_values::PROGRESS;
use crate::refusal::refuse;
use crate::values::WholeTensors;
use crate::{CheckpointFolder, OpenRun, counts};

impl Manifest {
    /// Writes a checkpoint that holds the mean of all ranks, from which any number of ranks can
    /// resume.
    ///
    /// ```text
    /// parameters, state   ((x₀ + x₁) + … ) / n over ranks, in their order: what a LocalSGD run
    ///                     averages, and its optimizer state too. As in such a run, the means of
    ///                     masters and of parameters with remainders are those of 32-bit values,
    ///                     and codes are read, averaged and coded again, to nearest
    /// sums of a window    the same: the mean of m ranks that all have the mean of n is the mean of
    ///                     the n, up to rounding
    /// counts              those of the rank with most steps, the smallest loss scale
    /// ```
    ///
    /// No rank has been in the averaged state, so nothing but this call averages. If a run saves
    /// meanwhile, the newest generation is averaged.
    ///
    /// # Errors
    /// As [`Self::reshard`]; [`PlanError::Checkpoint`] if nothing belongs to single ranks, if ranks
    /// have slices of their own, or other weights of a window's micro-steps.
    pub fn average<'a>(
        &self,
        from: impl Into<CheckpointFolder<'a>>,
        to: impl Into<CheckpointFolder<'a>>,
        count: usize,
    ) -> Result<Self, PlanError> {
        let from = from.into();
        self.check_averages(from.path)?;
        let (read, mut tensors) = self.read_newest(from)?;
        let open = read.check_averages(from.path)?;
        let refuse =
            |what: &str, expected: &str, found: &str| refuse(from.path, what, expected, found);
        let mut manifest = read.clone();
        let of_ranks = read.of_ranks();
        let mut written = Vec::new();
        let mut lists = BTreeMap::new();
        for (base, keys) in &of_ranks {
            let ranks: Vec<&[u8]> = keys.iter().map(|key| tensors.bytes(key)).collect();
            if base == PROGRESS {
                let averaged = counts::averaged(&ranks);
                let counts =
                    averaged.map_err(|what| refuse(base, what, "other ones on some ranks"))?;
                (manifest.step, manifest.skipped) = (counts.step, counts.skipped);
                manifest.loss_scale = counts.loss_scale;
                written.push(Mean { keys, bytes: counts::to_bytes(&counts), non_finite: 0 });
            } else {
                let list = ListOfRanks { dtype: read.tensors[&keys[0]].dtype, ranks };
                lists.insert(base.as_str(), list);
            }
        }
        let lists = ListsOfRanks::new(lists);
        for base in of_ranks.keys().filter(|base| *base != PROGRESS) {
            let means = lists
                .means(base)
                .map_err(|NoMean { expected, found }| refuse(base, expected, &found))?;
            let dtype = |name: &str| read.tensors[&of_ranks[name][0]].dtype;
            // The mean may be infinite or NaN where the ranks' values are, or where it is too
            // large. Only values that their writers have noted may lead to a noted mean.
            let seen = means.iter().flat_map(|(name, _)| &of_ranks[*name]).all(|key| {
                read.tensors[key].dtype.non_finite(tensors.bytes(key)) == tensors.noted(key)
            });
            for (name, bytes) in means {
                let non_finite = dtype(name).non_finite(&bytes);
                let non_finite = if seen { non_finite } else { 0 };
                written.push(Mean { keys: &of_ranks[name], bytes, non_finite });
            }
        }
        for Mean { keys, bytes, non_finite } in written {
            for key in keys {
                tensors.non_finite.remove(key);
            }
            if non_finite > 0 {
                tensors.non_finite.insert(keys[0].clone(), 1);
            }
            for key in &keys[1..] {
                tensors.whole.remove(key);
                manifest.tensors.remove(key);
            }
            tensors.whole.insert(keys[0].clone(), bytes);
        }
        manifest.open = Some(OpenRun { ranks: 1, ..open.clone() });
        manifest.write_whole(&tensors, to.into(), count)
    }

    /// Values that belong to single ranks, if their mean can take their place.
    fn check_averages(&self, folder: &Path) -> Result<&OpenRun, PlanError> {
        let Some(open) = &self.open else {
            let expected = "something that belongs to single ranks";
            let found = "nothing of the kind: any number of ranks can load it";
            return Err(refuse(folder, "average", expected, found));
        };
        if open.lanes.is_some() {
            let expected = "something that belongs to single ranks";
            let found = "a window of lanes: any number of ranks goes on with it as it is";
            return Err(refuse(folder, "average", expected, found));
        }
        if let Some(name) = open.slices.first() {
            let expected = "values that ranks can share";
            return Err(refuse(folder, name, expected, "a slice of each rank's own"));
        }
        Ok(open)
    }

    /// The first tensor or count in which ranks differ; `None` if any number of ranks can resume
    /// from rank 0's values.
    pub(crate) fn difference(&self, whole: &WholeTensors) -> Option<String> {
        for (base, keys) in self.of_ranks() {
            let mut all = keys.iter().filter_map(|key| whole.get(key));
            let alike = if base == PROGRESS {
                let all: Vec<&[u8]> = all.map(Vec::as_slice).collect();
                counts::together(&all).map_err(str::to_owned).err()
            } else {
                let first = all.next();
                let other = all.any(|bytes| Some(bytes) != first);
                other.then(|| format!("`{base}`"))
            };
            if alike.is_some() {
                return alike;
            }
        }
        None
    }

    /// Tensors that each rank has for itself, with their names in order of ranks.
    fn of_ranks(&self) -> BTreeMap<String, Vec<String>> {
        let ranks = self.open.as_ref().map_or(0, |open| open.ranks);
        let ranks = ranks.min(self.tensors.len());
        let bases = self.tensors.keys().filter_map(|key| key.strip_suffix("#0"));
        let keys = |base: &str| (0..ranks).map(|rank| format!("{base}#{rank}")).collect();
        let all = bases.map(|base| (base.to_owned(), keys(base)));
        // A parameter's own name may end in `#0`, so each tensor of ranks must be there for every
        // rank.
        let there = |keys: &Vec<String>| keys.iter().all(|key| self.tensors.contains_key(key));
        all.filter(|(base, keys): &(String, Vec<String>)| {
            there(keys) && (base == PROGRESS || base.contains('@'))
        })
        .collect()
    }
}

/// The mean of a list, which takes the place of those of all ranks.
struct Mean<'a> {
    /// Names of the ranks' lists, of which the first stays.
    keys: &'a [String],
    bytes: Vec<u8>,
    /// The number of values that are not finite, if writers have noted all that led to them.
    non_finite: u64,
}

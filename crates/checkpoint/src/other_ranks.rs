//! Values that belong to single ranks, converted so that any number of ranks can resume.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep_collective::{ReduceOp, reduce_slices};
use fusestep_planner::PlanError;
use fusestep_simd::Level;
use fusestep_tensor::DType;

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
    ///                     averages, and its optimizer state too
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
        for (base, keys) in read.of_ranks() {
            let inputs: Vec<&[u8]> = keys.iter().map(|key| tensors.whole[key].as_slice()).collect();
            let dtype = read.tensors[&keys[0]].dtype;
            let mean = if base == PROGRESS {
                let averaged = counts::averaged(&inputs);
                let counts =
                    averaged.map_err(|what| refuse(&base, what, "other ones on some ranks"))?;
                (manifest.step, manifest.skipped) = (counts.step, counts.skipped);
                manifest.loss_scale = counts.loss_scale;
                counts::to_bytes(&counts)
            } else if matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
                let mut mean = vec![0; inputs[0].len()];
                reduce_slices(Level::detect(), dtype, ReduceOp::Average, &inputs, &mut mean);
                mean
            } else {
                return Err(refuse(&base, "floating-point elements", dtype.name()));
            };
            // The mean may be infinite or NaN where the ranks' values are, or where it is too
            // large. Only values that their writers have noted may lead to a noted mean.
            let seen = keys.iter().all(|key| {
                let count = dtype.non_finite(&tensors.whole[key]);
                count == tensors.noted(key)
            });
            for key in &keys {
                tensors.non_finite.remove(key);
            }
            if seen && dtype.non_finite(&mean) > 0 {
                tensors.non_finite.insert(keys[0].clone(), 1);
            }
            for key in &keys[1..] {
                tensors.whole.remove(key);
                manifest.tensors.remove(key);
            }
            tensors.whole.insert(keys[0].clone(), mean);
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

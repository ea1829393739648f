//! From options to a plan.

use fusestep_launch::Backend;
use fusestep_planner::{
    ClipByGlobalNorm, Comms, FuseAllReduce, FuseReduceIntoUpdate, GradientAccumulation, LocalSgd,
    LossScaling, Optimizer as Rule, Planner, Reach, Shard, Tensors, Topology, UpdateNorms,
    ZeroStage,
};

use crate::{AdapterError, Fusion, Options, ParamGroup};

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

impl Options {
    /// The passes that both ways of running a step have, and the groups.
    pub(crate) fn planner(
        &self,
        rule: Rule,
        backend: &dyn Backend,
        names: &mut dyn Iterator<Item = &str>,
    ) -> Planner {
        let mut planner = Planner::new(rule).limits(backend.limits()).precision(self.precision);
        let mut of_group = vec![Vec::new(); self.groups.len()];
        for name in names {
            if let Some(group) = ParamGroup::find(&self.groups, name) {
                of_group[group].push(name.to_owned());
            }
        }
        for (names, group) in of_group.into_iter().zip(&self.groups) {
            planner = planner.group(names, group.rule);
        }
        if self.fusion == Fusion::Naive {
            planner = planner.naive();
        }
        if let Some(schedule) = &self.schedule {
            planner = planner.schedule(schedule.clone());
        }
        if let Some(scale) = self.loss_scale {
            planner = planner.with(LossScaling::from(scale));
        }
        if let Some(norm) = self.clip_norm {
            planner = planner.with(ClipByGlobalNorm::new(norm));
        }
        if self.update_norms {
            planner = planner.with(UpdateNorms);
        }
        planner
    }

    /// Lends variables and gradients for each step.
    pub(crate) fn borrowing(&self, planner: Planner) -> Planner {
        planner.tensors(Tensors::Borrowed)
    }

    /// Adds what ranks do together, and micro-steps.
    pub(crate) fn on_ranks(
        &self,
        mut planner: Planner,
        topology: Topology,
    ) -> Result<Planner, AdapterError> {
        if let Some(every) = self.accumulate {
            planner = planner.with(GradientAccumulation::every(every));
        }
        if let Some(every) = self.local_sgd {
            planner = planner.with(LocalSgd::every(every));
        }
        let zero = ZeroStage::of(self.zero).ok_or_else(|| AdapterError::Option {
            option: "zero",
            expected: "a stage from 0 to 3",
            found: self.zero.to_string(),
        })?;
        if zero != ZeroStage::None {
            planner = planner.with(Shard::new(zero));
        }
        if topology.world == 1 || self.fusion == Fusion::Naive {
            return Ok(planner);
        }
        let cap_bytes = match self.bucket_cap_mib {
            None => FuseAllReduce::DEFAULT_CAP_BYTES,
            Some(mib) if mib > 0.0 && mib.is_finite() => (mib * MIB) as u64,
            Some(mib) => {
                return Err(AdapterError::Option {
                    option: "bucket_cap_mib",
                    expected: "more than 0",
                    found: mib.to_string(),
                });
            }
        };
        planner = planner.with(FuseAllReduce::of_bytes(cap_bytes));
        Ok(match self.streams(topology) {
            0 => planner.with(FuseReduceIntoUpdate),
            _ => planner,
        })
    }

    /// Communication streams of a rank.
    pub(crate) fn streams(&self, topology: Topology) -> usize {
        let default = match topology.reach {
            Reach::SharedMemory => 0,
            Reach::Calls => Comms::DEFAULT_STREAMS,
        };
        self.comm_streams.unwrap_or(default)
    }

    /// Refuses a step on borrowed tensors that these options have no meaning for.
    pub(crate) fn check_borrowed(&self) -> Result<(), AdapterError> {
        let asked = match (self.accumulate, self.local_sgd) {
            (Some(every), _) if every.get() > 1 => ("accumulate", every.to_string()),
            (_, Some(every)) => ("local_sgd", every.to_string()),
            _ if self.zero > 0 => ("zero", self.zero.to_string()),
            _ => return Ok(()),
        };
        Err(AdapterError::NeedsRanks { option: asked.0, found: asked.1 })
    }
}

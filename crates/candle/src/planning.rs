//! From settings to a plan.

use std::collections::BTreeSet;

use candle_core::Var;
use fusestep::{OptionError, StepOptions};
use fusestep_launch::LaunchLimits;
use fusestep_planner::{Optimizer as Rule, Planner, Tensors, Topology};
use fusestep_tensor::ParamDesc;

use crate::AdapterError;
use crate::parallel::slices;

/// Settings of an optimizer on candle variables.
pub(crate) trait Settings {
    /// The planner of these settings with another rule.
    fn planner_of(&self, rule: Rule, params: &[ParamDesc], on: On) -> Result<Planner, OptionError>;

    /// The planner of a step on tensors that candle lends, without what needs ranks.
    fn borrowing_planner(
        &self,
        rule: Rule,
        params: &[ParamDesc],
        limits: LaunchLimits,
    ) -> Result<Planner, OptionError>;

    /// These settings with the variables of which each of `world` ranks has a slice.
    fn with_slices(&self, vars: &[(String, Var)], world: usize) -> Result<Self, AdapterError>
    where
        Self: Sized;

    /// Refuses what takes whole tensors where a step of one rank alone has a slice of one.
    fn check_slices(&self, vars: &[(String, Var)], rules: &[Rule]) -> Result<(), AdapterError>;
}

/// Ranks and limits that a plan is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct On {
    pub(crate) topology: Topology,
    pub(crate) limits: LaunchLimits,
}

impl Settings for StepOptions {
    fn planner_of(&self, rule: Rule, params: &[ParamDesc], on: On) -> Result<Planner, OptionError> {
        let options = Self { rule, ..self.clone() };
        options.planner(params, on.topology, on.limits)
    }

    fn borrowing_planner(
        &self,
        rule: Rule,
        params: &[ParamDesc],
        limits: LaunchLimits,
    ) -> Result<Planner, OptionError> {
        let topology = Topology::SOLO;
        self.check(topology.world)?;
        let planner = self.borrowing().planner_of(rule, params, On { topology, limits })?;
        Ok(planner.tensors(Tensors::Borrowed))
    }

    fn with_slices(&self, vars: &[(String, Var)], world: usize) -> Result<Self, AdapterError> {
        let mut names: BTreeSet<String> = self.distributed.iter().cloned().collect();
        for (name, var) in vars {
            match slices::ranks_of(var) {
                None => {}
                Some(ranks) if ranks == world => {
                    names.insert(name.clone());
                }
                Some(expected) => {
                    let name = name.clone();
                    return Err(AdapterError::SplitOver { name, expected, found: world });
                }
            }
        }
        Ok(Self { distributed: names.into_iter().collect(), ..self.clone() })
    }

    fn check_slices(&self, vars: &[(String, Var)], rules: &[Rule]) -> Result<(), AdapterError> {
        let normed = |rule: &Rule| matches!(rule.name(), "lars" | "lamb");
        let rule = || rules.iter().find(|rule| normed(rule)).map(Rule::name);
        let Some(what) = self.takes_all_gradients().or_else(rule) else {
            return Ok(());
        };
        let mut names = vars.iter().filter(|(name, var)| {
            self.distributed.contains(name) || slices::ranks_of(var).is_some()
        });
        match names.next() {
            Some((name, _)) => Err(AdapterError::SliceAlone { name: name.clone(), what }),
            None => Ok(()),
        }
    }
}

//! From settings to a planner, and refusals in the words of the command line.

use anyhow::anyhow;
use fusestep::{Chosen, OptionError, SessionError, StepOptions};
use fusestep_collective::Communicator;
use fusestep_launch::LaunchLimits;
use fusestep_planner::{Planner, Topology};
use fusestep_tensor::{ParamDesc, advised};

/// The planner with the passes that were asked for.
///
/// # Errors
/// Settings without effect, or that contradict each other, by their flags.
pub(crate) fn planner(
    options: &StepOptions,
    params: &[ParamDesc],
    topology: Topology,
    limits: LaunchLimits,
) -> anyhow::Result<Planner> {
    options.planner(params, topology, limits).map_err(refused)
}

/// The planner of settings that figures have completed, whose plans say which they are.
///
/// # Errors
/// As [`planner`].
pub(crate) fn planner_of(
    chosen: &Chosen,
    params: &[ParamDesc],
    topology: Topology,
    limits: LaunchLimits,
) -> anyhow::Result<Planner> {
    chosen.planner(params, topology, limits).map_err(refused)
}

/// These settings of a rank, with those chosen that were not given: rank 0's choice on all ranks.
///
/// # Errors
/// Settings as in [`planner`]; calls that fail.
pub(crate) fn agreed(
    options: &StepOptions,
    params: &[ParamDesc],
    limits: LaunchLimits,
    comm: &mut dyn Communicator,
) -> anyhow::Result<Chosen> {
    options.check(comm.world_size()).map_err(refused)?;
    Ok(options.agreed(params, limits, comm)?)
}

/// These settings, with those chosen that were not given.
///
/// # Errors
/// As [`planner`].
pub(crate) fn chosen(
    options: &StepOptions,
    params: &[ParamDesc],
    topology: Topology,
    limits: LaunchLimits,
) -> anyhow::Result<Chosen> {
    options.chosen(params, topology, limits).map_err(refused)
}

/// The flag of a setting.
pub(crate) fn flag_of(name: &str) -> String {
    format!("--{}", name.replace('_', "-"))
}

/// A session that could not be set up, in the words of the command line.
pub(crate) fn told(error: SessionError) -> anyhow::Error {
    match error {
        SessionError::Setting(error) => refused(error),
        SessionError::Plan(error) => error.into(),
        error => error.into(),
    }
}

/// A refusal in the words of the command line.
pub(crate) fn refused(error: OptionError) -> anyhow::Error {
    match error {
        OptionError::Needs { name, needs, works, found } => anyhow!(
            "{}: expected {}{works} too, found {found}; it has no effect otherwise",
            flag_of(name),
            flag_of(needs)
        ),
        OptionError::Conflict { first, second, why } => {
            anyhow!("{} and {}: {}", flag_of(first), flag_of(second), advised(why))
        }
        error => {
            let name = error.setting();
            anyhow!("{}", error.to_string().replacen(name, &flag_of(name), 1))
        }
    }
}

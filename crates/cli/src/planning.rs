//! From settings to a planner, and refusals in the words of the command line.

use anyhow::anyhow;
use fusestep::{Chosen, OptionError, SessionError, StepOptions};
use fusestep_collective::Communicator;
use fusestep_launch::LaunchLimits;
use fusestep_planner::{PlanError, Planner, ReduceDType, Topology};
use fusestep_tensor::ParamDesc;

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

/// Fields that ranks compare, and the flags that they come from.
const FLAGS_OF_FIELDS: [(&str, &str); 10] = [
    ("zero stage", "--zero"),
    ("ranks that share shards", "--shard-group"),
    ("updates are shared out", "--owners"),
    ("buckets", "--bucket-cap-mib"),
    ("clip_by_global_norm", "--clip-norm"),
    ("loss_scaling", "--loss-scale"),
    ("second_moment", "--amsgrad"),
    ("objective", "--maximize"),
    ("world size", "number of ranks"),
    ("number of parameters", "number of parameters of --model"),
];

/// An error in words, in which a setting that ranks have otherwise goes by its flag.
pub(crate) fn in_words(error: &anyhow::Error) -> String {
    let message = format!("{error:#}");
    // The planner knows ranks alone here.
    let of_groups = "expected a world that is a multiple of a shard group's";
    let message =
        message.replacen(&format!("ranks: {of_groups}"), &format!("--shard-group: {of_groups}"), 1);
    let message = with_flags(&message);
    let differing = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(PlanError::RanksDiffer { field, .. }) => Some(field),
        _ => None,
    });
    let Some(field) = differing.filter(|field| !field.starts_with("--")) else {
        return message;
    };
    let known = FLAGS_OF_FIELDS.iter().find(|(known, _)| known == field);
    let flag = match known {
        Some((_, flag)) => (*flag).to_owned(),
        None if field.starts_with("precision of ") => {
            format!("--master-weights, --state-dtype and --rounding ({field})")
        }
        None if field.contains(' ') || field == "plan" => field.clone(),
        None => flag_of(field),
    };
    message.replacen(&format!("{field}: expected"), &format!("{flag}: expected"), 1)
}

/// A message with a flag in place of the name that the planner has for a setting.
fn with_flags(message: &str) -> String {
    let (name, flag) = (ReduceDType::NAME, flag_of(ReduceDType::NAME));
    message.replace(&format!("`{name}`"), &flag).replace(name, &flag)
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
        OptionError::Needs { name, needs } => anyhow!(
            "{}: expected {} too, without which it has no effect",
            flag_of(name),
            flag_of(needs)
        ),
        OptionError::Conflict { first, second, why } => {
            anyhow!("{} and {}: {why}; remove one", flag_of(first), flag_of(second))
        }
        OptionError::NoTrust { .. } => {
            anyhow!("{}", error.to_string().replacen("trust_of", &flag_of("trust_of"), 1))
        }
        OptionError::Unmatched { name, such_as, found, count } => {
            let error = OptionError::Unmatched { name, such_as, found, count }.to_string();
            anyhow!("{}", error.replacen(name, &flag_of(name), 1))
        }
        error => anyhow!("--{error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_of_settings_name_flags() {
        let (first, second) = ("reduce_dtype f32".to_owned(), "a model".to_owned());
        let why = "do not go together; leave `reduce_dtype` out";
        let error = PlanError::Conflict { first, second, why }.into();
        let told = "--reduce-dtype f32 and a model do not go together; leave --reduce-dtype out; \
                    remove one";
        assert_eq!(in_words(&error), told);
    }

    #[test]
    fn what_ranks_have_otherwise_goes_by_its_flag() {
        for (field, flag) in [
            ("zero stage", "--zero"),
            ("accumulate", "--accumulate"),
            ("weight_decay", "--weight-decay"),
            ("--seed", "--seed"),
            ("precision of bf16 parameters", "--master-weights, --state-dtype and --rounding"),
            ("parameter `w`", "parameter `w`"),
        ] {
            let (expected, found) = ("0".to_owned(), "1".to_owned());
            let differ =
                PlanError::RanksDiffer { field: field.to_owned(), expected, rank: 1, found };
            let told = in_words(&anyhow::Error::from(differ).context("rank 1"));
            assert!(told.starts_with(&format!("rank 1: {flag}")), "{told}");
            assert!(told.contains(": expected 0 as on rank 0, found 1 on rank 1"), "{told}");
        }
    }
}

//! Variables of which every rank has a slice.

use std::collections::BTreeSet;

use candle_core::Var;
use fusestep::StepOptions;
use fusestep_planner::Optimizer as Rule;

use crate::AdapterError;
use crate::parallel::slices;

/// These settings with the variables of which each of `world` ranks has a slice.
pub(crate) fn with_slices(
    options: &StepOptions,
    vars: &[(String, Var)],
    world: usize,
) -> Result<StepOptions, AdapterError> {
    let mut names: BTreeSet<String> = options.distributed.iter().cloned().collect();
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
    Ok(StepOptions { distributed: names.into_iter().collect(), ..options.clone() })
}

/// Refuses what takes whole tensors where a step of one rank alone has a slice of one.
pub(crate) fn check_alone(
    options: &StepOptions,
    vars: &[(String, Var)],
    rules: &[Rule],
) -> Result<(), AdapterError> {
    let normed = |rule: &Rule| matches!(rule.name(), "lars" | "lamb");
    let rule = || rules.iter().find(|rule| normed(rule)).map(Rule::name);
    let Some(what) = options.takes_all_gradients().or_else(rule) else {
        return Ok(());
    };
    let mut names = vars.iter().filter(|(name, var)| {
        options.distributed.contains(name) || slices::ranks_of(var).is_some()
    });
    match names.next() {
        Some((name, _)) => Err(AdapterError::SliceAlone { name: name.clone(), what }),
        None => Ok(()),
    }
}

/// Refuses a variable that has become a slice since the optimizer was built: it would get other
/// ranks' gradients.
pub(crate) fn check_known(
    known: &BTreeSet<String>,
    vars: &[(String, Var)],
) -> Result<(), AdapterError> {
    let is_late =
        |(name, var): &&(String, Var)| slices::ranks_of(var).is_some() && !known.contains(name);
    match vars.iter().find(is_late) {
        Some((name, _)) => Err(AdapterError::SplitLate { name: name.clone() }),
        None => Ok(()),
    }
}

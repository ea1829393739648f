//! Variables with a rule and settings of their own.

use fusestep::OwnRule;
use fusestep_planner::{Optimizer as Rule, State};

use crate::{AdapterError, Params};

/// Variables with a rule and settings of their own, for [`crate::Options::groups`]: those whose
/// name contains one of some texts and that no group before this one has.
///
/// ```
/// use fusestep_candle::{Options, ParamsLion, group};
///
/// let options = Options {
///     groups: vec![group(["embedding"], ParamsLion::default())],
///     ..Options::default()
/// };
/// ```
pub fn group<N: Into<String>>(
    contains: impl IntoIterator<Item = N>,
    params: impl Params,
) -> OwnRule {
    OwnRule::containing(contains, params.rule())
}

/// The planner's number of each group's rule: groups of equal rules are one to it, and number 0 is
/// the optimizer's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupRules(Vec<usize>);

impl GroupRules {
    pub(crate) fn of(groups: &[OwnRule], rules: &[Rule]) -> Self {
        let number = |group: &OwnRule| rules.iter().position(|rule| *rule == group.rule);
        Self(groups.iter().filter_map(number).collect())
    }

    /// The planner's number of a group's rule.
    pub(crate) fn number(&self, group: usize) -> Result<usize, AdapterError> {
        let found = self.0.get(group).copied();
        found.ok_or(AdapterError::NoSuchGroup { found: group, count: self.0.len() })
    }
}

/// Sets the rate of the rule of this number; `params` are the optimizer's own hyper-parameters,
/// which every step makes rule 0 of.
pub(crate) fn set_lr(
    state: &mut State,
    rule: usize,
    params: &mut impl Params,
    lr: f64,
) -> Result<(), AdapterError> {
    state.set_lr_of(rule, lr)?;
    if rule == 0 {
        params.set_lr(lr);
    }
    Ok(())
}

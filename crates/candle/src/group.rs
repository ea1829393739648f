//! Variables with a rule and settings of their own.

use fusestep_planner::{Optimizer as Rule, State};

use crate::{AdapterError, Params};

/// Variables with a rule and settings of their own: those whose name contains one of some texts
/// and that no group before this one has.
///
/// Groups that are given equal rules have one in common from then on, and one that is given the
/// optimizer's own rule follows the optimizer's settings.
///
/// ```
/// use fusestep_candle::{Options, ParamGroup, ParamsLion};
///
/// let options = Options {
///     groups: vec![ParamGroup::of(["embedding"], ParamsLion::default())],
///     ..Options::default()
/// };
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup {
    pub(crate) contains: Vec<String>,
    pub(crate) rule: Rule,
}

impl ParamGroup {
    /// Variables whose name contains one of these, with these hyper-parameters.
    pub fn of(contains: impl IntoIterator<Item = impl Into<String>>, params: impl Params) -> Self {
        Self { contains: contains.into_iter().map(Into::into).collect(), rule: params.rule() }
    }

    /// The rule.
    pub fn rule(&self) -> Rule {
        self.rule
    }

    /// The group that a name is in.
    pub(crate) fn find(groups: &[ParamGroup], name: &str) -> Option<usize> {
        let has =
            |group: &ParamGroup| group.contains.iter().any(|part| name.contains(part.as_str()));
        groups.iter().position(has)
    }
}

/// The planner's number of each group's rule: groups of equal rules are one to it, and number 0 is
/// the optimizer's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupRules(Vec<usize>);

impl GroupRules {
    pub(crate) fn of(groups: &[ParamGroup], rules: &[Rule]) -> Self {
        let number = |group: &ParamGroup| rules.iter().position(|rule| *rule == group.rule);
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
    (rule, params): (usize, &mut impl Params),
    lr: f64,
) -> Result<(), AdapterError> {
    state.set_lr_of(rule, lr)?;
    if rule == 0 {
        params.set_lr(lr);
    }
    Ok(())
}

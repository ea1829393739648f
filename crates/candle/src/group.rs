//! Variables with a rule and settings of their own.

use fusestep_planner::Optimizer as Rule;

use crate::{AdapterError, Params};

/// Variables with a rule and settings of their own: those whose name contains one of some texts
/// and that no group before this one has.
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

/// The planner's number of each group's rule: groups of equal rules are one to it.
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

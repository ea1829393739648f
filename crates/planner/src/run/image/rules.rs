//! Rules of a run by name, with the settings that files compare.

use std::collections::BTreeMap;

use crate::plan::rule::Optimizer;
use crate::run::memory::state::State;

/// Rules that a run uses now, and their settings as texts. A parameter with a rule of its own has
/// that rule's settings under the same keys with `@<name>` behind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RulesImage {
    /// Name of the rule of all other parameters.
    pub first: String,
    /// Direction of its steps, where the rule offers both.
    pub objective: Option<String>,
    /// Names of the rules of parameters with one of their own.
    pub own: BTreeMap<String, String>,
    /// Settings under which the same state would mean something else.
    pub of_state: BTreeMap<String, String>,
    /// All other settings of rules that decide bits, as they are now.
    pub now: BTreeMap<String, String>,
    /// These settings as the plan was made with them.
    pub built: BTreeMap<String, String>,
    /// Settings of the plan that decide bits and are not the default.
    pub of_plan: BTreeMap<String, String>,
    /// Whether files of other settings are taken ([`State::any_settings`]).
    pub any: bool,
}

impl RulesImage {
    pub(crate) fn of(state: &State) -> Self {
        let now = Rules::among(state, &state.rules);
        let own = now.own.iter();
        Self {
            first: now.first.name().to_owned(),
            objective: now.first.objective().map(|objective| objective.name().to_owned()),
            own: own.map(|(name, rule)| ((*name).to_owned(), rule.name().to_owned())).collect(),
            of_state: now.of_state(),
            now: now.tuned(),
            built: Rules::among(state, &state.built).tuned(),
            of_plan: state.settings.clone(),
            any: state.any_settings,
        }
    }
}

/// Rule of all parameters, and the rules of those that have another.
struct Rules<'a> {
    first: &'a Optimizer,
    own: Vec<(&'a str, &'a Optimizer)>,
}

impl<'a> Rules<'a> {
    fn among(state: &'a State, rules: &'a [Optimizer]) -> Self {
        let of_params = state.places.iter().map(|&(storage, _)| state.storages[storage].spec.rule);
        let params = state.params.iter().map(|param| &*param.name).zip(of_params);
        let own = params.filter(|(_, rule)| *rule != 0);
        Self { first: &rules[0], own: own.map(|(name, rule)| (name, &rules[rule])).collect() }
    }

    fn of_state(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for (what, value) in self.first.rule().settings_of_state() {
            all.insert(what.to_owned(), value);
        }
        for (name, rule) in &self.own {
            for (what, value) in rule.rule().settings_of_state() {
                all.insert(format!("{what}@{name}"), value);
            }
            if let Some(objective) = rule.objective() {
                all.insert(format!("objective@{name}"), objective.name().to_owned());
            }
        }
        all
    }

    fn tuned(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for (what, value) in self.first.rule().settings() {
            all.insert(what.to_owned(), value);
        }
        for (name, rule) in &self.own {
            for (what, value) in rule.rule().settings() {
                all.insert(format!("{what}@{name}"), value);
            }
        }
        all
    }
}

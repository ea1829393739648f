//! Rules as state files and manifests have them: names, directions, and settings under which the
//! same state means something else, `beta1`, and `beta1@<name>` of a parameter with a rule of its
//! own.

use std::collections::BTreeMap;

use fusestep_tensor::Quoted;

use crate::{Optimizer, State};

/// The rule that most parameters have, and those of parameters with one of their own.
pub(super) struct Rules<'a> {
    pub(super) first: &'a Optimizer,
    own: Vec<(&'a str, &'a Optimizer)>,
}

impl<'a> Rules<'a> {
    /// Those of now, which may have replaced those of the plan.
    pub(super) fn of(state: &'a State) -> Self {
        let rules = state.places.iter().map(|&(storage, _)| state.storages[storage].spec.rule);
        let params = state.params.iter().map(|param| &*param.name).zip(rules);
        let own = params.filter(|(_, rule)| *rule != 0);
        Self {
            first: &state.rules[0],
            own: own.map(|(name, rule)| (name, &state.rules[rule])).collect(),
        }
    }

    /// The direction of steps, where the rule offers both.
    pub(super) fn objective(&self) -> Option<String> {
        self.first.objective().map(|objective| objective.name().to_owned())
    }

    /// The names of rules of parameters with one of their own.
    pub(super) fn own_names(&self) -> BTreeMap<String, String> {
        let named =
            self.own.iter().map(|(param, rule)| (param.to_string(), rule.name().to_owned()));
        named.collect()
    }

    /// Settings under which the state would mean something else.
    pub(super) fn settings(&self) -> BTreeMap<String, String> {
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
}

/// The first setting that was another one: its key, what it is here and what was found. Files from
/// before there were such entries do not say.
pub(super) fn difference<'a>(
    own: BTreeMap<String, String>,
    found: impl Fn(&str) -> Option<&'a String>,
) -> Option<(String, String, String)> {
    own.into_iter().find_map(|(key, own)| {
        let found = found(&key).filter(|found| **found != own)?;
        let found = format!("{}; go on with that, or start without the state", Quoted(found));
        Some((key, own, found))
    })
}

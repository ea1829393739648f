//! Settings under which the same state means something else, as state files and manifests have
//! them: `beta1`, and `beta1@<name>` of a parameter with a rule of its own.

use std::collections::BTreeMap;

use fusestep_tensor::Quoted;

use crate::Optimizer;

/// Those of the rule that most parameters have, and of parameters with one of their own.
pub(super) fn of_rules<'a>(
    first: &Optimizer,
    own: impl Iterator<Item = (&'a str, &'a Optimizer)>,
) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for (what, value) in first.rule().settings_of_state() {
        all.insert(what.to_owned(), value);
    }
    for (name, rule) in own {
        for (what, value) in rule.rule().settings_of_state() {
            all.insert(format!("{what}@{name}"), value);
        }
        if let Some(objective) = rule.objective() {
            all.insert(format!("objective@{name}"), objective.name().to_owned());
        }
    }
    all
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

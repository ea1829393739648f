//! Rules and settings as state files and manifests store them.
//!
//! ```text
//! beta1, weight_decay     settings under which the same state means something else
//! set                     1: all other settings that decide bits follow; older files lack them
//! set.momentum            a setting of the rule; all but learning rates and factors on gradients
//! set.accumulated         a setting of the plan
//! set.trust_of@<name>     what a parameter has in place of its rule's
//! built.momentum          what the program began with, where it has changed the setting since
//! ```
//!
//! A parameter with a rule of its own has that rule's under the same keys with `@<name>` behind.

use std::collections::{BTreeMap, BTreeSet};

use fusestep_planner::{FIXED_SCALE, RulesImage};
use fusestep_tensor::Quoted;

/// Key of a setting as it is now.
const NOW: &str = "set.";

/// Key of the precision of parameters, before their type.
pub(crate) const PRECISION: &str = "set.precision.";

/// Key of the names whose state stays in f32.
pub(crate) const KEPT: &str = "set.keep_f32";

/// Key of the policy of a loss scale. A fixed scale keeps itself, whatever was saved. A run without
/// a scale does not go on from one that moved: gradients would be others.
const SCALING: &str = "loss_scaling";

/// Key that says that a file has all settings.
pub(crate) const MARK: &str = "set";
const BUILT: &str = "built.";

/// Most other parameters that a refusal names.
const MOST_NAMED: usize = 9;
const NONE: &str = "none";

/// Rules of a run, with their settings under the keys that files have.
pub(crate) struct Rules<'a>(pub(crate) &'a RulesImage);

impl Rules<'_> {
    /// All settings that are saved.
    pub(crate) fn settings(&self) -> BTreeMap<String, String> {
        let RulesImage { of_state, of_plan, now, built, .. } = self.0;
        let mut all = of_state.clone();
        all.insert(MARK.to_owned(), "1".to_owned());
        all.extend(of_plan.iter().map(|(key, value)| (format!("{NOW}{key}"), value.clone())));
        // Some rules have a setting only where it is set.
        for key in now.keys().chain(built.keys()).filter(|key| now.get(*key) != built.get(*key)) {
            let value = built.get(key).map_or(NONE, String::as_str);
            all.insert(format!("{BUILT}{key}"), value.to_owned());
        }
        all.extend(now.iter().map(|(key, value)| (format!("{NOW}{key}"), value.clone())));
        all
    }

    /// The first setting that differs from the one found: its key, its value here and the value
    /// found. A setting that the program has changed since it began differs only if both its values
    /// do. Entries that an old file lacks are not compared. `elsewhere` is the advice
    /// where a setting cannot be allowed: state of another kind, or a run without these tensors.
    pub(crate) fn difference<'f>(
        &self,
        found: impl Iterator<Item = (&'f String, &'f String)>,
        elsewhere: &str,
        has_tensors: bool,
    ) -> Option<Difference> {
        let found: BTreeMap<&str, &str> =
            found.map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let own = self.settings();
        let of_state = |key: &&String| **key != MARK && !key.starts_with(NOW) && !is_built(key);
        for key in own.keys().filter(of_state) {
            if let Some(&found) = found.get(key.as_str()).filter(|found| **found != own[key]) {
                let found = format!("{}{elsewhere}", Quoted(found));
                return Some(Difference { what: key.clone(), expected: own[key].clone(), found });
            }
        }
        if self.0.any || !found.contains_key(MARK) {
            return None;
        }
        let all: BTreeSet<&str> =
            own.keys().map(String::as_str).chain(found.keys().copied()).collect();
        let mut differ = all.iter().filter_map(|key| key.strip_prefix(NOW)).filter(|what| {
            differs(what, |key| [own.get(key).map(String::as_str), found.get(key).copied()])
        });
        let what = differ.next()?;
        let now = format!("{NOW}{what}");
        let [own, found] = [own.get(&now).map(String::as_str), found.get(now.as_str()).copied()];
        let advice = if has_tensors {
            "; go on with that, or allow other settings by `any_settings`"
        } else {
            elsewhere
        };
        // Patterns of names are one flag for many parameters.
        let others = what.split_once('@').map_or_else(Vec::new, |(setting, _)| {
            let names = differ.filter_map(|what| what.split_once('@'));
            let names = names.filter(|(other, _)| *other == setting);
            names.map(|(_, name)| format!("`{}`", Quoted(name))).take(MOST_NAMED).collect()
        });
        let others = if others.is_empty() {
            String::new()
        } else {
            format!("; the same for {}", others.join(", "))
        };
        Some(Difference {
            what: what.to_owned(),
            expected: own.unwrap_or(NONE).to_owned(),
            found: format!("{}{advice}{others}", Quoted(found.unwrap_or(NONE))),
        })
    }
}

/// Whether a setting differs, as it is now and as the program began; `of` tells this run's and the
/// saved value under a key.
fn differs<'v>(what: &str, of: impl Fn(&str) -> [Option<&'v str>; 2]) -> bool {
    let [own_now, found_now] = of(&format!("{NOW}{what}"));
    let [own_built, found_built] = of(&format!("{BUILT}{what}"));
    let is_fixed = |policy| policy == Some(FIXED_SCALE);
    let is_fixed =
        what == SCALING && (found_now.is_none() || is_fixed(own_now) || is_fixed(found_now));
    let began = |built: Option<&'v str>, now: Option<&'v str>| built.or(now).unwrap_or(NONE);
    own_now != found_now && !is_fixed && began(own_built, own_now) != began(found_built, found_now)
}

fn is_built(key: &str) -> bool {
    key.starts_with(BUILT)
}

/// A setting that differs from the saved one.
pub(crate) struct Difference {
    pub(crate) what: String,
    pub(crate) expected: String,
    pub(crate) found: String,
}

//! Settings of a plan that the files of its runs keep.

use std::collections::BTreeMap;

use fusestep_launch::Precision;

use crate::plan::settings::Accumulated;
use crate::plan::value::Plan;

/// Settings of a plan that decide bits and are not the default, by name.
pub(crate) fn saved_settings(plan: &Plan) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut add = |key: String, value: String| all.insert(key, value);
    if let Some(max_norm) = plan.gradients.max_norm {
        add("clip_norm".to_owned(), max_norm.value().to_string());
    }
    let scale = plan.gradients.loss_scale.map(|scale| scale.policy());
    if let Some(policy) = scale.filter(|policy| !policy.is_fixed()) {
        add("loss_scaling".to_owned(), policy.to_string());
    }
    if plan.accumulation().is_some_and(|rule| rule.accumulated == Accumulated::Sum) {
        add("accumulated".to_owned(), "sum".to_owned());
    }
    for param in plan.params() {
        let precision = plan.precision(param.dtype);
        if precision != Precision::default() {
            add(format!("precision.{}", param.dtype), precision.to_string());
        }
        if let Some(decay) = param.weight_decay {
            add(format!("weight_decay_of@{}", param.name), decay.to_string());
        }
        if let Some(trust) = param.trust {
            add(format!("trust_of@{}", param.name), format!("{trust:?}").to_lowercase());
        }
    }
    all
}

//! Settings of a plan that the files of its runs keep.

use std::collections::BTreeMap;

use fusestep_launch::{Precision, StateDType};
use fusestep_tensor::ParamDesc;

use crate::plan::lanes::Lanes;
use crate::plan::passes::kept_f32;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::settings::{Accumulated, ReduceDType};
use crate::plan::value::Plan;

/// The policy of a loss scale that stays, as files of runs have it; older files have none.
pub const FIXED_SCALE: &str = "fixed";

/// Settings of a plan that decide bits and are not the default, by name.
pub(crate) fn saved_settings(plan: &Plan) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut add = |key: String, value: String| all.insert(key, value);
    if let Some(max_norm) = plan.gradients.max_norm {
        add("clip_norm".to_owned(), max_norm.value().to_string());
    }
    if let Some(policy) = plan.gradients.loss_scale.map(|scale| scale.policy()) {
        let text = if policy.is_fixed() { FIXED_SCALE.to_owned() } else { policy.to_string() };
        add("loss_scaling".to_owned(), text);
    }
    if plan.accumulation().is_some_and(|rule| rule.accumulated == Accumulated::Sum) {
        add("accumulated".to_owned(), "sum".to_owned());
    }
    if let Some(lanes) = plan.lanes {
        add(Lanes::NAME.to_owned(), lanes.count.to_string());
    }
    if let Some(wire) = plan.wire {
        add(ReduceDType::NAME.to_owned(), wire.to_string());
    }
    let kept = plan.precisions.kept_names();
    let is_int8 = |param: &ParamDesc| plan.precision(param.dtype).state == StateDType::Int8;
    if !kept.is_empty() && plan.params().iter().any(is_int8) {
        add(kept_f32::NAME.to_owned(), kept.join(", "));
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

//! Parameters whose state stays in f32 beside others in int8, explained.

use std::collections::BTreeMap;

use fusestep_launch::{Master, StateDType};
use fusestep_tensor::{counted, grouped};

use crate::plan::note::Verdict;
use crate::plan::rule::{KeptF32, LEAST_INT8_ELEMENTS};
use crate::plan::value::Plan;

/// Name of the setting in notes and files.
pub(crate) const NAME: &str = "keep_f32";

/// Notes which parameters' state stays in f32, and why.
pub(crate) fn explain(plan: &mut Plan) {
    let (mut small, mut named) = (0u64, BTreeMap::<&str, u64>::new());
    for param in plan.params.iter() {
        match plan.precisions.why_f32(param) {
            Some(KeptF32::Small) => small += 1,
            Some(KeptF32::Named(part)) => *named.entry(part).or_default() += 1,
            None => {}
        }
    }
    let mut reasons = Vec::new();
    if small > 0 {
        let tensors = counted(small, "tensor");
        reasons.push(format!("{tensors} of fewer than {} elements", grouped(LEAST_INT8_ELEMENTS)));
    }
    for (part, count) in named {
        reasons.push(format!("{} with `{part}` in the name", counted(count, "tensor")));
    }
    if reasons.is_empty() {
        return;
    }
    // Asked of parameters, since the caller may lend the lists of state.
    let precisions = plan.params.iter().map(|param| plan.precisions.of_param(param));
    let mut coded = precisions.filter(|own| own.state == StateDType::Int8).peekable();
    let is_somewhere = coded.peek().is_some();
    let has_remainders = coded.any(|own| own.master == Master::Remainder8);
    let wide = if has_remainders { ", and remainders in 16 bits" } else { "" };
    let reasons = reasons.join(" and of ");
    let nowhere = if is_somewhere { "" } else { "; none is left in int8" };
    let reason = format!("state stays in f32, not int8{wide}, of {reasons}{nowhere}");
    plan.note(NAME, Verdict::Split, reason);
}

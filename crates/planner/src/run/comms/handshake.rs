//! Ranks compare everything that decides the bits of a run before the first step, at every resume,
//! and whenever they are asked to.
//!
//! Each rank lists fields and values as text. Rank 0's list goes to all, each rank looks for the
//! first field that differs, and all of them hear of the lowest rank that has found one: the error
//! names the field and both values on every rank alike.
//!
//! In every step they tell each other that they update by the same rules, along with which
//! gradients there are: a rate that one of them has changed, or a parameter that they have not
//! written alike, would part their parameters in silence.

use fusestep_amp::LossScale;
use fusestep_coalesce::zeroed_bytes;
use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::Backend;
use fusestep_tensor::{DType, ParamDesc, Role, counted};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{PlanError, Result};
use crate::plan::calls::WORD_BYTES;
use crate::plan::lanes::Lanes;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::passes::{ClipByGlobalNorm, LossScaling, UpdateInBackward, UpdateNorms};
use crate::plan::settings::{
    Caps, GradientAccumulation, LocalSgd, Oversize, Ownership, ReduceDType,
};
use crate::plan::storage::Extent;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::comms::sums::{Scope, sum_over};
use crate::run::memory::state::State;
use crate::run::run::Run;

/// A field and this rank's value of it.
pub(crate) type Field = (String, String);

/// Bytes of a differing value that a rank tells the others.
const TOLD_BYTES: usize = 256;

/// Everything but values.
pub(crate) fn settings(plan: &Plan, state: &State) -> Vec<Field> {
    let mut fields = vec![
        ("world size".to_owned(), plan.topology.world.to_string()),
        ("number of parameters".to_owned(), plan.params.len().to_string()),
        ("number of rules".to_owned(), plan.rules.len().to_string()),
    ];
    let mut add = |name: &str, value: String| fields.push((name.to_owned(), value));
    for (index, rule) in state.rules.iter().enumerate() {
        let of = |name: &str| {
            if index == 0 { name.to_owned() } else { format!("{name} of rule {index}") }
        };
        add(&of("optimizer"), rule.name().to_owned());
        for (name, value) in settings_of(&format!("{:?}", rule.rule())) {
            add(&of(&name), value);
        }
    }
    let averages = plan.averaging().is_some();
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
    let schedule = plan.schedule().map(ToString::to_string);
    add("schedule", or_none(schedule));
    add("steps run", state.step.to_string());
    add("zero stage", plan.zero.number().to_string());
    add("ranks that share shards", plan.shard_group.to_string());
    let ownership = match plan.ownership {
        Ownership::Elements => "between elements",
        Ownership::Tensors => "between tensors",
    };
    add("updates are shared out", ownership.to_owned());
    add("buckets", text_of_buckets(plan.caps.as_ref()));
    let max_norm = plan.gradients.max_norm;
    let max_norm = max_norm.map(|max_norm| max_norm.value().to_string());
    add(ClipByGlobalNorm::NAME, or_none(max_norm));
    let scale = plan.gradients.loss_scale.map(|scale| text_of_scale(&scale));
    add(LossScaling::NAME, or_none(scale));
    add(UpdateNorms::NAME, plan.update_norms.to_string());
    add(UpdateInBackward::NAME, plan.in_backward.to_string());
    let one = || "1 micro-step".to_owned();
    let accumulation = plan.accumulation().map_or_else(one, |rule| rule.to_string());
    add(GradientAccumulation::NAME, accumulation);
    add(ReduceDType::NAME, or_none(plan.wire.map(|wire| wire.to_string())));
    add(Lanes::NAME, or_none(plan.lanes.map(|lanes| lanes.count.to_string())));
    add(LocalSgd::NAME, or_none(plan.averaging().map(|rule| rule.to_string())));
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let precision = plan.precisions.of(dtype).to_string();
        add(&format!("precision of {dtype} parameters"), precision);
    }
    for (index, (param, rule)) in plan.params.iter().zip(plan.rule_of.iter()).enumerate() {
        let shape = plan.slices.get(&index).map_or_else(
            || param.shape.to_string(),
            |slices| {
                let shapes: Vec<String> = slices.iter().map(ToString::to_string).collect();
                format!("slices {}", shapes.join(", "))
            },
        );
        add(&format!("parameter `{}`", param.name), text_of(param, &shape, *rule));
    }
    // Ranks that average leave out of a step what they have no gradient of themselves.
    for (param, steps) in plan.params.iter().zip(state.steps()).filter(|_| !averages) {
        add(&format!("steps of `{}`", param.name), steps.to_string());
    }
    add("plan", format!("{:016x}", plan.hash));
    fields
}

/// A hash of each tensor in the roles asked for that all ranks have alike, read one at a time; of
/// those that ranks share out, of what was written to it since the last step.
pub(crate) fn values(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    asked: fn(Role) -> bool,
) -> Result<Vec<Field>> {
    let averages = plan.averaging().is_some();
    // Ranks that average have state of their own, and parameters of their own in between.
    let alike = |role| !averages || role == Role::Param && state.since_average == 0;
    let mut fields = Vec::new();
    for (param, desc) in plan.params.iter().enumerate() {
        let spec = &plan.storages[plan.places[param].0];
        if spec.distributed || desc.numel() == 0 {
            continue;
        }
        for (list, extent) in spec.lists.iter().zip(&spec.extents) {
            if !asked(list.role) || !alike(list.role) {
                continue;
            }
            let hash = match extent {
                Extent::Whole => {
                    let mut bytes = zeroed_bytes(list.stride().len_bytes(desc.numel() as usize))?;
                    state.read(backend, list.role, &desc.name, &mut bytes)?;
                    Some(xxh3_64(&bytes))
                }
                Extent::Shard => state.written.of_shard(param, list.role),
                Extent::Segments => continue,
            };
            let what = match list.role {
                Role::Param => "values".to_owned(),
                role => format!("state `{role}`"),
            };
            let not_written = || "nothing written since the last step".to_owned();
            let hash = hash.map_or_else(not_written, |hash| format!("hash {hash:016x}"));
            fields.push((format!("{what} of `{}`", desc.name), hash));
        }
    }
    Ok(fields)
}

/// Settings of a rule from its own description: `Adam { lr: 0.1, objective: Minimize }` has `lr`,
/// which is `0.1`, and `objective`, which is `minimize`. No rule can forget one, and every rule has
/// the same ones on all ranks, which compare line by line.
fn settings_of(rule: &str) -> Vec<Field> {
    let fields = rule.split_once('{').map_or("", |(_, fields)| fields.trim_end_matches('}'));
    let settings = fields.split(',').filter_map(|field| field.split_once(": "));
    let settings = settings.map(|(name, value)| (name.trim(), value.trim()));
    settings.map(|(name, value)| (name.to_owned(), value.to_lowercase())).collect()
}

fn text_of_buckets(caps: Option<&Caps>) -> String {
    let Some(caps) = caps else {
        return "one for each tensor".to_owned();
    };
    let beyond = match caps.oversize {
        Oversize::Split => "cut",
        Oversize::Alone => "alone",
    };
    let count = match caps.count {
        usize::MAX => String::new(),
        count => format!(" of at most {}", counted(count as u64, "tensor")),
    };
    let bytes = caps.bytes;
    format!("at most {bytes} bytes{count}, longer tensors {beyond}")
}

fn text_of_scale(scale: &LossScale) -> String {
    let [good, bad] = [scale.good_steps(), scale.bad_steps()];
    let (scale, policy) = (scale.scale(), scale.policy());
    format!("{scale} after {good} good and {bad} bad steps; {policy}")
}

fn text_of(param: &ParamDesc, shape: &str, rule: u32) -> String {
    let of_rule = || "its rule's".to_owned();
    let decay = param.weight_decay.map_or_else(of_rule, |decay| decay.to_string());
    let trust = param.trust.map_or_else(of_rule, |trust| format!("{trust:?}").to_lowercase());
    format!(
        "{} {shape}, lr_scale {}, weight decay {decay}, trust ratio {trust}, rule {rule}",
        param.dtype, param.lr_scale
    )
}

impl Comms<'_> {
    /// Compares fields of the caller's own over all ranks, which all call it: for what decides
    /// which calls they make, before they make any.
    ///
    /// # Errors
    /// As [`Run::handshake`].
    pub fn compare(&mut self, fields: &[(&str, String)]) -> Result<()> {
        if self.world() == 1 {
            return Ok(());
        }
        let fields = fields.iter().map(|(name, value)| (name.to_string(), value.clone()));
        compare(self, &fields.collect::<Vec<_>>())
    }
}

/// Compares each rank's fields with those of rank 0.
pub(crate) fn compare(comms: &mut Comms<'_>, fields: &[Field]) -> Result<()> {
    // A plan's hash is one of the fields: calls that carried it would be refused before they could
    // say what differs.
    comms.set_plan(0);
    let (rank, world) = (comms.rank(), comms.world());
    let own: String = fields.iter().map(|field| line(field) + "\n").collect();
    let lengths = told_by_each(comms, own.len() as f64)?;
    let mut first = vec![0; lengths[0] as usize];
    if rank == 0 {
        first.copy_from_slice(own.as_bytes());
    }
    let broadcast = Operation::Broadcast { root: 0 };
    comms.in_place(broadcast, DType::U8, None, &mut first)?;
    let first = String::from_utf8_lossy(&first).into_owned();
    let of_first: Vec<&str> = first.lines().collect();
    let differing = first_difference(&of_first, fields);
    let found = told_by_each(comms, differing.map_or(0.0, |at| at as f64 + 1.0))?;
    let Some(other) = (0..world).find(|&rank| found[rank] > 0.0) else {
        return Ok(());
    };
    let mut told = [0u8; TOLD_BYTES];
    if rank == other {
        let at = found[other] as usize - 1;
        let value = fields.get(at).map_or("nothing", |(_, value)| value.as_str());
        let len = (0..=value.len().min(TOLD_BYTES))
            .rev()
            .find(|&len| value.is_char_boundary(len))
            .unwrap_or(0);
        told[..len].copy_from_slice(&value.as_bytes()[..len]);
    }
    let broadcast = Operation::Broadcast { root: other };
    comms.in_place(broadcast, DType::U8, None, &mut told)?;
    let line = of_first.get(found[other] as usize - 1).copied();
    let (field, expected) =
        line.and_then(|line| line.split_once('\0')).unwrap_or(("fields", "none"));
    Err(PlanError::RanksDiffer {
        field: field.to_owned(),
        expected: expected.chars().take(TOLD_BYTES).collect(),
        rank: other,
        found: String::from_utf8_lossy(&told).trim_end_matches('\0').to_owned(),
    })
}

/// A field as ranks send it, on one line.
fn line((name, value): &Field) -> String {
    format!("{name}\0{value}").replace('\n', " ")
}

/// The first of this rank's fields that rank 0 has not alike.
fn first_difference(of_first: &[&str], fields: &[Field]) -> Option<usize> {
    let count = of_first.len().max(fields.len());
    (0..count).find(|&at| {
        let own = fields.get(at).map(line);
        own.as_deref() != of_first.get(at).copied()
    })
}

/// One number of each rank, known to all.
fn told_by_each(comms: &mut Comms<'_>, own: f64) -> Result<Vec<f64>> {
    let mut all = vec![0.0; comms.world()];
    all[comms.rank()] = own;
    sum_over(comms, &mut all, Scope::World)?;
    Ok(all)
}

/// Makes each byte of `given` the largest that any rank has. Returns for each of `values` whether
/// all ranks have the same.
pub(crate) fn largest<const N: usize>(
    comms: &mut Comms<'_>,
    given: &mut Vec<u8>,
    values: [u64; N],
) -> Result<[bool; N]> {
    let count = given.len();
    for value in values {
        given.extend(value.to_le_bytes());
        given.extend((!value).to_le_bytes());
    }
    comms.in_place(Operation::AllReduce(ReduceOp::Max), DType::U8, None, &mut *given)?;
    // The largest byte and the largest complement are complements only where all ranks have the
    // same byte.
    let mut pairs = given[count..].chunks_exact(WORD_BYTES as usize).map(|pair| pair.split_at(8));
    let alike = std::array::from_fn(|_| {
        let mut pair = pairs.next().into_iter().flat_map(|(low, high)| low.iter().zip(high));
        pair.all(|(byte, complement)| byte ^ complement == 0xff)
    });
    given.truncate(count);
    Ok(alike)
}

/// Hash that ranks compare in every step: of the rules with their current base rates, and of
/// callers' writes since the step before. Those writes are forgotten.
pub(crate) fn take_compared(state: &mut State) -> u64 {
    let rules = &state.rules;
    let rules = || xxh3_64(format!("{rules:?}").as_bytes());
    let hash = *state.rules_hash.get_or_insert_with(rules);
    hash.wrapping_add(state.written.take_hash())
}

/// Compares everything but values; a single rank has nobody to compare with.
pub(crate) fn compare_settings(run: &mut Run<'_, '_>) -> Result<()> {
    if run.plan.topology.world == 1 {
        return Ok(());
    }
    compare(run.comms, &settings(run.plan, run.state))
}

/// Names the setting or the tensor in which ranks differ, on all ranks, if `is_alike` is false.
/// Ranks may be alike then, too: a tensor that one rank has written twice may be equal on all.
pub(crate) fn check_alike(run: &mut Run<'_, '_>, is_alike: bool) -> Result<()> {
    if is_alike {
        return Ok(());
    }
    compare_settings(run)?;
    let values = values(run.plan, run.state, run.backend, |role| role != Role::Grad)?;
    compare(run.comms, &values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_rules_are_found_by_name() {
        let find = |rule: &dyn std::fmt::Debug| settings_of(&format!("{rule:?}"));
        let own = |pairs: &[(&str, &str)]| -> Vec<Field> {
            pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let adam = find(&fusestep_fused_adam::Adam::default());
        let expected = [
            ("lr", "0.001"),
            ("beta1", "0.9"),
            ("beta2", "0.999"),
            ("eps", "1e-8"),
            ("weight_decay", "decoupled(0.01)"),
            ("second_moment", "running"),
            ("objective", "minimize"),
        ];
        assert_eq!(adam, own(&expected));
        let lars = find(&fusestep_lars_momentum::Lars::default());
        assert_eq!(lars.last(), own(&[("excluded", "plainlr")]).last());
    }
}

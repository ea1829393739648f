//! Ranks compare everything that decides the bits of a run before the first step, at every resume,
//! and whenever they are asked to.
//!
//! Each rank lists fields and values as text. Rank 0's list goes to all, each rank looks for the
//! first field that differs, and all of them hear of the lowest rank that has found one: the error
//! names the field and both values on every rank alike.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::Backend;
use fusestep_tensor::{DType, ParamDesc, Role};
use xxhash_rust::xxh3::xxh3_64;

use crate::comms::Comms;
use crate::{Plan, PlanError, State, ZeroStage};

/// A field and this rank's value of it.
type Field = (String, String);

/// Bytes of a differing value that a rank tells the others.
const TOLD_BYTES: usize = 256;

/// [`Plan::handshake`].
pub(crate) fn handshake(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    caller: &[(&str, String)],
) -> Result<(), PlanError> {
    if plan.topology.world == 1 {
        return Ok(());
    }
    let mut fields = settings(plan, state);
    fields.extend(
        caller
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone())),
    );
    fields.extend(values(plan, state, backend)?);
    compare(comms, &fields)
}

/// [`Plan::compare_settings`].
pub(crate) fn compare_settings(
    plan: &Plan,
    state: &State,
    comms: &mut Comms<'_>,
) -> Result<(), PlanError> {
    if plan.topology.world == 1 {
        return Ok(());
    }
    compare(comms, &settings(plan, state))
}

/// [`Plan::compare_parameters`].
pub(crate) fn compare_parameters(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
) -> Result<(), PlanError> {
    if plan.topology.world == 1 {
        return Ok(());
    }
    compare(comms, &values(plan, state, backend)?)
}

/// Everything but values.
fn settings(plan: &Plan, state: &State) -> Vec<Field> {
    let mut fields = vec![
        ("world size".to_owned(), plan.topology.world.to_string()),
        (
            "number of parameters".to_owned(),
            plan.params.len().to_string(),
        ),
        ("number of rules".to_owned(), plan.rules.len().to_string()),
    ];
    let mut add = |name: &str, value: String| fields.push((name.to_owned(), value));
    for (index, rule) in state.rules.iter().enumerate() {
        let of = |name: &str| {
            if index == 0 {
                name.to_owned()
            } else {
                format!("{name} of rule {index}")
            }
        };
        add(&of("optimizer"), rule.name().to_owned());
        for (name, value) in rule.rule().hyper_parameters() {
            add(&of(name), value.to_string());
        }
        // Options that are no numbers.
        add(&of("optimizer's settings"), format!("{rule:?}"));
    }
    let schedule = plan.schedule().map(ToString::to_string);
    add("schedule", schedule.unwrap_or_else(|| "none".to_owned()));
    add("steps run", state.step.to_string());
    add("zero stage", plan.zero.number().to_string());
    add("ranks that share shards", plan.shard_group.to_string());
    add("ownership", format!("{:?}", plan.ownership));
    add("buckets", format!("{:?}", plan.caps));
    add(
        "clip_by_global_norm, loss_scaling",
        format!("{:?}", plan.gradients),
    );
    add("update_norms", plan.update_norms.to_string());
    add("update_in_backward", plan.in_backward.to_string());
    add("accumulate", format!("{:?}", plan.accumulation()));
    add("local_sgd", format!("{:?}", plan.local_sgd()));
    add("precision", format!("{:?}", plan.precisions));
    for (param, rule) in plan.params.iter().zip(plan.rule_of.iter()) {
        add(
            &format!("parameter `{}`", param.name),
            text_of(param, *rule),
        );
    }
    add("plan", format!("{:016x}", plan.hash));
    fields
}

/// A hash of each parameter that all ranks hold alike.
fn values(plan: &Plan, state: &State, backend: &dyn Backend) -> Result<Vec<Field>, PlanError> {
    let alike =
        plan.zero != ZeroStage::Three && (plan.local_sgd().is_none() || state.since_average == 0);
    let mut fields = Vec::new();
    for (param, desc) in plan.params.iter().enumerate().filter(|_| alike) {
        let spec = &plan.storages[plan.places[param].0];
        if spec.distributed || desc.numel() == 0 {
            continue;
        }
        let mut bytes = vec![0; desc.numel() as usize * desc.dtype.len_bytes()];
        state.read(backend, Role::Param, &desc.name, &mut bytes)?;
        let hash = format!("hash {:016x}", xxh3_64(&bytes));
        fields.push((format!("values of `{}`", desc.name), hash));
    }
    Ok(fields)
}

fn text_of(param: &ParamDesc, rule: u32) -> String {
    format!(
        "{} {} lr_scale {} weight_decay {:?} trust {:?} rule {rule}",
        param.dtype, param.shape, param.lr_scale, param.weight_decay, param.trust
    )
}

/// Compares each rank's fields with those of rank 0.
fn compare(comms: &mut Comms<'_>, fields: &[Field]) -> Result<(), PlanError> {
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
        let value = fields
            .get(at)
            .map_or("nothing", |(_, value)| value.as_str());
        let len = (0..=value.len().min(TOLD_BYTES))
            .rev()
            .find(|&len| value.is_char_boundary(len))
            .unwrap_or(0);
        told[..len].copy_from_slice(&value.as_bytes()[..len]);
    }
    let broadcast = Operation::Broadcast { root: other };
    comms.in_place(broadcast, DType::U8, None, &mut told)?;
    let line = of_first.get(found[other] as usize - 1).copied();
    let (field, expected) = line
        .and_then(|line| line.split_once('\0'))
        .unwrap_or(("fields", "none"));
    Err(PlanError::RanksDiffer {
        field: field.to_owned(),
        expected: expected.chars().take(TOLD_BYTES).collect(),
        rank: other,
        found: String::from_utf8_lossy(&told)
            .trim_end_matches('\0')
            .to_owned(),
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
fn told_by_each(comms: &mut Comms<'_>, own: f64) -> Result<Vec<f64>, PlanError> {
    let mut all = vec![0.0; comms.world()];
    all[comms.rank()] = own;
    let operation = Operation::AllReduce(ReduceOp::Sum);
    comms.in_place(
        operation,
        DType::F64,
        None,
        bytemuck::cast_slice_mut(&mut all),
    )?;
    Ok(all)
}

//! The plan as text.

use std::fmt;

use fusestep_launch::{Precision, StateDType};
use fusestep_tensor::{DType, Quoted, counted, escaped, grouped, power_of_two};

use crate::plan::passes::rewrite::Rewrite;
use crate::plan::settings::{GradientAccumulation, TableKind};
use crate::plan::stage::{Norm, Optimize, Reduced, Stage};
use crate::plan::topology::Topology;
use crate::plan::value::Plan;

/// Batches of a stage that are printed one by one; the rest is summed up.
const BATCHES_SHOWN: usize = 8;

/// Rounding beside state in codes, all of whose roots and maxima are dithered.
const ROUNDED_IN_CODES: &str = "second moments and maxima dithered, all else rounded to nearest";

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan {}", self.optimizer())?;
        for rule in &self.rules[1..] {
            writeln!(f, "  and {rule}")?;
        }
        if let Some(schedule) = &self.schedule {
            writeln!(f, "  learning rates follow {schedule}")?;
        }
        fmt_ranks(self, f)?;
        writeln!(
            f,
            "  {}, {}, {} optimizer state, {} memory traffic per step",
            counted(self.params.len() as u64, "parameter"),
            counted(self.elements(), "element"),
            bytes(self.state_bytes()),
            bytes(self.traffic_bytes()),
        )?;
        fmt_precisions(self, f)?;
        writeln!(
            f,
            "  {} per step (naive: {}), {}, chunks of {}",
            counted(self.launches() as u64, "launch"),
            grouped(self.naive_launches() as u64),
            counted(self.limits.argument_bytes as u64, "argument byte"),
            counted(self.limits.chunk_elements.into(), "element"),
        )?;
        if self.table == TableKind::Resident {
            writeln!(
                f,
                "  tables resident in the device's memory; the cpu has none and {} per step",
                counted(self.host_launches() as u64, "launch")
            )?;
        }
        if self.in_backward {
            writeln!(f, "  updates run as soon as their gradients are given")?;
        }
        for (index, storage) in self.storages.iter().enumerate().take(BATCHES_SHOWN) {
            let roles = storage.roles();
            writeln!(
                f,
                "storage {index}: {} in {} ({}), {}",
                counted(storage.members.len() as u64, "tensor"),
                counted(storage.lists.len() as u64, "buffer"),
                roles.join(", "),
                bytes(storage.len_bytes()),
            )?;
        }
        if self.storages.len() > BATCHES_SHOWN {
            let rest = self.storages.len() - BATCHES_SHOWN;
            writeln!(f, "  and {rest} more storages")?;
        }
        for (index, stage) in self.stages.iter().enumerate().take(BATCHES_SHOWN) {
            fmt_stage(self, f, index, stage)?;
        }
        if self.stages.len() > BATCHES_SHOWN {
            let rest = self.stages.len() - BATCHES_SHOWN;
            writeln!(f, "  and {rest} more stages")?;
        }
        for note in &self.notes {
            writeln!(f, "note {note}")?;
        }
        Ok(())
    }
}

fn fmt_ranks(plan: &Plan, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Topology { rank, world, .. } = plan.topology;
    if world == 1 {
        return Ok(());
    }
    let zero = plan.zero.number();
    let buckets = counted(plan.buckets.len() as u64, "bucket");
    write!(f, "  rank {rank} of {world}, zero stage {zero}, {buckets}")?;
    if plan.shard_group != world {
        write!(f, ", shards among {} ranks", plan.shard_group)?;
    }
    writeln!(f)
}

/// One line for every dtype that is kept otherwise than by default.
fn fmt_precisions(plan: &Plan, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut dtypes: Vec<_> = plan.params.iter().map(|param| param.dtype).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    for dtype in dtypes {
        let precision = plan.precision(dtype);
        if precision != Precision::default() {
            // Ranks and files compare the precision's own text, which is the same for all dtypes.
            let state = if dtype == DType::F64 { "state f64" } else { "state f32" };
            let text = precision.to_string().replace("state as computed", state);
            let text = match precision.state {
                StateDType::Int8 => text.replace("rounded to nearest", ROUNDED_IN_CODES),
                _ => text,
            };
            writeln!(f, "  {dtype} parameters: {text}")?;
        }
    }
    Ok(())
}

fn fmt_stage(plan: &Plan, f: &mut fmt::Formatter<'_>, index: usize, stage: &Stage) -> fmt::Result {
    write!(f, "stage {index}: ")?;
    match stage {
        Stage::Norm(norm) => fmt_norm(plan, f, norm),
        Stage::Optimize(optimize) => fmt_update(plan, f, "optimize", optimize),
        Stage::ReduceUpdate(optimize) => fmt_update(plan, f, "reduce and optimize", optimize),
        Stage::Accumulate(stage) => {
            let micro_steps = counted(stage.rule.every.get().into(), "micro-step");
            writeln!(f, "{} {micro_steps}", GradientAccumulation::NAME)
        }
        Stage::Reduce(reduce) => {
            let call = match reduce.result {
                Reduced::Whole => "all-reduce",
                Reduced::Part => "reduce-scatter",
            };
            writeln!(f, "{call} {}", text_of_bucket(plan, reduce.bucket))
        }
        Stage::Trust => writeln!(f, "sums over whole tensors, each rank its part"),
        Stage::Gather(gather) => {
            let calls = match gather.broadcasts.len() {
                0 => "all-gather".to_owned(),
                calls => counted(calls as u64, "broadcast"),
            };
            writeln!(f, "{calls} of parameters, {}", text_of_bucket(plan, gather.bucket))
        }
        Stage::Average(rule) => {
            writeln!(f, "average parameters every {}", counted(rule.every.get(), "step"))
        }
    }
}

fn text_of_bucket(plan: &Plan, index: usize) -> String {
    let bucket = &plan.buckets[index];
    let width = plan.storages[bucket.storage].grad_dtype().len_bytes() as u64;
    format!(
        "bucket {index} ({}, {} of gradients)",
        counted(bucket.numel(), "element"),
        bytes(bucket.numel() * width)
    )
}

fn fmt_update(
    plan: &Plan,
    f: &mut fmt::Formatter<'_>,
    what: &str,
    stage: &Optimize,
) -> fmt::Result {
    let storage = &plan.storages[stage.storage];
    let bucket = stage
        .bucket
        .map_or(String::new(), |bucket| format!("{} of ", text_of_bucket(plan, bucket)));
    writeln!(
        f,
        "{what} {bucket}storage {} with {}, {}",
        stage.storage,
        storage.kernel,
        counted(stage.tensors.len() as u64, "tensor"),
    )?;
    for (index, batch) in stage.batches.iter().enumerate().take(BATCHES_SHOWN) {
        let name =
            |tensor: Option<u32>| tensor.map_or("", |tensor| plan.name(stage.storage, tensor));
        let first = name(batch.records.first().map(|record| record.tensor));
        let last = name(batch.records.last().map(|record| record.tensor));
        writeln!(
            f,
            "  launch {index}: {}, {}, {}, {}: {} .. {}",
            counted(batch.records.len() as u64, "tensor"),
            counted(batch.chunks.into(), "chunk"),
            counted(batch.elements(), "element"),
            counted(batch.groups.len() as u64, "group"),
            Quoted(first),
            Quoted(last),
        )?;
    }
    if stage.batches.len() > BATCHES_SHOWN {
        let rest = stage.batches.len() - BATCHES_SHOWN;
        writeln!(f, "  and {rest} more launches")?;
    }
    Ok(())
}

fn fmt_norm(plan: &Plan, f: &mut fmt::Formatter<'_>, norm: &Norm) -> fmt::Result {
    write!(
        f,
        "norm of all gradients in {}, {}",
        counted(norm.launches() as u64, "launch"),
        counted(norm.chunks(), "chunk"),
    )?;
    if let Some(max_norm) = plan.gradients.max_norm {
        write!(f, ", clipped to {}", max_norm.value())?;
    }
    if let Some(scale) = plan.gradients.loss_scale {
        write!(f, ", loss scale {}", power_of_two(scale.scale()))?;
    }
    writeln!(f)
}

/// A length in bytes with its binary unit.
pub(crate) fn bytes(value: u64) -> String {
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", value as f64 / *unit as f64),
        None => format!("{value} B"),
    }
}

/// Text made safe for HTML: names come from files.
pub(crate) fn escape(text: &str) -> String {
    escaped(text)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

//! Summary of a plan in numbers, and the hash by which plans are compared.

use std::borrow::Cow;
use std::fmt::Write;
use std::hash::Hasher;

use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::plan::rule::Optimizer;
use crate::plan::settings::TableKind;
use crate::plan::stage::Stage;
use crate::plan::value::Plan;

/// The hash of the plan's rules, layout and stages, as far as they are the same on all ranks.
pub(crate) fn hash(plan: &Plan) -> u64 {
    let mut text = HashWriter(Xxh3::new());
    let names = plan.rules.iter().map(Optimizer::name).collect::<Vec<_>>();
    // Slices have lengths of their own on every rank, and so have their layouts and launches.
    let slices = plan.slices.iter().map(|(&param, slices)| (param, slices[0].clone()));
    let mut params = Cow::Borrowed(&*plan.params);
    slices.for_each(|(param, of_first)| params.to_mut()[param].shape = of_first);
    let precisions = &plan.precisions;
    let shape = (plan.topology.world, plan.shard_group, plan.zero, plan.ownership);
    let asked = (&plan.gradients, plan.update_norms, plan.accumulation(), plan.averaging());
    // A hash has no error to return.
    let _ = write!(
        text,
        "{names:?}{:?}{params:?}{precisions:?}{shape:?}{asked:?}{:?}{:?}{:?}",
        plan.rule_of, plan.tensors, plan.segments, plan.buckets
    );
    for spec in &plan.storages {
        let (kernel, rule, members, lists) = (spec.kernel, spec.rule, &spec.members, &spec.lists);
        let _ = if spec.distributed {
            write!(text, "{:?}true", (kernel, rule, members, lists))
        } else {
            write!(text, "{:?}false", (kernel, rule, members, &spec.layout, lists))
        };
    }
    if !plan.slices.is_empty() {
        let _ = write!(text, "slices{:?}", plan.slices);
    }
    if plan.in_backward {
        let _ = write!(text, "update in backward");
    }
    if let Some(lanes) = plan.lanes {
        let _ = write!(text, "{lanes:?}");
    }
    if let Some(wire) = plan.wire {
        let _ = write!(text, "travels as {wire}");
    }
    for stage in &plan.stages {
        let _ = match stage {
            Stage::Optimize(own) if plan.storages[own.storage].distributed => Ok(()),
            // Elements and batches are this rank's own.
            Stage::Optimize(own) | Stage::ReduceUpdate(own) => {
                write!(text, "update{:?}{:?}{:?}", own.storage, own.bucket, own.tensors)
            }
            Stage::Norm(_) => write!(text, "norm"),
            other => write!(text, "{other:?}"),
        };
    }
    if let Some(schedule) = &plan.schedule {
        let _ = write!(text, "schedule {schedule}");
    }
    text.0.finish()
}

/// Text that is hashed as it is written.
struct HashWriter(Xxh3);

impl Write for HashWriter {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

/// The numbers of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanSummary {
    /// The update rule.
    pub optimizer: &'static str,
    /// The schedule that multiplies the learning rates; `null` if they stay as they are.
    pub schedule: Option<String>,
    /// Number of parameters.
    pub parameters: usize,
    /// Number of elements of all parameters.
    pub elements: u64,
    /// Launches of one step on a device.
    pub launches: usize,
    /// Launches of one step in the host's memory.
    pub host_launches: usize,
    /// Launches of the naive plan.
    pub naive_launches: usize,
    /// Bytes of optimizer state, padding included.
    pub state_bytes: u64,
    /// Bytes of memory traffic of one step.
    pub traffic_bytes: u64,
    /// The limit that batches were made for.
    pub argument_bytes: usize,
    /// The place of the launches' tables.
    pub table: TableKind,
    /// Whether buckets are updated before the step is run.
    pub update_in_backward: bool,
    /// The limit of the gradients' norm; `null` if they are not clipped.
    pub max_norm: Option<f64>,
    /// The loss scale of the first step; `null` if the loss is not scaled.
    pub loss_scale: Option<f64>,
    /// [`Plan::hash`] in hexadecimal.
    pub hash: String,
    /// Notes of the passes: what each did and why.
    pub notes: Vec<String>,
}

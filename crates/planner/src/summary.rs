//! A plan's numbers, what its passes did and why, and the hash by which plans know each other.

use std::fmt;
use std::fmt::Write;
use std::hash::Hasher;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::{Optimizer, Plan, Stage, TableKind};

/// The hash of all that decides where things lie and what is done, and is the same on all ranks.
pub(crate) fn hash(plan: &Plan) -> u64 {
    let mut text = HashWriter(Xxh3::new());
    let names = plan.rules.iter().map(Optimizer::name).collect::<Vec<_>>();
    let (params, precisions) = (&plan.params, &plan.precisions);
    let shape = (plan.topology.world, plan.shard_group, plan.zero, plan.ownership);
    let asked = (&plan.gradients, plan.update_norms, plan.accumulation(), plan.local_sgd());
    // A hash has no error to return.
    let _ = write!(
        text,
        "{names:?}{:?}{params:?}{precisions:?}{shape:?}{asked:?}{:?}{:?}{:?}",
        plan.rule_of, plan.tensors, plan.segments, plan.buckets
    );
    for spec in &plan.storages {
        let lists = (spec.kernel, spec.rule, &spec.members, &spec.layout, &spec.lists);
        let _ = write!(text, "{lists:?}{}", spec.distributed);
    }
    if plan.in_backward {
        let _ = write!(text, "update in backward");
    }
    for stage in &plan.stages {
        let _ = match stage {
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
    /// What multiplies the learning rates; `null` if they stay as they are.
    pub schedule: Option<String>,
    /// Number of parameters.
    pub parameters: usize,
    /// Their elements.
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
    /// Where the tables of launches lie.
    pub table: TableKind,
    /// Whether buckets are updated before the step is run.
    pub update_in_backward: bool,
    /// The limit of the gradients' norm; `null` if they are not clipped.
    pub max_norm: Option<f64>,
    /// The loss scale of the first step; `null` if the loss is not scaled.
    pub loss_scale: Option<f64>,
    /// [`Plan::hash`] in hexadecimal.
    pub hash: String,
    /// What the passes did and why.
    pub notes: Vec<String>,
}

/// The outcome that a note explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The pass rewrote the plan.
    Applied,
    /// Things that might have gone together were kept apart.
    Split,
    /// Something was left out.
    Skipped,
    /// The pass left the plan as it was.
    Refused,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Applied => "applied",
            Verdict::Split => "split",
            Verdict::Skipped => "skipped",
            Verdict::Refused => "refused",
        })
    }
}

/// One decision of one pass, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The pass.
    pub pass: String,
    /// What it decided.
    pub verdict: Verdict,
    /// What it did and why, as a sentence.
    pub reason: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.pass, self.verdict, self.reason)
    }
}

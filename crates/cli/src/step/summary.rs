//! The summary of `step`, as JSON or in words.

use fusestep_planner::GradReport;
use fusestep_tensor::{Quoted, counted, grouped};
use serde::Serialize;

use crate::output::{duration, print};

/// The result that `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct StepSummary {
    /// Steps of this run.
    pub(super) steps: u64,
    /// The state's step count after the run.
    pub(super) step: u64,
    /// Launches of the last step; 0 without steps.
    pub(super) launches: u64,
    /// Mean time of a step; `null` without steps.
    pub(super) ns_per_step: Option<f64>,
    pub(super) parameters: usize,
    pub(super) elements: u64,
    /// Times that a tensor was left as it was because its norm was not finite.
    pub(super) tensors_skipped: u64,
    pub(super) backend: &'static str,
    pub(super) optimizer: &'static str,
    /// Norm of all gradients in the last step, the loss scale taken out; `null` unless they are
    /// clipped or scaled.
    pub(super) grad_norm: Option<f64>,
    /// Steps of this run that were skipped because a gradient was not finite.
    pub(super) skipped: u64,
    /// The factor on the next step's loss; `null` unless the loss is scaled.
    pub(super) loss_scale: Option<f64>,
    /// Norms and infinite or NaN elements of each gradient in the last step; `null` unless they
    /// are clipped or scaled.
    pub(super) gradients: Option<Vec<Gradient>>,
    /// Norm of the last step's change of all parameters, ‖new − old‖; `null` without
    /// `--update-norms`.
    pub(super) update_norm: Option<f64>,
    /// Norms of each parameter.
    pub(super) updates: Option<Vec<Update>>,
}

/// Distance that the last step moved one parameter.
#[derive(Debug, Serialize)]
pub(super) struct Update {
    pub(super) name: String,
    pub(super) norm: f64,
}

/// Report of the last step on one gradient.
#[derive(Debug, Serialize)]
pub(super) struct Gradient {
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) report: GradReport,
}

impl StepSummary {
    /// Prints the summary in words, with the files that were written.
    pub(super) fn print(&self, wrote: &[String]) -> anyhow::Result<()> {
        let launches = counted(self.launches, "launch");
        let each = self
            .ns_per_step
            .map_or_else(String::new, |ns| format!(" {launches} and {} per step;", duration(ns)));
        print(&format!(
            "{} on {} ({}, {}):{each} {}\n",
            counted(self.steps, &format!("{} step", self.optimizer)),
            self.backend,
            counted(self.parameters as u64, "parameter"),
            counted(self.elements, "element"),
            told(wrote),
        ))?;
        if let Some(norm) = self.grad_norm {
            print(&format!(
                "norm of the gradients: {norm}; {} skipped\n{}",
                counted(self.skipped, "step"),
                culprits(self.gradients.as_deref().unwrap_or_default())
            ))?;
        }
        if let Some(norm) = self.update_norm {
            let updates = self.updates.as_deref().unwrap_or_default();
            print(&format!("norm of the last update: {norm}\n{}", farthest(updates)))?;
        }
        Ok(())
    }
}

/// Files after the word for each, which is said once where the next file has the same.
fn told(wrote: &[String]) -> String {
    let mut told = String::new();
    let mut before = "";
    for file in wrote {
        let (did, path) = file.split_once(' ').unwrap_or(("", file));
        let comma = if told.is_empty() { "" } else { ", " };
        told +=
            &if did == before { format!("{comma}{path}") } else { format!("{comma}{did} {path}") };
        before = did;
    }
    told
}

/// Most tensors that are named, as the cause of a skipped step or as the farthest moved.
const NAMED: usize = 5;

/// The gradients because of which the last step was skipped; empty if it was not skipped.
fn culprits(gradients: &[Gradient]) -> String {
    let found: Vec<_> = gradients.iter().filter(|g| g.report.non_finite > 0).collect();
    let mut text = String::new();
    for gradient in found.iter().take(NAMED) {
        text += &format!(
            "gradient `{}`: expected finite elements, found {} infinite or NaN\n",
            Quoted(&gradient.name),
            grouped(gradient.report.non_finite)
        );
    }
    if found.len() > NAMED {
        text += &format!("and {} more\n", counted((found.len() - NAMED) as u64, "gradient"));
    }
    text
}

/// The parameters that moved the most.
fn farthest(updates: &[Update]) -> String {
    let mut ranked: Vec<&Update> = updates.iter().collect();
    ranked.sort_by(|a, b| b.norm.total_cmp(&a.norm));
    let lines = ranked.iter().take(NAMED);
    let lines = lines.map(|update| format!("{:>14.6e}  {}\n", update.norm, Quoted(&update.name)));
    let mut text: String = lines.collect();
    if ranked.len() > NAMED {
        let more = counted((ranked.len() - NAMED) as u64, "parameter");
        text += &format!("and {more} that moved less\n");
    }
    text
}

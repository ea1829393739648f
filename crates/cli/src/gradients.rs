//! What is done to all gradients together, clipping and loss scaling; and what is measured of
//! updates.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;
use clap::Args;
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Planner, UpdateNorms};
use fusestep_tensor::Quoted;

/// Clipping, loss scaling, and norms of updates.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct GradientArgs {
    /// Largest norm of all gradients together; larger ones are scaled down to it
    #[arg(long, value_name = "NORM", allow_hyphen_values = true, value_parser = parse_norm)]
    pub(crate) clip_norm: Option<f64>,
    /// Factor that the loss was multiplied with, a power of two, or `dynamic`; a step with a
    /// gradient that is not finite is skipped
    #[arg(long, value_name = "SCALE|dynamic", allow_hyphen_values = true)]
    pub(crate) loss_scale: Option<ScaleArg>,
    /// Measure how far each parameter moves in a step, ‖new − old‖, as the update writes it
    #[arg(long)]
    pub(crate) update_norms: bool,
}

impl GradientArgs {
    /// Whether no flag was given.
    pub(crate) fn none(&self) -> bool {
        self.clip_norm.is_none() && self.loss_scale.is_none() && !self.update_norms
    }

    /// The planner with the passes asked for; their values are checked when a plan is made.
    pub(crate) fn passes(&self, mut planner: Planner) -> Planner {
        if let Some(max_norm) = self.clip_norm {
            planner = planner.with(ClipByGlobalNorm::new(max_norm));
        }
        if self.update_norms {
            planner = planner.with(UpdateNorms);
        }
        match self.loss_scale {
            Some(ScaleArg::Dynamic) => planner.with(LossScaling::dynamic()),
            Some(ScaleArg::Fixed(scale)) => planner.with(LossScaling::fixed(scale)),
            None => planner,
        }
    }
}

/// Reads a norm that gradients can be held to.
fn parse_norm(text: &str) -> Result<f64, String> {
    let norm = text.parse::<f64>().ok();
    norm.filter(|norm| norm.is_finite() && *norm > 0.0).ok_or_else(|| {
        "expected a finite number above 0; leave the flag out to clip nothing".to_owned()
    })
}

/// A loss scale as it is given on the command line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ScaleArg {
    /// Starts at 65,536 and follows the steps.
    Dynamic,
    /// Stays.
    Fixed(f64),
}

impl FromStr for ScaleArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "dynamic" {
            return Ok(ScaleArg::Dynamic);
        }
        match text.parse() {
            Ok(scale) => Ok(ScaleArg::Fixed(scale)),
            Err(_) => bail!("expected a power of two or `dynamic`, found \"{}\"", Quoted(text)),
        }
    }
}

impl fmt::Display for ScaleArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScaleArg::Dynamic => f.write_str("dynamic"),
            ScaleArg::Fixed(scale) => scale.fmt(f),
        }
    }
}

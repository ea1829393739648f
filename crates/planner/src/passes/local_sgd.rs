//! Pass `local_sgd`: ranks update on their own and average their parameters now and then.

use std::fmt;
use std::num::NonZeroU64;

use fusestep_tensor::counted;
use serde::Serialize;

use super::{ActsOn, Pass, refuse_twice};
use crate::{Plan, Result, Stage, Verdict};

/// Which tensors are averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Averaged {
    /// Parameters only; each rank's optimizer state stays its own.
    #[default]
    Params,
    /// The optimizer's state as well.
    ParamsAndState,
}

/// How the number of steps between two averages is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Interval {
    /// It stays.
    #[default]
    Fixed,
    /// After every average [`LocalSgd::adapted`] takes it from the losses that
    /// [`crate::State::set_loss`] was told; steps without a loss are followed by an average
    /// each.
    Adaptive,
}

/// Averages parameters every `every` steps in place of gradients every step; up to step `begin`
/// every step.
///
/// Averaging is counted in steps taken or skipped since the last one, so a skipped step does not
/// skip it.
///
/// # Source
/// Stich 2019, arXiv:1805.09767; the rule for adaptive intervals is that of PaddlePaddle's
/// `localsgd_optimizer.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LocalSgd {
    /// Steps between two averages.
    pub every: NonZeroU64,
    /// Steps at the start that each average.
    pub begin: u64,
    /// What is averaged.
    pub averaged: Averaged,
    /// Whether `every` changes as the run goes on.
    pub interval: Interval,
}

impl LocalSgd {
    /// Longest interval of the adaptive rule.
    pub const MAX_ADAPTIVE: u64 = 16;

    /// Averages parameters every this many steps, from the first on.
    pub fn every(every: NonZeroU64) -> Self {
        Self { every, begin: 0, averaged: Averaged::Params, interval: Interval::Fixed }
    }

    /// Lets the interval, `every` at first, follow the loss.
    pub fn adaptive(mut self) -> Self {
        self.interval = Interval::Adaptive;
        self
    }

    /// The interval after a loss has fallen from `first_loss` to `loss` and the rate gone from
    /// `first_lr` to `lr`: `⌈√(first_lr · loss / (lr · first_loss) · every)⌉`, from 1 to
    /// [`Self::MAX_ADAPTIVE`].
    pub fn adapted(self, first_loss: f64, loss: f64, first_lr: f64, lr: f64) -> Self {
        let ratio = first_lr * loss / (lr * first_loss) * self.every.get() as f64;
        let every = ratio.sqrt().ceil();
        // NaN and everything below 1 become 1: a run that has lost its way averages at once.
        let every = if every >= 1.0 { (every as u64).min(Self::MAX_ADAPTIVE) } else { 1 };
        Self { every: NonZeroU64::new(every).unwrap_or(NonZeroU64::MIN), ..self }
    }

    /// Whether to average after step `step` (counted from 1), `since` steps after the last average.
    pub(crate) fn due(self, step: u64, since: u64) -> bool {
        step <= self.begin || since >= self.every.get()
    }
}

/// As ranks compare it: `parameters every 4 steps, each of the first 0 steps`.
impl fmt::Display for LocalSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let averaged = match self.averaged {
            Averaged::Params => "parameters",
            Averaged::ParamsAndState => "parameters and state",
        };
        let interval = match self.interval {
            Interval::Fixed => "",
            Interval::Adaptive => " at first, then as losses say",
        };
        let LocalSgd { every, begin, .. } = self;
        let (every, begin) = (counted(every.get(), "step"), counted(*begin, "step"));
        write!(f, "{averaged} every {every}{interval}, each of the first {begin}")
    }
}

impl Pass for LocalSgd {
    const NAME: &'static str = "local_sgd";
    const ACTS_ON: ActsOn = ActsOn::Ranks;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.local_sgd().is_some())?;
        plan.stages.retain(|stage| !matches!(stage, Stage::Reduce(_)));
        plan.stages.push(Stage::Average(*self));
        let reason = format!("ranks average {self}; gradients never");
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_intervals_stay_within_bounds() {
        let start = LocalSgd::every(NonZeroU64::new(4).unwrap());
        let every = |loss, lr| start.adapted(1.0, loss, 1.0, lr).every.get();
        assert_eq!((every(1.0, 1.0), every(0.25, 1.0), every(0.0, 1.0)), (2, 1, 1));
        assert_eq!((every(1e9, 1.0), every(1.0, 1e-9), every(f64::NAN, 1.0)), (16, 16, 1));
        assert_eq!(every(1.01, 1.0), 3);
    }

    #[test]
    fn averages_are_due_at_the_start_and_then_every_few_steps() {
        let rule = LocalSgd { begin: 2, ..LocalSgd::every(NonZeroU64::new(3).unwrap()) };
        assert!(rule.due(1, 1) && rule.due(2, 1));
        assert!(!rule.due(3, 1) && !rule.due(4, 2) && rule.due(5, 3) && rule.due(9, 7));
    }
}

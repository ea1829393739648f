//! Comparisons of ranks' parameters every few batches, and advice for a run that has gone astray.

use anyhow::ensure;
use fusestep::{Session, StepOptions};
use fusestep_launch::SettingValue;
use fusestep_tensor::{DType, counted};

use crate::output::note;
use crate::train::args::TrainArgs;

/// Batches since the run began, and comparisons after them.
#[derive(Default)]
pub(super) struct Compared {
    batches: u64,
    made: u64,
    /// Comparisons that were due between two averages.
    left_out: u64,
}

/// Refuses comparisons that a run of so many batches never comes to. The first rank tells which
/// batches are left out.
pub(super) fn require_comparisons(
    args: &TrainArgs,
    batches: usize,
    rank: usize,
) -> anyhow::Result<()> {
    let Some(every) = args.compare_parameters else {
        return Ok(());
    };
    ensure!(
        every.get() <= batches as u64,
        "--compare-parameters: expected at most the {} of this run, found {every}; ranks would \
         never be compared",
        counted(batches as u64, "batch")
    );
    if args.settings.averages() && rank == 0 {
        note(
            "note: --compare-parameters: between averages ranks have parameters of their own, and \
             only batches that end in an average are compared",
        );
    }
    Ok(())
}

impl Compared {
    /// Compares the ranks' parameters after every so many batches, as --compare-parameters says.
    pub(super) fn after_batch(
        &mut self,
        args: &TrainArgs,
        session: &mut Session<'_>,
    ) -> anyhow::Result<()> {
        let Some(every) = args.compare_parameters else {
            return Ok(());
        };
        self.batches += 1;
        if self.batches % every != 0 {
            return Ok(());
        }
        if session.state().is_between_averages() {
            self.left_out += 1;
            return Ok(());
        }
        self.made += 1;
        Ok(session.compare_parameters()?)
    }

    /// Says at the end how often ranks were compared, where that is less often than was asked for.
    pub(super) fn tell(&self, args: &TrainArgs, rank: usize) {
        let Some(every) = args.compare_parameters.filter(|_| rank == 0) else {
            return;
        };
        if self.made == 0 || self.left_out > 0 {
            note(&format!(
                "note: --compare-parameters {every}: ranks were compared {}, and {} between \
                 averages left out",
                counted(self.made, "time"),
                counted(self.left_out, "comparison")
            ));
        }
    }
}

/// Advice for a loss that is not finite.
pub(super) fn advice(args: &TrainArgs, options: &StepOptions) -> &'static str {
    let mut rule = options.rule;
    let mut eps = None;
    rule.each(&mut |setting| {
        if let ("eps", SettingValue::Number(value, _)) = (setting.name, setting.value) {
            eps = Some(*value);
        }
    });
    let is_0 = |eps: f64| match args.dtype {
        DType::F64 => eps == 0.0,
        _ => eps as f32 == 0.0,
    };
    if eps.is_some_and(is_0) {
        "give an --eps above 0: without it a gradient of 0 is divided by 0"
    } else {
        "use a smaller --lr"
    }
}

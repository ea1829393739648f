//! The result of `train`.

use fusestep_tensor::{counted, grouped};
use serde::Serialize;

use crate::output::{duration, grouped_tenths};

/// The result that `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct TrainSummary {
    /// Name of the trained model.
    pub(crate) model: String,
    /// Backend that steps ran on.
    pub(crate) backend: &'static str,
    /// Epochs of the whole run, with the epochs that a checkpoint had seen.
    pub(crate) epochs: usize,
    /// Epochs that the checkpoint had seen from which this session went on; absent if the session
    /// began anew. `steps`, `history` and all that is counted or timed are this session's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) resumed_epochs: Option<usize>,
    pub(crate) steps: u64,
    /// Steps that changed nothing because a gradient was not finite.
    pub(crate) skipped_steps: u64,
    /// Micro-steps whose gradients were dropped with the skipped steps; with lanes those of all
    /// ranks.
    pub(crate) dropped_micro_steps: u64,
    pub(crate) final_loss: f64,
    pub(crate) test_loss: f64,
    pub(crate) test_accuracy: f64,
    /// Characters or images learned from in a second, all ranks together.
    pub(crate) tokens_per_second: f64,
    /// Share of a batch's time that is ours on rank 0: to hand over, reduce and update parameters
    /// and gradients.
    pub(crate) step_share: f64,
    /// Name of the tokens, in the plural: characters or images.
    pub(crate) tokens: &'static str,
    /// Mean time of our optimizer's step.
    pub(crate) optimizer_ns_per_step: f64,
    /// The update rule.
    pub(crate) optimizer: &'static str,
    /// The base learning rate, given or the model's own.
    pub(crate) lr: f64,
    /// Element type of parameters and gradients.
    pub(crate) dtype: &'static str,
    /// Mean time of candle's AdamW on the same gradients, if the rule is AdamW.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) candle_ns_per_step: Option<f64>,
    /// Distance that the last step moved all parameters, ‖new − old‖, with `--update-norms`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) update_norm: Option<f64>,
    /// xxh3 of all parameter bytes in name order.
    pub(crate) params_hash: String,
    pub(crate) launches_per_step: usize,
    #[serde(flatten)]
    pub(crate) ranks: RankNumbers,
    /// File of flags that repeats the run, for `--config`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) config: Option<String>,
    pub(crate) history: Vec<Epoch>,
    /// Text that the model writes, if it is a model of texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) written: Option<String>,
}

/// Memory that each rank holds, and calls and bytes that it sends.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankNumbers {
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// Engine that carries calls between the ranks.
    pub(crate) engine: String,
    /// ZeRO stage.
    pub(crate) zero: u8,
    /// Bytes of optimizer state on rank 0, padding included.
    pub(crate) state_bytes_per_rank: u64,
    /// Calls between ranks for each update; of stage 3 also those that gather parameters.
    pub(crate) collectives_per_step: f64,
    /// Bytes that each rank sends for each update, by ring algorithms.
    pub(crate) bytes_sent_per_step: f64,
    /// Most bytes of whole parameters that were held beside the state while the model used them.
    pub(crate) layer_peak_bytes: u64,
    /// Most bytes of segments of gradients that were held at one time.
    pub(crate) bucket_peak_bytes: u64,
    /// Bytes of all parameters.
    pub(crate) parameter_bytes: u64,
}

/// Measurements of one epoch.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Epoch {
    /// Mean training loss.
    pub(crate) loss: f64,
    /// Mean loss on the samples that are held back, and the share of them that is answered right.
    pub(crate) test_loss: f64,
    pub(crate) test_accuracy: f64,
}

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (loss, test_loss) = (self.loss, self.test_loss);
        let percent = 100.0 * self.test_accuracy;
        write!(f, "loss {loss:.4}, test loss {test_loss:.4}, test accuracy {percent:.2} %")
    }
}

impl TrainSummary {
    /// Whether the checkpoint had seen all epochs, so that nothing is measured.
    pub(crate) fn was_complete(&self) -> bool {
        self.resumed_epochs.is_some() && self.history.is_empty()
    }

    /// Writes the epochs and steps of the run, and how well the model does.
    fn fmt_epochs(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let epochs = counted(self.epochs as u64, "epoch");
        let steps = counted(self.steps, "step");
        match self.resumed_epochs {
            None => write!(f, "{epochs}, {steps}")?,
            Some(over) if self.was_complete() => write!(
                f,
                "nothing was done: the checkpoint is at epoch {over}, and --epochs asks for \
                 {}",
                self.epochs
            )?,
            Some(over) => write!(f, "{epochs}, {over} of them before this session; {steps} in it")?,
        }
        let percent = 100.0 * self.test_accuracy;
        writeln!(f, ": loss {:.4}, test accuracy {percent:.2} %", self.final_loss)?;
        if self.skipped_steps > 0 {
            let skipped = counted(self.skipped_steps, "step");
            let rest = grouped(self.steps - self.skipped_steps);
            write!(
                f,
                "{skipped} skipped, since a gradient was not finite; logs and checkpoints count the \
                 other {rest}"
            )?;
            if self.dropped_micro_steps > self.skipped_steps {
                let dropped = counted(self.dropped_micro_steps, "micro-step");
                write!(f, "; {dropped} dropped with them")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }

    /// Writes the times of steps.
    fn fmt_times(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "optimizer: {} and {} per step",
            duration(self.optimizer_ns_per_step),
            counted(self.launches_per_step as u64, "launch"),
        )?;
        if self.backend != "cpu" {
            write!(f, " on {}", self.backend)?;
        }
        if let Some(candle) = self.candle_ns_per_step {
            write!(
                f,
                "; candle's AdamW on the same gradients: {} ({:.1} times as long)",
                duration(candle),
                candle / self.optimizer_ns_per_step,
            )?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "{} {} a second, {:.1} % of the time in the step: parameters and gradients handed \
             over, reduced and updated",
            grouped(self.tokens_per_second.round() as u64),
            self.tokens,
            100.0 * self.step_share,
        )?;
        if let Some(norm) = self.update_norm {
            writeln!(f, "norm of the last update: {norm}")?;
        }
        Ok(())
    }

    /// Writes the state that each rank holds and, if there were steps, the calls and bytes.
    fn fmt_ranks(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers = &self.ranks;
        write!(
            f,
            "{} ({}), zero stage {}: {} of optimizer state on rank 0",
            counted(numbers.ranks as u64, "rank"),
            numbers.engine,
            numbers.zero,
            counted(numbers.state_bytes_per_rank, "byte"),
        )?;
        if !self.was_complete() {
            write!(
                f,
                ", {} calls and {} sent per step",
                grouped_tenths(numbers.collectives_per_step),
                counted(numbers.bytes_sent_per_step.round() as u64, "byte"),
            )?;
        }
        writeln!(f)
    }
}

impl std::fmt::Display for TrainSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.fmt_epochs(f)?;
        if !self.was_complete() {
            self.fmt_times(f)?;
        }
        if self.ranks.ranks > 1 {
            self.fmt_ranks(f)?;
        }
        if let Some(written) = &self.written {
            writeln!(f, "it writes:\n{written}")?;
        }
        writeln!(f, "parameters: xxh3 {}", self.params_hash)
    }
}

//! `fusestep train`: a small model learns with the planned optimizer.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use fusestep_tensor::{DType, counted};
use fusestep_tensor_file::check_writable;
use serde::Serialize;

use crate::engine::{Engine, Ranks, Watch};
use crate::options::{
    BackendName, param_dtype, parse_threads, require_candle_threads, start_compute_threads,
};
use crate::output::{duration, show, warn, write_page};
use crate::places::require_beside;
use crate::ranks::{MOST_RANKS, whole};
use crate::report::report_page;
use crate::rules::OptimizerArgs;
use crate::settings::{self, Settings, expected_several};
use crate::tasks::{Model, TaskArgs, help_on_rates, plain_rates, rate};
use crate::training::{self, Trained};
use crate::values::descs;

/// Most passes over the samples.
pub(crate) const MOST_EPOCHS: usize = 1_000_000;

/// Most samples of one step, of all ranks together.
const MOST_SAMPLES: u64 = 1_000_000;

/// Says in the help of `train` that a model has learning rates of its own.
pub(crate) fn with_own_rates(command: clap::Command) -> clap::Command {
    let help =
        "Learning rate per step, at least 0 [default: the rule's of those listed at the end]";
    command.mut_arg("lr", |arg| arg.help(help))
}

/// Flags of `train`.
#[derive(Debug, Args)]
#[command(after_help = help_on_rates())]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) task: TaskArgs,
    /// Passes over the training images; for the transformer 4 by default, each over 512 windows of
    /// its text
    #[arg(
        long,
        default_value = "20",
        default_value_if("model", "transformer", "4"),
        value_parser = whole::<usize, 1, { MOST_EPOCHS as u64 }>
    )]
    pub(crate) epochs: usize,
    /// Images or windows of one step, of all ranks together; for the transformer 16 by default
    #[arg(
        long,
        default_value = "32",
        default_value_if("model", "transformer", "16"),
        value_parser = whole::<usize, 1, MOST_SAMPLES>
    )]
    pub(crate) batch: usize,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    #[command(flatten)]
    pub(crate) settings: Settings<settings::Train>,
    /// Number of ranks, each with its part of every batch
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST_RANKS>)]
    pub(crate) ranks: Option<usize>,
    /// Engine that carries calls between ranks [default: thread]
    #[arg(long, value_enum)]
    pub(crate) engine: Option<Engine>,
    #[command(flatten)]
    pub(crate) watch: Watch,
    /// Compare all ranks' parameters by hash after every this many batches, and stop where they
    /// differ
    #[arg(long, value_name = "K", value_parser = whole::<NonZeroU64, 1, { u64::MAX }>)]
    pub(crate) compare_parameters: Option<NonZeroU64>,
    /// Element type of parameters and gradients
    #[arg(long, value_parser = param_dtype(), default_value = "f32")]
    pub(crate) dtype: DType,
    /// Seed of the first parameters, the split and the order of samples
    #[arg(long, default_value_t = 1, value_parser = whole::<u64, 0, { u64::MAX }>)]
    pub(crate) seed: u64,
    /// Backend that steps run on; a model's own passes run on the cpu. With `--engine nccl` each
    /// rank has a GPU, on which its gradients stay from then on; ranks of other engines share the
    /// first GPU
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) backend: BackendName,
    /// Threads of the cpu backend, of all ranks together, 256 at most [default: RAYON_NUM_THREADS,
    /// which is held to the same; all processors if it is not set, empty or 0]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Save parameters, optimizer state and position after every epoch
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Save after every this many batches, too, between micro-steps and between averages as well
    #[arg(
        long,
        value_name = "K",
        requires = "checkpoint",
        value_parser = whole::<NonZeroU64, 1, { u64::MAX }>
    )]
    pub(crate) save_every: Option<NonZeroU64>,
    /// Go on from the checkpoint: of however many ranks, unless it was saved between micro-steps
    /// or under --local-sgd. --epochs are those of the whole run; what is counted and timed, with
    /// --json `steps`, `skipped_steps` and `history`, is this session's, and `resumed_epochs` are
    /// those that the checkpoint had seen
    #[arg(long, requires = "checkpoint")]
    pub(crate) resume: bool,
    /// Go on although the checkpoint was saved under other settings, as far as its state means the
    /// same: another momentum, decay or clipping, other parameters excluded
    #[arg(long, requires = "resume")]
    pub(crate) any_settings: bool,
    /// Write a page with the curves and the plan
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl TrainArgs {
    /// Refuses flags of several ranks that would do nothing on the one that there is.
    fn require_several(&self) -> anyhow::Result<()> {
        self.settings.require_several(self.ranks, "--ranks")?;
        ensure!(
            self.compare_parameters.is_none(),
            "--compare-parameters: {}; one rank has nobody to compare with",
            expected_several(self.ranks, "--ranks")
        );
        self.watch.require_several(self.ranks)
    }
}

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
    /// Micro-steps whose gradients were dropped with the skipped steps.
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

/// Trains on all ranks; rank 0 prints.
pub(crate) fn run(args: &TrainArgs) -> anyhow::Result<()> {
    let engine = args.engine.unwrap_or_default();
    let ranks = Ranks::new(args.ranks, args.watch.clone());
    if engine.is_one(&ranks) {
        args.require_several()?;
    }
    ensure!(
        args.compare_parameters.is_none() || args.settings.zero() < 3,
        "--compare-parameters: expected ranks that hold all parameters, found --zero 3, where \
         each holds its part; give another stage or leave the comparison out"
    );
    let lr = rate(args.task.model, args.optimizer.optimizer);
    let rule = args.optimizer.clone().with_default_lr(lr).rule()?;
    if args.task.model == Model::Transformer {
        require_candle_threads()?;
    }
    let task = args.task.task(args.seed)?;
    let task = task.as_ref();
    let mut params = descs(task, args.dtype)?;
    args.optimizer.require_excluded(args.settings.exclude())?;
    let options = args.settings.of_model(rule, &mut params)?;
    plain_rates(&args.optimizer, args.task.model, &mut params);
    // A page that cannot be written is known before the training and not after.
    if let Some(path) = &args.report {
        check_writable(path)?;
        if let Some(folder) = &args.checkpoint {
            require_beside(("--report", path), ("--checkpoint", folder))?;
        }
    }
    args.backend.is_built()?;
    args.backend.require_threads(args.threads)?;
    // Ranks that are threads need more than the caller's.
    let one = args.threads.filter(|_| engine != Engine::Thread || engine.is_one(&ranks));
    start_compute_threads(one)?;
    let trained =
        engine.run(&ranks, |comm| training::train(args, &options, (task, &params), comm))?;
    // Other ranks have nothing to say.
    let Some(Trained { summary, plan }) = trained else {
        return Ok(());
    };
    if let Some(path) = &args.report {
        write_page(path, &report_page(&summary, &plan))?;
    }
    // Guesses among equals have this loss.
    let guessed = (task.answers() as f64).ln();
    if summary.steps > 0 && summary.test_loss >= guessed {
        warn(&format!(
            "warning: the model has learned nothing: its test loss is {:.4}, and that of guesses \
             {guessed:.4}; try another --lr, or more --epochs",
            summary.test_loss
        ));
    }
    show(args.json, &summary)
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
            write!(f, "{skipped} skipped, since a gradient was not finite")?;
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
            "{:.0} {} a second, {:.1} % of the time in the step: parameters and gradients handed \
             over, reduced and updated",
            self.tokens_per_second,
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
            "{} ({}), zero stage {}: {} bytes of optimizer state each",
            counted(numbers.ranks as u64, "rank"),
            numbers.engine,
            numbers.zero,
            numbers.state_bytes_per_rank,
        )?;
        if !self.was_complete() {
            write!(
                f,
                ", {:.1} calls and {:.0} bytes sent per step",
                numbers.collectives_per_step, numbers.bytes_sent_per_step,
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

//! Flags of `train`.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use fusestep_tensor::DType;

use crate::config::ConfigArgs;
use crate::engine::{Engine, Watch};
use crate::figures::FiguresArgs;
use crate::options::{BackendName, MOST_RANKS, param_dtype, parse_threads, whole};
use crate::records::RecordArgs;
use crate::rules::OptimizerArgs;
use crate::settings::{self, Settings, expected_several};
use crate::tasks::TaskArgs;

/// Most passes over the samples.
pub(crate) const MOST_EPOCHS: usize = 1_000_000;

/// Most samples of one step, of all ranks together.
const MOST_SAMPLES: u64 = 1_000_000;

/// Flags of `train`.
#[derive(Debug, Args)]
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
    /// Seed of the first parameters, the split and the order of samples
    #[arg(long, default_value_t = 1, value_parser = whole::<u64, 0, { u64::MAX }>)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    /// Element type of parameters and gradients
    #[arg(long, value_parser = param_dtype(), default_value = "f32")]
    pub(crate) dtype: DType,
    #[command(flatten)]
    pub(crate) settings: Settings<settings::Train>,
    /// Number of ranks, each with its part of every batch
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST_RANKS>)]
    pub(crate) ranks: Option<usize>,
    /// Engine that carries calls between ranks [default: thread]
    #[arg(long, value_enum)]
    pub(crate) engine: Option<Engine>,
    #[command(flatten)]
    pub(crate) figures: FiguresArgs,
    #[command(flatten)]
    pub(crate) watch: Watch,
    /// Compare all ranks' parameters by hash after every this many batches, and stop where they
    /// differ
    #[arg(long, value_name = "K", value_parser = whole::<NonZeroU64, 1, { u64::MAX }>)]
    pub(crate) compare_parameters: Option<NonZeroU64>,
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
    #[command(flatten)]
    pub(crate) records: RecordArgs,
    /// Write a page with the curves and the plan
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl TrainArgs {
    /// Refuses flags of several ranks that would do nothing on the one that there is.
    pub(super) fn require_several(&self) -> anyhow::Result<()> {
        self.settings.require_several(self.ranks, "--ranks")?;
        ensure!(
            self.compare_parameters.is_none(),
            "--compare-parameters: {}; one rank has nobody to compare with",
            expected_several(self.ranks, "--ranks")
        );
        self.watch.require_several(self.ranks)?;
        ensure!(
            self.engine.is_none() || self.ranks.is_some(),
            "--engine: {}; one rank needs no engine",
            expected_several(self.ranks, "--ranks")
        );
        Ok(())
    }
}

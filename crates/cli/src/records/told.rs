//! Lines of a record: the run, its updates, its epochs.

use fusestep::{Figures, Report};
use serde::{Serialize, Serializer};

use crate::train::summary::Epoch;

/// The run as the first line of a log says it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunLine {
    kind: &'static str,
    /// Version of this command.
    fusestep: &'static str,
    /// Day and time of the beginning, in UTC.
    pub(crate) date: String,
    /// The command as it was typed.
    pub(crate) command: String,
    /// The flags that repeat the run; `None` where one is no text.
    settings: Option<toml::Table>,
    pub(crate) machine: Machine,
    pub(crate) model: String,
    pub(crate) engine: String,
    /// Number of ranks, and the rank that writes.
    pub(crate) world: usize,
    rank: usize,
    /// Updates that a checkpoint had seen from which the run goes on.
    pub(super) resumed_step: Option<u64>,
}

/// The machine that a run is on.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) processors: usize,
}

/// Parts of a run's first line that the command knows.
pub(crate) struct Of<'a> {
    pub(crate) model: String,
    pub(crate) engine: String,
    pub(crate) world: usize,
    pub(crate) config: Option<&'a str>,
    pub(crate) resumed_step: Option<u64>,
}

impl RunLine {
    pub(crate) fn of(of: Of<'_>) -> Self {
        let Figures { processor, processors, .. } = Figures::unmeasured();
        Self {
            kind: "run",
            fusestep: env!("CARGO_PKG_VERSION"),
            date: now(),
            command: typed(),
            settings: of.config.and_then(|text| text.parse().ok()),
            machine: Machine { processor, processors },
            model: of.model,
            engine: of.engine,
            world: of.world,
            rank: 0,
            resumed_step: of.resumed_step,
        }
    }
}

/// Record of one update on one rank.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepLine<'a> {
    kind: &'static str,
    rank: usize,
    pub(crate) epoch: usize,
    #[serde(flatten)]
    pub(crate) report: Report,
    /// Distance that each tensor moved, with `--update-norms`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) update_norms: Option<Norms<'a>>,
    /// Seconds of the model's forward and backward passes on this rank, since the update before.
    pub(crate) model_seconds: f64,
    /// Seconds of all that the update's batches took on this rank, from the first to the update.
    pub(crate) batch_seconds: f64,
}

/// Norms of tensors, in the order of the plan.
#[derive(Clone, Debug)]
pub(crate) struct Norms<'a> {
    pub(crate) names: &'a [&'a str],
    pub(crate) norms: Vec<f64>,
}

impl Serialize for Norms<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.names.iter().zip(&self.norms))
    }
}

impl<'a> StepLine<'a> {
    pub(crate) fn new(rank: usize, epoch: usize, report: Report) -> Self {
        let update_norms = None;
        let (model_seconds, batch_seconds) = (0.0, 0.0);
        Self { kind: "step", rank, epoch, report, update_norms, model_seconds, batch_seconds }
    }
}

/// Record of the end of an epoch.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct EpochLine {
    kind: &'static str,
    rank: usize,
    epoch: usize,
    /// Updates so far.
    step: u64,
    #[serde(flatten)]
    ended: Epoch,
}

impl EpochLine {
    pub(super) fn new(epoch: usize, step: u64, ended: Epoch) -> Self {
        Self { kind: "epoch", rank: 0, epoch, step, ended }
    }
}

/// Day and time in UTC, `YYYY-MM-DDThh:mm:ssZ`.
pub(crate) fn now() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let second = since.map_or(0, |since| since.as_secs() % 86_400);
    let (hours, minutes, seconds) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{}T{hours:02}:{minutes:02}:{seconds:02}Z", Figures::today())
}

/// The command as a shell would take it again.
pub(crate) fn typed() -> String {
    let is_plain = |text: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%".contains(c);
        !text.is_empty() && text.chars().all(plain)
    };
    let quoted = |text: String| {
        if is_plain(&text) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
    };
    let typed = std::env::args_os().skip(1).map(|text| text.to_string_lossy().into_owned());
    let texts = std::iter::once("fusestep".to_owned()).chain(typed.map(quoted));
    texts.collect::<Vec<_>>().join(" ")
}

//! Flags of `verify`, and refusals of those that do not go together.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use fusestep::{OptionError, StepOptions};
use fusestep_tensor::DType;

use crate::engine::Engine;
use crate::options::{MOST_RANKS, name_of, named, param_dtype, parse_threads, whole};
use crate::output::note;
use crate::planning::refused;
use crate::rules::OptimizerArgs;
use crate::settings::{self, Settings};

/// Most steps of a run.
const MOST_STEPS: u64 = 1_000_000;

/// Numbers of ranks where none are given, as far as there are lanes for them.
const WORLDS: [usize; 4] = [1, 2, 3, 4];

/// Flags of `verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// A model (.safetensors, or the .safetensors.index.json of several files), or its shapes
    /// (.json)
    pub(crate) model: PathBuf,
    /// Steps of every run, from gradients drawn at random
    #[arg(long, value_name = "N", default_value = "3", value_parser = whole::<usize, 1, MOST_STEPS>)]
    pub(crate) steps: usize,
    /// Seed of the first parameters and of all gradients
    #[arg(long, default_value_t = 1, value_parser = whole::<u64, 0, { u64::MAX }>)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    /// Element type of shapes that state none [default: f32]
    #[arg(long, value_parser = param_dtype())]
    pub(crate) dtype: Option<DType>,
    #[command(flatten)]
    pub(crate) settings: Settings<settings::Verify>,
    /// Threads, of all ranks together, 256 at most [default: RAYON_NUM_THREADS, which is held to
    /// the same; all processors if it is not set, empty or 0]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Numbers of ranks, between commas [default: 1,2,3,4 as far as there are lanes]
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        value_parser = whole::<usize, 1, MOST_RANKS>
    )]
    worlds: Vec<usize>,
    /// ZeRO stages, between commas: memory that ranks share out [default: 0,1,2,3 as far as the
    /// settings go with them]
    #[arg(long, value_name = "STAGE,...", value_delimiter = ',', value_parser = whole::<u8, 0, 3>)]
    zero: Vec<u8>,
    /// Engines that carry calls between ranks, between commas
    #[arg(
        long,
        value_name = "ENGINE,...",
        value_delimiter = ',',
        default_value = "thread",
        value_parser = named([
            ("thread", Engine::Thread, "Ranks are threads of this process"),
            ("processes", Engine::Processes, "Ranks are processes of this machine, started here"),
        ])
    )]
    engine: Vec<Engine>,
    /// Hash that every run must end in: that of an earlier run, or of another machine
    #[arg(long, value_name = "HASH", value_parser = parse_hash)]
    pub(crate) expect: Option<String>,
    /// Print the runs as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// File that ranks which are processes write their runs to, for the command that started them.
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) results: Option<PathBuf>,
}

/// Reads a hash as it is printed.
fn parse_hash(text: &str) -> Result<String, String> {
    let is_hash = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let hash = is_hash.then(|| text.to_ascii_lowercase());
    hash.ok_or_else(|| "expected the 16 hexadecimal digits of a run's hash".to_owned())
}

impl VerifyArgs {
    /// Engine of this process: that of the ranks it is one of, or of ranks that it starts.
    pub(crate) fn engine(&self) -> Engine {
        if self.results.is_some() { Engine::Processes } else { Engine::Thread }
    }

    /// Engines of all runs.
    ///
    /// # Errors
    /// An engine that is named twice.
    pub(super) fn engines(&self) -> anyhow::Result<&[Engine]> {
        let twice = twice(&self.engine);
        let found = twice.map(name_of).unwrap_or_default();
        ensure!(
            twice.is_none(),
            "--engine: expected each engine once, found {found} twice; leave one out"
        );
        Ok(&self.engine)
    }

    /// Numbers of ranks of all runs.
    ///
    /// # Errors
    /// No lanes; more ranks than lanes; a number that is named twice.
    pub(super) fn worlds(&self, options: &StepOptions) -> anyhow::Result<Vec<usize>> {
        let lanes = options.lanes.context(
            "--lanes: expected a number of lanes, found no such flag; give one of at least the \
             largest of --worlds, such as --lanes 12: without lanes sums follow the ranks",
        )?;
        let has_lanes = |world: &usize| *world <= lanes as usize;
        if self.worlds.is_empty() {
            return Ok(WORLDS.into_iter().filter(has_lanes).collect());
        }
        if let Some(world) = twice(&self.worlds) {
            anyhow::bail!(
                "--worlds: expected each number of ranks once, found {world} twice; leave one out"
            );
        }
        let most = self.worlds.iter().copied().max().unwrap_or_default();
        ensure!(
            has_lanes(&most),
            "--worlds: expected at most {lanes} ranks, one for each of --lanes, found {most}; \
             leave {most} out, or give --lanes {most} or more"
        );
        Ok(self.worlds.clone())
    }

    /// ZeRO stages of all runs: those that are given, or those that settings go with on each of the
    /// `worlds`. A note names those that are left out.
    ///
    /// # Errors
    /// A stage that is named twice, or that settings do not go with; settings that go with none.
    pub(super) fn stages(
        &self,
        options: &StepOptions,
        worlds: &[usize],
    ) -> anyhow::Result<Vec<u8>> {
        if let Some(zero) = twice(&self.zero) {
            anyhow::bail!("--zero: expected each stage once, found {zero} twice; leave one out");
        }
        let check = |zero: u8| -> Result<(), OptionError> {
            let options = StepOptions { zero, ..options.clone() };
            worlds.iter().try_for_each(|world| options.check(*world))
        };
        if !self.zero.is_empty() {
            for zero in &self.zero {
                check(*zero).map_err(|error| refused(error).context(format!("--zero {zero}")))?;
            }
            return Ok(self.zero.clone());
        }
        let (mut stages, mut left_out) = (Vec::new(), Vec::new());
        for zero in 0..=3 {
            match check(zero) {
                Ok(()) => stages.push(zero),
                Err(error) => left_out.push((zero, refused(error))),
            }
        }
        if stages.is_empty()
            && let Some((_, error)) = left_out.pop()
        {
            return Err(error);
        }
        for (zero, error) in left_out {
            note(&format!("note: --zero {zero} is left out: {error}"));
        }
        Ok(stages)
    }
}

/// The first value that is there more than once.
fn twice<T: Copy + PartialEq>(values: &[T]) -> Option<T> {
    let is_again = |(at, value): &(usize, &T)| values[..*at].contains(value);
    values.iter().enumerate().find(is_again).map(|(_, value)| *value)
}

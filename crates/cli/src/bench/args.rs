//! Flags of `bench`, and which of them go together.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::ensure;
use clap::{Args, Id, ValueEnum};
use fusestep_tensor::{DType, ParamDesc};

use crate::bench_collective::CollectiveArgs;
use crate::config::ConfigArgs;
use crate::engine::Engine;
use crate::figures::FiguresArgs;
use crate::inputs::dtype_names;
use crate::options::{param_dtype, parse_threads, threads, whole};
use crate::rules::OptimizerArgs;
use crate::settings::{self, Settings, ids_of_ranks};

/// Most rounds.
const MOST_ROUNDS: u64 = 1_000_000;

/// Headings in the help, for flags that only some of the timed steps know.
const OF_COLLECTIVES: &str = "Collectives, without a model";
const OF_ALL_RANKS: &str = "Ranks, of steps and of --collective";
const OF_STEPS_OF_RANKS: &str = "Ranks, of steps alone: 2 without --ranks";
const OF_ONE_PROCESS: &str = "Peers, of one process: without flags of ranks";

/// Groups the flags of `bench` in its help by what they go together with.
pub(crate) fn with_headings(command: clap::Command) -> clap::Command {
    let command = headed(command, ids::<CollectiveArgs>(), OF_ALL_RANKS);
    let command = headed(command, ["collective", "sizes"].map(Id::from).into(), OF_COLLECTIVES);
    let command = headed(command, ids_of_ranks::<settings::Bench>(), OF_STEPS_OF_RANKS);
    let command = headed(command, ids::<FiguresArgs>(), OF_STEPS_OF_RANKS);
    let command = headed(command, ids::<PeerArgs>(), OF_ONE_PROCESS);
    headed(command, [Id::from("peer")].into(), OF_ONE_PROCESS)
}

fn ids<A: Args>() -> Vec<Id> {
    let command = A::augment_args(clap::Command::new("flags"));
    command.get_arguments().map(|arg| arg.get_id().clone()).collect()
}

fn headed(command: clap::Command, flags: Vec<Id>, heading: &'static str) -> clap::Command {
    let put = |command: clap::Command, flag| command.mut_arg(flag, |arg| arg.help_heading(heading));
    flags.into_iter().fold(command, put)
}

/// Flags of `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A model (.safetensors, or the .safetensors.index.json of several files), or its shapes
    /// (.json)
    #[arg(required_unless_present = "collective", conflicts_with = "collective")]
    pub(crate) model: Option<PathBuf>,
    /// Rounds; each times everything in turn, and the best of each counts
    #[arg(long, value_name = "N", default_value = "5", value_parser = whole::<usize, 1, MOST_ROUNDS>)]
    pub(crate) rounds: usize,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    /// Element type of shapes that state none [default: f32]
    #[arg(long, value_parser = param_dtype())]
    pub(crate) dtype: Option<DType>,
    #[command(flatten)]
    pub(crate) settings: Settings<settings::Bench>,
    /// Threads, of all ranks together, 256 at most [default: RAYON_NUM_THREADS, which is held to
    /// the same; all processors if it is not set, empty or 0]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    #[command(flatten)]
    pub(crate) collective: CollectiveArgs,
    #[command(flatten)]
    pub(crate) figures: FiguresArgs,
    /// Also time another implementation on the same shapes, and ours in its place
    #[arg(long, value_enum)]
    pub(crate) peer: Option<Peer>,
    #[command(flatten)]
    pub(crate) peers: PeerArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Print the numbers as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl BenchArgs {
    /// The engine that carries calls between ranks, if there are any.
    pub(crate) fn engine(&self) -> Option<Engine> {
        let calls = self.collective.collective.is_some() || self.of_ranks();
        calls.then(|| self.collective.engine.unwrap_or_default())
    }

    /// Whether steps of many ranks are timed.
    pub(crate) fn of_ranks(&self) -> bool {
        let CollectiveArgs { ranks, engine, .. } = &self.collective;
        let asked = ranks.ranks.is_some() || ranks.meet() || engine.is_some();
        asked || self.settings.asks_for_ranks()
    }

    /// Refuses flags that the timed steps do not know.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if self.of_ranks() {
            if let Some(count) = self.collective.ranks.ranks {
                self.settings.require_several(Some(count), "--ranks")?;
            }
            ensure!(
                self.peer.is_none() && !self.peers.peers,
                "--peer, --peers: expected no flag of ranks beside them, such as --ranks, \
                 --engine and --zero, found one"
            );
            return Ok(());
        }
        self.collective.ranks.require_none("--ranks or --collective")
    }

    /// The threads asked for, or all of the machine.
    pub(crate) fn threads(&self) -> anyhow::Result<NonZeroUsize> {
        threads(self.threads)
    }
}

/// Implementations to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// candle_nn::AdamW, beside fusestep_candle::AdamW on variables of the same shapes
    Candle,
}

/// Flags of `bench` on peers.
#[derive(Debug, Args)]
pub(crate) struct PeerArgs {
    /// Time AdamW beside PyTorch, DeepSpeed, candle and burn, as far as this machine has them; with
    /// --state-dtype int8 beside bitsandbytes, torchao and PyTorch
    #[arg(long, conflicts_with_all = ["peer", "collective"])]
    pub(crate) peers: bool,
    /// The Python in which PyTorch and other packages are looked for
    #[arg(long, value_name = "PATH", default_value = "python3", requires = "peers")]
    pub(crate) python: PathBuf,
    /// Write times and plan as a page
    #[arg(long, value_name = "FILE", requires = "peers")]
    pub(crate) report: Option<PathBuf>,
    /// Write the times as a picture
    #[arg(long, value_name = "FILE", requires = "peers")]
    pub(crate) svg: Option<PathBuf>,
}

/// The names of the parameters' dtypes.
pub(crate) fn dtypes(args: &BenchArgs, params: &[ParamDesc]) -> String {
    dtype_names(params, args.dtype)
}

#[cfg(test)]
mod tests {
    use clap::{Arg, FromArgMatches};

    use super::*;
    use crate::command_line::command;
    use crate::headings::OUTPUT;

    fn parser() -> clap::Command {
        let command = command(&[]);
        command.find_subcommand("bench").expect("a subcommand").clone()
    }

    /// Whether `bench` takes these flags together.
    fn takes(args: &[String]) -> bool {
        let all = ["bench"].into_iter().chain(args.iter().map(String::as_str));
        let matches = parser().try_get_matches_from(all);
        let args = matches.and_then(|matches| BenchArgs::from_arg_matches(&matches));
        args.is_ok_and(|args| args.collective.collective.is_some() || args.check().is_ok())
    }

    /// The flag with a value that it takes, and the flags that it asks for.
    fn given(arg: &Arg) -> Vec<String> {
        let own = format!("--{}", arg.get_long().unwrap());
        let possible = arg.get_possible_values().into_iter().next();
        let other = match arg.get_id().as_str() {
            "sizes" => "4KiB",
            "schedule" => "constant",
            "lr_scale" | "weight_decay_of" => "w=1",
            "trust_of" => "w=plain",
            _ => "1",
        };
        let value = possible.map_or(other.to_owned(), |value| value.get_name().to_owned());
        let mut all = vec![own.clone()];
        all.extend(arg.get_action().takes_values().then_some(value));
        let with: &[&str] = match arg.get_id().as_str() {
            "python" | "report" | "svg" => &["--peers"],
            "meet" => &["--rank", "1"],
            "rank" | "gpu" => &["--meet", "folder", "--rank", "1"],
            _ => &[],
        };
        let with = with.chunks(if with == ["--peers"] { 1 } else { 2 });
        let with = with.filter(|flag| flag[0] != own).flatten();
        all.extend(with.map(|&text| text.to_owned()));
        all
    }

    #[test]
    fn the_help_lists_each_flag_where_it_is_taken() {
        let flags = |arg: &&Arg| arg.get_long().is_some_and(|long| long != "help");
        for arg in parser().get_arguments().filter(flags) {
            let given = given(arg);
            let beside = |more: &[&str]| {
                let more = more.iter().map(|&text| text.to_owned());
                takes(&more.chain(given.iter().cloned()).collect::<Vec<_>>())
            };
            let ranks = if arg.get_id() == "ranks" { &[][..] } else { &["--ranks", "2"] };
            let of_collective: &[&str] = match arg.get_id().as_str() {
                "collective" => &[],
                _ => &["--collective", "all-reduce"],
            };
            let found = (
                beside(&["model.json"]),
                beside(&[&["model.json"], ranks].concat()),
                beside(of_collective),
            );
            let expected = match arg.get_help_heading() {
                _ if arg.is_hide_set() => (false, false, false),
                Some(OF_COLLECTIVES) => (false, false, true),
                Some(OF_ALL_RANKS) => (found.0, true, true),
                Some(OF_STEPS_OF_RANKS) => (true, true, false),
                Some(OF_ONE_PROCESS) => (true, false, found.2),
                Some(OUTPUT) => (true, true, true),
                // Those of a model's step.
                Some(_) => (true, true, false),
                None => panic!("{given:?} stands under no heading"),
            };
            assert_eq!(found, expected, "{given:?} under {:?}", arg.get_help_heading());
        }
    }
}

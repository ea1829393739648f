//! What carries collectives, and who runs them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_collective_mpi::{Compare, MpiOptions, Reduction, launched_ranks};
use fusestep_collective_processes::{ProcessCommunicator, launched_processes};

use crate::options::name_of;
use crate::ranks::{MOST_RANKS, whole};
use crate::{launch, outcomes};

#[cfg(feature = "nccl")]
mod gpus;
#[cfg(feature = "nccl")]
use gpus::run as on_gpus;

/// Longest time that ranks wait for each other.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Engines of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// Ranks are threads of this process
    #[default]
    Thread,
    /// Ranks are processes of this machine, on memory that they share; started by `fusestep
    /// launch`, torchrun or this command itself
    Processes,
    /// Ranks are processes that mpirun has started; the same bits as threads
    Mpi,
    /// `mpi` with MPI's own all-reduce, in an order of its choice; calls are compared the first
    /// time they are made
    MpiNative,
    /// Ranks have a GPU each and are threads or, under mpirun, processes; the same bits as threads
    Nccl,
    /// `nccl` with NCCL's own all-reduce, in an order of its choice
    NcclNative,
}

/// How ranks look after each other.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Watch {
    /// Seconds that a rank waits for others before the run ends and names them [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = parse_timeout)]
    timeout: Option<Duration>,
    /// Where each rank writes its last calls if the run ends in an error or is ended by its
    /// launcher [default: nowhere]
    #[arg(long, value_name = "FOLDER")]
    flight_recorder: Option<PathBuf>,
}

/// Seconds above zero, a day at most.
fn parse_timeout(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    timeout
        .filter(|timeout| !timeout.is_zero() && *timeout <= LONGEST_TIMEOUT)
        .ok_or_else(|| format!("expected seconds above 0, {} at most", LONGEST_TIMEOUT.as_secs()))
}

impl Watch {
    /// Refuses flags that would do nothing, without those that `what` names.
    pub(crate) fn require_none(&self, what: &str) -> anyhow::Result<()> {
        ensure!(
            self.timeout.is_none() && self.flight_recorder.is_none(),
            "--timeout and --flight-recorder: expected {what} too, found no such flag; one rank \
             waits for nobody"
        );
        Ok(())
    }

    /// For ranks that are threads, or processes of this machine.
    fn of_machine(&self) -> Options {
        let default = Options::default();
        Options {
            timeout: self.timeout.unwrap_or(default.timeout),
            dump_folder: self.flight_recorder.clone(),
            ..default
        }
    }

    /// For processes that mpirun has started.
    fn of_processes(&self, reduction: Reduction, compare: Compare) -> MpiOptions {
        let default = MpiOptions::default();
        MpiOptions {
            timeout: self.timeout.unwrap_or(default.timeout),
            dump_folder: self.flight_recorder.clone(),
            reduction,
            compare,
            ..default
        }
    }
}

/// How many ranks there are, and how they find and look after each other.
#[derive(Clone, Debug, Args)]
pub(crate) struct Ranks {
    /// Ranks that are threads, 2 by default; mpirun says how many processes there are
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST_RANKS>)]
    pub(crate) ranks: Option<usize>,
    /// How many if nothing says so.
    #[arg(skip = 2usize)]
    default: usize,
    /// Processes with a GPU each that were not started by mpirun meet in this folder, new for
    /// every run (engines nccl, nccl-native)
    #[arg(long, value_name = "FOLDER", requires = "rank")]
    meet: Option<PathBuf>,
    /// Which of --ranks processes this one is, from 0
    #[arg(long, requires = "meet", value_parser = whole::<usize, 0, { u64::MAX }>)]
    rank: Option<usize>,
    /// This process's GPU; by default the one of its rank's number
    #[arg(long, requires = "meet", value_parser = whole::<usize, 0, { u64::MAX }>)]
    gpu: Option<usize>,
    #[command(flatten)]
    watch: Watch,
}

impl Ranks {
    /// So many; one if neither they nor a launcher are given.
    pub(crate) fn new(ranks: Option<usize>, watch: Watch) -> Self {
        Self { ranks, default: 1, meet: None, rank: None, gpu: None, watch }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.ranks.unwrap_or(self.default)
    }

    /// Refuses another number of ranks than a launcher has started.
    fn require_world(&self, comm: &dyn Communicator) -> anyhow::Result<()> {
        let world = comm.world_size();
        if let Some(asked) = self.ranks.filter(|asked| *asked != world) {
            bail!(
                "--ranks: expected the {world} that the launcher has started, found {asked}; \
                 leave the flag out, or start as many"
            );
        }
        Ok(())
    }

    /// Whether a folder is given in which they meet.
    pub(crate) fn meet(&self) -> bool {
        self.meet.is_some()
    }

    /// Refuses flags that would do nothing, without the flag that `what` names.
    pub(crate) fn require_none(&self, what: &str) -> anyhow::Result<()> {
        ensure!(
            self.ranks.is_none() && self.meet.is_none(),
            "--ranks and --meet: expected {what} too, found none; ranks are those of collectives"
        );
        self.watch.require_none(what)
    }
}

impl Engine {
    /// Runs `body` on every rank; returns what rank 0 has found, on rank 0 only.
    pub(crate) fn run<T: Send, E: Into<anyhow::Error> + Send>(
        self,
        ranks: &Ranks,
        body: impl Fn(&mut dyn Communicator) -> Result<T, E> + Sync,
    ) -> anyhow::Result<Option<T>> {
        ensure!(
            ranks.meet.is_none() || matches!(self, Engine::Nccl | Engine::NcclNative),
            "expected --engine nccl or nccl-native with --meet, found {}; a folder carries what \
             ranks say and no gradients",
            name_of(self)
        );
        let (reduction, compare) = match self {
            Engine::Thread => {
                let outcomes = run_ranks(ranks.count(), &ranks.watch.of_machine(), |mut comm| {
                    body(&mut comm).map_err(Into::into)
                });
                return outcomes::first(outcomes.context("cannot start a thread for each rank")?);
            }
            Engine::Processes => {
                // Is the launcher if there is none.
                if std::env::var_os("RANK").is_none() {
                    return launch::again(ranks.count()).map(|()| None);
                }
                let mut comm = ProcessCommunicator::world(&ranks.watch.of_machine())?;
                return on_process(ranks, &mut comm, body);
            }
            Engine::Mpi => (Reduction::Reproducible, Compare::EveryCall),
            // As little as can be between the caller and MPI: whoever asks for its sums asks for
            // its speed.
            Engine::MpiNative => (Reduction::Engine, Compare::FirstOfEach),
            Engine::Nccl => return on_gpus(ranks, Reduction::Reproducible, body),
            Engine::NcclNative => return on_gpus(ranks, Reduction::Engine, body),
        };
        let mut world = mpi_world(&ranks.watch.of_processes(reduction, compare))?;
        let launched = launched_processes().filter(|_| world.world_size() == 1);
        if let Some(launched) = launched {
            bail!(
                "{launched} processes were started together, and MPI knows of one; expected \
                 mpirun to start them, or --engine processes, found --engine {}",
                name_of(self)
            );
        }
        on_process(ranks, world.as_mut(), body)
    }
}

/// Runs `body` on this rank of those that a launcher has started.
fn on_process<T, E: Into<anyhow::Error>>(
    ranks: &Ranks,
    comm: &mut dyn Communicator,
    body: impl Fn(&mut dyn Communicator) -> Result<T, E>,
) -> anyhow::Result<Option<T>> {
    let found = ranks.require_world(comm);
    let found = found.and_then(|()| body(comm).map_err(Into::into));
    let found = found.with_context(|| format!("rank {}", comm.rank()))?;
    Ok((comm.rank() == 0).then_some(found))
}

/// Says what this build lacks.
#[cfg(not(feature = "nccl"))]
fn on_gpus<T, E>(
    _: &Ranks,
    _: Reduction,
    _: impl Fn(&mut dyn Communicator) -> Result<T, E>,
) -> anyhow::Result<Option<T>> {
    anyhow::bail!(
        "nccl: this build leaves NCCL out; build with the feature `nccl` (it takes nothing more \
         to build), or use ranks that are threads"
    )
}

/// All processes of the job that mpirun has started.
#[cfg(feature = "mpi")]
pub(crate) fn mpi_world(options: &MpiOptions) -> anyhow::Result<Box<dyn Communicator>> {
    Ok(Box::new(fusestep_collective_mpi::MpiCommunicator::world(options)?))
}

/// Says what this build lacks, and how many processes wait for it.
#[cfg(not(feature = "mpi"))]
pub(crate) fn mpi_world(_: &MpiOptions) -> anyhow::Result<Box<dyn Communicator>> {
    let launched = launched_ranks().map_or_else(String::new, |ranks| {
        format!(
            "; {ranks} processes were started together, and each would take itself for the whole"
        )
    });
    anyhow::bail!(
        "mpi: this build leaves MPI out; build with the feature `mpi` (it takes an MPI with mpicc, \
         and libclang), or use ranks that are threads{launched}"
    )
}

/// Refuses to be one of several processes that know nothing of each other: each would take itself
/// for the whole. `meets`: whether a folder is given in which they find each other.
pub(crate) fn require_engine(engine: Option<Engine>, meets: bool) -> anyhow::Result<()> {
    let (by_mpirun, by_others) = (launched_ranks(), launched_processes());
    let Some(launched) = by_mpirun.or(by_others) else {
        return Ok(());
    };
    let finds_others = match engine {
        None | Some(Engine::Thread) => false,
        // mpirun tells nobody where memory is that ranks share.
        Some(Engine::Processes) => by_others.is_some(),
        Some(Engine::Nccl | Engine::NcclNative) => by_mpirun.is_some() || meets,
        Some(Engine::Mpi | Engine::MpiNative) => true,
    };
    let (launcher, works) = match by_others {
        Some(_) => ("a launcher", "processes"),
        None => ("mpirun", "mpi"),
    };
    ensure!(
        finds_others,
        "{launched} processes were started together by {launcher}, and each would take itself for \
         the whole; expected --engine {works} (check, train, bench), found {}; or start one \
         process without {launcher}, whose ranks are those of --ranks",
        engine.map_or("none".to_owned(), name_of)
    );
    Ok(())
}

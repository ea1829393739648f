//! Engines of collectives, and how a command runs on their ranks.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use fusestep_collective::{
    ALONE_REMEDY, Carrier, Communicator, Options, alone_on_purpose, run_ranks, started_together,
    thread_ranks,
};
use fusestep_collective_mpi::{Compare, MpiOptions, Reduction};
use fusestep_collective_processes::{ProcessCommunicator, ProcessError, launched_processes};

use crate::options::{MOST_RANKS, name_of, parse_timeout, whole};
use crate::output::{note, warn};
use crate::settings::expected_several;
use crate::{launch, outcomes};

#[cfg(feature = "nccl")]
mod gpus;
#[cfg(feature = "nccl")]
use gpus::run as on_gpus;

/// Engines of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// Ranks are threads of this process
    #[default]
    #[value(alias = "threads")]
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

/// Flags of how ranks look after each other.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Watch {
    /// Seconds that a rank waits for others before the run ends and names them [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = parse_timeout)]
    timeout: Option<Duration>,
    /// Folder that each rank writes its last calls to, if the run ends in an error or its launcher
    /// ends it [default: none]
    #[arg(long, value_name = "FOLDER")]
    flight_recorder: Option<PathBuf>,
}

impl Watch {
    /// Refuses flags that would do nothing, without those that `what` names.
    pub(crate) fn require_none(&self, what: &str) -> anyhow::Result<()> {
        let given = [
            ("--timeout", self.timeout.is_some()),
            ("--flight-recorder", self.flight_recorder.is_some()),
        ];
        let given: Vec<&str> = given.into_iter().filter(|of| of.1).map(|of| of.0).collect();
        ensure!(
            given.is_empty(),
            "{}: expected {what} too, found no such flag; one rank waits for nobody",
            given.join(" and ")
        );
        Ok(())
    }

    /// Refuses these flags of one rank.
    pub(crate) fn require_several(&self, ranks: Option<usize>) -> anyhow::Result<()> {
        if ranks.is_none() {
            return self.require_none("--ranks");
        }
        let (flag, why) = match (self.timeout, &self.flight_recorder) {
            (Some(_), _) => ("--timeout", "waits for nobody"),
            (None, Some(_)) => ("--flight-recorder", "makes no calls"),
            (None, None) => return Ok(()),
        };
        bail!("{flag}: {}; one rank {why}", expected_several(ranks, "--ranks"));
    }

    /// Options for ranks that are threads, or processes of this machine.
    fn of_machine(&self) -> Options {
        let default = Options::default();
        Options {
            timeout: self.timeout.unwrap_or(default.timeout),
            dump_folder: self.flight_recorder.clone(),
            ..default
        }
    }

    /// Options for processes that mpirun has started.
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

/// Number of ranks, and how they find and look after each other.
#[derive(Clone, Debug, Args)]
pub(crate) struct Ranks {
    /// Ranks that are threads, 2 by default; mpirun says how many processes there are
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST_RANKS>)]
    pub(crate) ranks: Option<usize>,
    /// Number of ranks where nothing tells one.
    #[arg(skip = 2usize)]
    default: usize,
    /// Processes with a GPU each that were not started by mpirun meet in this folder, new for
    /// every run (engines nccl, nccl-native)
    #[arg(long, value_name = "FOLDER", requires = "rank")]
    meet: Option<PathBuf>,
    /// Number of this process among the processes of --ranks, from 0
    #[arg(long, requires = "meet", value_parser = whole::<usize, 0, { u64::MAX }>)]
    rank: Option<usize>,
    /// This process's GPU; by default the GPU whose number is the rank
    #[arg(long, requires = "meet", value_parser = whole::<usize, 0, { u64::MAX }>)]
    gpu: Option<usize>,
    #[command(flatten)]
    watch: Watch,
}

impl Ranks {
    /// Ranks of this number; one rank if neither the number nor a launcher is given.
    pub(crate) fn new(ranks: Option<usize>, watch: Watch) -> Self {
        Self { ranks, default: 1, meet: None, rank: None, gpu: None, watch }
    }

    /// Number of ranks that the flags ask for.
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

    /// Whether a folder is given in which the processes meet.
    pub(crate) fn meet(&self) -> bool {
        self.meet.is_some()
    }

    /// Refuses flags that would do nothing, without the flag that `what` names.
    pub(crate) fn require_none(&self, what: &str) -> anyhow::Result<()> {
        ensure!(
            self.ranks.is_none() && self.meet.is_none(),
            "{}: expected {what} too, found none; ranks are those of collectives",
            if self.ranks.is_some() { "--ranks" } else { "--meet" }
        );
        self.watch.require_none(what)
    }
}

impl Engine {
    /// Whether the flags, where no launcher counts the ranks, ask for one rank.
    pub(crate) fn is_one(self, ranks: &Ranks) -> bool {
        let is_counted = match self {
            Engine::Thread => false,
            Engine::Processes => !is_own_launcher(),
            Engine::Mpi | Engine::MpiNative => true,
            Engine::Nccl | Engine::NcclNative => !ranks.meet() && started_together().is_some(),
        };
        if is_counted { ranks.ranks == Some(1) } else { ranks.count() == 1 }
    }

    /// Runs `body` on every rank; returns the result of rank 0, on rank 0 only.
    pub(crate) fn run<T: Send, E: Into<anyhow::Error> + Send>(
        self,
        ranks: &Ranks,
        body: impl Fn(&mut dyn Communicator) -> Result<T, E> + Sync,
    ) -> anyhow::Result<Option<T>> {
        if self.is_one(ranks) {
            ranks.watch.require_several(ranks.ranks)?;
        }
        ensure!(
            ranks.meet.is_none() || matches!(self, Engine::Nccl | Engine::NcclNative),
            "expected --engine nccl or nccl-native with --meet, found {}; a folder carries what \
             ranks say and no gradients",
            name_of(self)
        );
        let (reduction, compare) = match self {
            // The only rank takes no thread of its own.
            Engine::Thread if ranks.count() == 1 => {
                let only = thread_ranks(1, &ranks.watch.of_machine()).pop();
                let mut comm = only.context("expected one rank, found none")?;
                return on_rank(&mut comm, body).map(Some);
            }
            Engine::Thread => {
                let outcomes = run_ranks(ranks.count(), &ranks.watch.of_machine(), |mut comm| {
                    on_rank(&mut comm, &body)
                });
                return outcomes::first(outcomes.context("cannot start a thread for each rank")?);
            }
            Engine::Processes => {
                if is_own_launcher() {
                    return launch::again(ranks.count()).map(|()| None);
                }
                let mut comm = ProcessCommunicator::world(&ranks.watch.of_machine())?;
                return on_process(ranks, &mut comm, body);
            }
            Engine::Mpi => (Reduction::Reproducible, Compare::EveryCall),
            // The fewest steps between the caller and MPI: a user who asks for MPI's sums asks for
            // its speed.
            Engine::MpiNative => (Reduction::Engine, Compare::FirstOfEach),
            Engine::Nccl => return on_gpus(ranks, Reduction::Reproducible, body),
            Engine::NcclNative => return on_gpus(ranks, Reduction::Engine, body),
        };
        let mut world = mpi_world(&ranks.watch.of_processes(reduction, compare))?;
        on_process(ranks, world.as_mut(), body)
    }
}

/// Whether a command of the engine `processes` starts its ranks itself, since no launcher has.
fn is_own_launcher() -> bool {
    std::env::var_os("RANK").is_none() || alone_on_purpose()
}

/// Runs `body` on this rank of those that a launcher has started.
fn on_process<T, E: Into<anyhow::Error>>(
    ranks: &Ranks,
    comm: &mut dyn Communicator,
    body: impl Fn(&mut dyn Communicator) -> Result<T, E>,
) -> anyhow::Result<Option<T>> {
    let found = ranks.require_world(comm);
    let found = found.and_then(|()| on_rank(comm, body));
    let found = found.with_context(|| format!("rank {}", comm.rank()))?;
    Ok((comm.rank() == 0).then_some(found))
}

/// Runs `body` on a rank. Where it ends in an error, the rank's last calls are written, if the user
/// has asked for them and no call that failed has written them.
fn on_rank<T, E: Into<anyhow::Error>>(
    comm: &mut dyn Communicator,
    body: impl Fn(&mut dyn Communicator) -> Result<T, E>,
) -> anyhow::Result<T> {
    let outcome = body(comm).map_err(Into::into);
    let recorder = comm.recorder();
    // A rank that has made no call has none to show.
    if let (Err(_), Some(folder), 1..) = (&outcome, recorder.folder(), recorder.calls_begun()) {
        let written = match recorder.dumped() {
            Some(dumped) => dumped.clone().map_err(anyhow::Error::msg),
            None => recorder.dump(folder).map_err(Into::into),
        };
        let folder = folder.display();
        match written {
            Ok(_) if comm.rank() == 0 => note(&format!("wrote the ranks' last calls to {folder}")),
            Ok(_) => {}
            Err(error) => {
                warn(&format!("warning: --flight-recorder {folder}: cannot write ({error:#})"));
            }
        }
    }
    outcome
}

/// Refuses to run: this build has no NCCL.
#[cfg(not(feature = "nccl"))]
fn on_gpus<T, E>(
    _: &Ranks,
    _: Reduction,
    _: impl Fn(&mut dyn Communicator) -> Result<T, E>,
) -> anyhow::Result<Option<T>> {
    anyhow::bail!(
        "nccl: this build leaves NCCL out; build it with `cargo install --path crates/cli --features \
         nccl` (it takes nothing more to build), or use ranks that are threads"
    )
}

/// All processes of the job that mpirun has started.
#[cfg(feature = "mpi")]
pub(crate) fn mpi_world(options: &MpiOptions) -> anyhow::Result<Box<dyn Communicator>> {
    Ok(Box::new(fusestep_collective_mpi::MpiCommunicator::world(options)?))
}

/// Refuses to run: this build has no MPI. Says how many processes wait for it.
#[cfg(not(feature = "mpi"))]
pub(crate) fn mpi_world(_: &MpiOptions) -> anyhow::Result<Box<dyn Communicator>> {
    let launched = started_together().map_or_else(String::new, |started| {
        format!("; {started}, and each would take itself for the whole")
    });
    anyhow::bail!(
        "mpi: this build leaves MPI out; build it with `cargo install --path crates/cli --features \
         mpi` (it takes an MPI with mpicc, and libclang), or use ranks that are threads{launched}"
    )
}

/// Refuses to be one of several processes that know nothing of each other, since each would take
/// itself for the whole. `meets` says whether a folder is given in which they find each other.
pub(crate) fn require_engine(engine: Option<Engine>, meets: bool) -> anyhow::Result<()> {
    let Some(started) = started_together() else {
        return Ok(());
    };
    let on_processes = launched_processes();
    let finds_others = match engine {
        None | Some(Engine::Thread) => false,
        Some(Engine::Processes) => match &on_processes {
            Ok(_) => true,
            // The engine that works is named below.
            Err(ProcessError::OtherLauncher { .. }) => false,
            Err(error) => return Err(error.clone().into()),
        },
        Some(Engine::Nccl | Engine::NcclNative) => started.carrier == Carrier::Mpi || meets,
        Some(Engine::Mpi | Engine::MpiNative) => true,
    };
    let works = match (on_processes, started.carrier) {
        (Ok(_), _) => "--engine processes",
        (_, Carrier::Mpi) => "--engine mpi",
        (_, Carrier::Addresses) => "mpirun in place of this launcher and --engine mpi",
    };
    ensure!(
        finds_others,
        "{started}, and each would take itself for the whole; expected {works} (check, train, \
         bench), found {}; or start one process without the launcher, whose ranks are those of \
         --ranks; or {ALONE_REMEDY}; or, if no launcher runs, `unset {}`",
        engine.map_or("none".to_owned(), name_of),
        started.variable
    );
    Ok(())
}

//! What carries collectives, and who runs them.

use std::num::NonZeroUsize;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use fusestep_collective::{CollectiveError, Communicator, Options, run_ranks};
use fusestep_collective_mpi::{MpiCommunicator, MpiOptions, Reduction, launched_ranks};
use fusestep_collective_nccl::{
    NcclCommunicator, NcclError, NcclOptions, Reduction as NcclReduction,
};

/// Engines of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// Ranks are threads of this process
    Thread,
    /// Ranks are processes that mpirun has started; the same bits as threads
    Mpi,
    /// The same with MPI's own all-reduce, in an order of its choice
    MpiNative,
    /// Ranks have a GPU each and are threads or, under mpirun, processes; the same bits as threads
    Nccl,
    /// The same with NCCL's own all-reduce, in an order of its choice
    NcclNative,
}

impl Engine {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Engine::Thread => "thread",
            Engine::Mpi => "mpi",
            Engine::MpiNative => "mpi-native",
            Engine::Nccl => "nccl",
            Engine::NcclNative => "nccl-native",
        }
    }

    /// Runs `body` on every rank; returns what rank 0 has found, on rank 0 only.
    pub(crate) fn run<T: Send>(
        self,
        ranks: NonZeroUsize,
        body: impl Fn(&mut dyn Communicator) -> Result<T, CollectiveError> + Sync,
    ) -> anyhow::Result<Option<T>> {
        let reduction = match self {
            Engine::Thread => {
                let outcomes =
                    run_ranks(ranks.get(), &Options::default(), |mut comm| body(&mut comm));
                let outcomes = outcomes.context("cannot start a thread for each rank")?;
                let mut first = None;
                for outcome in outcomes {
                    let found = outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                    first.get_or_insert(found);
                }
                return Ok(first);
            }
            Engine::Mpi => Reduction::Reproducible,
            Engine::MpiNative => Reduction::Engine,
            Engine::Nccl => return on_gpus(ranks, NcclReduction::Reproducible, body),
            Engine::NcclNative => return on_gpus(ranks, NcclReduction::Engine, body),
        };
        let options = MpiOptions {
            reduction,
            ..MpiOptions::default()
        };
        let mut comm = MpiCommunicator::world(&options)?;
        let found = body(&mut comm).with_context(|| format!("rank {}", comm.rank()))?;
        Ok((comm.rank() == 0).then_some(found))
    }
}

/// Runs `body` on ranks with a GPU each: threads of this process, or the processes that mpirun has started.
fn on_gpus<T: Send>(
    ranks: NonZeroUsize,
    reduction: NcclReduction,
    body: impl Fn(&mut dyn Communicator) -> Result<T, CollectiveError> + Sync,
) -> anyhow::Result<Option<T>> {
    let options = NcclOptions {
        reduction,
        ..NcclOptions::default()
    };
    if launched_ranks().is_some() {
        let world = MpiCommunicator::world(&MpiOptions::default())?;
        let gpu = local_rank().unwrap_or(world.rank());
        let mut comm = NcclCommunicator::new(Box::new(world), gpu, &options)?;
        let found = body(&mut comm).with_context(|| format!("rank {}", comm.rank()))?;
        return Ok((comm.rank() == 0).then_some(found));
    }
    let outcomes = run_ranks(ranks.get(), &Options::default(), |control| {
        let gpu = control.rank();
        let mut comm = NcclCommunicator::new(Box::new(control), gpu, &options)?;
        anyhow::Ok(body(&mut comm)?)
    });
    let mut first = None;
    let mut failed: Option<anyhow::Error> = None;
    for outcome in outcomes.context("cannot start a thread for each rank")? {
        match outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            Ok(found) => first = first.or(Some(found)),
            // That another rank could not join says less than why.
            Err(error) => match failed.as_ref().and_then(|kept| kept.downcast_ref()) {
                None if failed.is_some() => {}
                None | Some(NcclError::Peer { .. }) => failed = Some(error),
                Some(_) => {}
            },
        }
    }
    failed.map_or(Ok(first), Err)
}

/// This process's number among those of its machine, as launchers tell.
fn local_rank() -> Option<usize> {
    [
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    ]
    .into_iter()
    .find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// Refuses to be one of several processes that know nothing of each other: each would take itself for the whole.
pub(crate) fn require_engine(engine: Option<Engine>) -> anyhow::Result<()> {
    let launched = launched_ranks().unwrap_or(1);
    ensure!(
        launched == 1 || engine.is_some_and(|engine| engine != Engine::Thread),
        "{launched} processes were started together, and each would take itself for the whole; expected --engine mpi \
         (check, bench --collective), or a start without mpirun"
    );
    Ok(())
}

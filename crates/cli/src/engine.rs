//! What carries collectives, and who runs them.

use std::num::NonZeroUsize;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_collective_mpi::{MpiCommunicator, MpiOptions, Reduction, launched_ranks};

/// Engines of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// Ranks are threads of this process
    Thread,
    /// Ranks are processes that mpirun has started; the same bits as threads
    Mpi,
    /// The same with MPI's own all-reduce, in an order of its choice
    MpiNative,
}

impl Engine {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Engine::Thread => "thread",
            Engine::Mpi => "mpi",
            Engine::MpiNative => "mpi-native",
        }
    }

    /// Runs `body` on every rank; returns what rank 0 has found, on rank 0 only.
    pub(crate) fn run<T: Send, E: Into<anyhow::Error> + Send>(
        self,
        ranks: NonZeroUsize,
        body: impl Fn(&mut dyn Communicator) -> Result<T, E> + Sync,
    ) -> anyhow::Result<Option<T>> {
        let reduction = match self {
            Engine::Thread => {
                let outcomes =
                    run_ranks(ranks.get(), &Options::default(), |mut comm| body(&mut comm));
                let outcomes = outcomes.context("cannot start a thread for each rank")?;
                let mut first = None;
                for outcome in outcomes {
                    let found = outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                    let found = found.map_err(Into::into)?;
                    first.get_or_insert(found);
                }
                return Ok(first);
            }
            Engine::Mpi => Reduction::Reproducible,
            Engine::MpiNative => Reduction::Engine,
        };
        let options = MpiOptions {
            reduction,
            ..MpiOptions::default()
        };
        let mut comm = MpiCommunicator::world(&options)?;
        let found = body(&mut comm).map_err(Into::into);
        let found = found.with_context(|| format!("rank {}", comm.rank()))?;
        Ok((comm.rank() == 0).then_some(found))
    }
}

/// Refuses to be one of several processes that know nothing of each other: each would take itself for the whole.
pub(crate) fn require_engine(engine: Option<Engine>) -> anyhow::Result<()> {
    let launched = launched_ranks().unwrap_or(1);
    ensure!(
        launched == 1 || matches!(engine, Some(Engine::Mpi | Engine::MpiNative)),
        "{launched} processes were started together, and each would take itself for the whole; expected --engine mpi \
         (check, train, bench --collective), or a start without mpirun"
    );
    Ok(())
}

//! Ranks with a GPU each: threads of this process, or processes that others have started.

use anyhow::Context;
use fusestep_collective::{Communicator, local_rank, run_ranks, started_together};
use fusestep_collective_mpi::{Compare, Reduction};
use fusestep_collective_nccl::{
    Meeting, NcclCommunicator, NcclOptions, Reduction as NcclReduction,
};

use super::{Ranks, Watch, mpi_world, on_process, on_rank};
use crate::outcomes;

/// Runs `body` on ranks with a GPU each: threads of this process, or the processes that mpirun has
/// started or that meet in a folder.
pub(super) fn run<T: Send, E: Into<anyhow::Error> + Send>(
    ranks: &Ranks,
    reduction: Reduction,
    body: impl Fn(&mut dyn Communicator) -> Result<T, E> + Sync,
) -> anyhow::Result<Option<T>> {
    let options = options(&ranks.watch, reduction);
    // The recorder keeps the calls that move data, not the calls of the control communicator.
    let control = Watch { flight_recorder: None, ..ranks.watch.clone() };
    let alone = |mut comm: NcclCommunicator| on_process(ranks, &mut comm, &body);
    if let Some(meeting) = meeting(ranks) {
        let control = meeting.join()?;
        let gpu = ranks.gpu.unwrap_or(meeting.rank);
        return alone(NcclCommunicator::new(Box::new(control), gpu, &options)?);
    }
    if started_together().is_some() {
        let world = mpi_world(&control.of_processes(Reduction::default(), Compare::default()))?;
        let gpu = local_rank().unwrap_or(world.rank());
        return alone(NcclCommunicator::new(world, gpu, &options)?);
    }
    let outcomes = run_ranks(ranks.count(), &control.of_machine(), |control| {
        let gpu = control.rank();
        let mut comm = NcclCommunicator::new(Box::new(control), gpu, &options)?;
        on_rank(&mut comm, &body)
    });
    outcomes::first(outcomes.context("cannot start a thread for each rank")?)
}

fn options(watch: &Watch, reduction: Reduction) -> NcclOptions {
    let default = NcclOptions::default();
    NcclOptions {
        timeout: watch.timeout.unwrap_or(default.timeout),
        dump_folder: watch.flight_recorder.clone(),
        reduction: match reduction {
            Reduction::Reproducible => NcclReduction::Reproducible,
            Reduction::Engine => NcclReduction::Engine,
        },
        ..default
    }
}

/// The folder in which this process meets others, and its rank there; `None` without `--meet`.
fn meeting(ranks: &Ranks) -> Option<Meeting> {
    let default = Meeting::at(ranks.meet.clone()?);
    Some(Meeting {
        rank: ranks.rank?,
        world_size: ranks.count(),
        timeout: ranks.watch.timeout.unwrap_or(default.timeout),
        ..default
    })
}

//! Ranks with a device each.

use std::path::PathBuf;

use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_collective_nccl::{NcclCommunicator, NcclOptions};
use fusestep_planner::ZeroStage;

use crate::counted::Counted;
use crate::run::Case;

pub(crate) const STAGES: [ZeroStage; 4] =
    [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

/// A model of which some tensors have leaves on several ranks.
pub(crate) fn small() -> Case {
    Case {
        numels: vec![7_001, 3, 0, 1, 5_000, 66_000, 17, 257],
        cap: Some(60_000),
        steps: 2,
        ..Case::default()
    }
}

/// The GPUs there are, which bound the worlds.
pub(crate) fn gpus() -> usize {
    let count = std::env::var("FUSESTEP_EMULATOR_DEVICES");
    count.map_or(1, |text| text.parse().unwrap())
}

/// The libraries under test; by default those of the system.
fn options() -> NcclOptions {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let defaults = NcclOptions::default();
    NcclOptions {
        nccl_library: path("FUSESTEP_NCCL_LIBRARY").unwrap_or(defaults.nccl_library),
        driver_library: path("FUSESTEP_CUDA_LIBRARY").unwrap_or(defaults.driver_library),
        scratch_bytes: 1 << 20,
        ..NcclOptions::default()
    }
}

pub(crate) fn worlds() -> impl Iterator<Item = usize> {
    1..=gpus().min(4)
}

/// Runs `body` on so many ranks, each with its device; what each returns, in rank order.
pub(crate) fn on_each<R: Send>(
    world: usize,
    body: impl Fn(&mut dyn Communicator, &Counted) -> R + Sync,
) -> Vec<R> {
    let ranks = run_ranks(world, &Options::default(), |control| {
        let device = control.rank();
        let backend = Counted::open(device);
        let mut comm = NcclCommunicator::new(Box::new(control), device, &options()).unwrap();
        body(&mut comm, &backend)
    });
    let ranks = ranks.unwrap().into_iter();
    let rethrow = |panic| std::panic::resume_unwind(panic);
    ranks.map(|rank| rank.unwrap_or_else(rethrow)).collect()
}

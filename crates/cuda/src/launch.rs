//! Launches whose tables are in their arguments.

use fusestep_launch::{Addresses, BackendError, Batch, Launch, LaunchReport, pack};

use crate::backend::CudaBackend;
use crate::checks::{argument_bytes, check_arguments, check_groups, check_records};
use crate::entry::{Entry, threads_for};
use crate::update_sums::check_without_update_sums;
use crate::{normed, tensor_sums};

/// Enqueues a launch whose tables are in its arguments, as [`fusestep_launch::Launches::launch`]
/// says.
pub(crate) fn launch(
    backend: &CudaBackend,
    launch: Launch<'_>,
) -> Result<LaunchReport, BackendError> {
    check_without_update_sums(&launch)?;
    check_groups(&launch)?;
    let addresses = backend.list_addresses(&launch)?;
    let addresses = Addresses {
        lists: &addresses[..launch.lists.len()],
        control: backend.control_address(launch.control)?,
    };
    // All batches are checked before the first is launched.
    for batch in launch.batches {
        check_records(launch.lists, launch.firsts, launch.offsets, batch)?;
        check_arguments(backend, argument_bytes(&launch, batch))?;
    }
    if let (Some(normed), Some(sums)) = (launch.kernel.normed(), launch.tensor_sums) {
        tensor_sums::launch_with_sums(backend, &launch, normed, sums)?;
        return Ok(LaunchReport::of(launch.batches));
    }
    enqueue_batches(backend, &launch, &|batch, bytes| {
        pack(&launch, batch, addresses, bytes);
    })
}

/// Enqueues all batches of a launch, which have been checked; `pack` writes the arguments of one.
pub(crate) fn enqueue_batches(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    pack: &dyn Fn(&Batch, &mut [u8]),
) -> Result<LaunchReport, BackendError> {
    if let Some(normed) = launch.kernel.normed() {
        normed::launch(backend, launch, normed, pack)?;
        return Ok(LaunchReport::of(launch.batches));
    }
    for batch in launch.batches.iter().filter(|batch| batch.chunks > 0) {
        let entry = Entry {
            stem: launch.kernel.stem(),
            entry: launch.kernel.entry(),
            threads: threads_for(batch),
            blocks: batch.chunks,
        };
        entry.enqueue(backend, &mut |bytes| pack(batch, bytes))?;
    }
    Ok(LaunchReport::of(launch.batches))
}

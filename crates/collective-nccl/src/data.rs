//! Data of calls, by operation.

use std::ops::Range;

use fusestep_collective::{CollectiveError, Fingerprint, Operation};

use crate::gpus::Gpus;
use crate::memory::Memory;
use crate::movement::{all_gather, all_to_all, broadcast, by_messages};
use crate::reduction;

/// Enqueues the transfers of a call, or of a segment of it. Operations on blocks use `ranges`,
/// which need not follow each other. Other operations use `whole`, their length in bytes.
pub(crate) fn move_data(
    comm: &mut Gpus,
    memory: Memory,
    ranges: &[Range<usize>],
    whole: usize,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    match print.operation {
        Operation::AllReduce(op)
        | Operation::Reduce { reduce: op, .. }
        | Operation::ReduceScatter(op) => {
            if reduction::is_engines_own(comm, op, print) {
                reduction::by_engine(comm, memory, op, whole, print)?;
            } else {
                reduction::reduce(comm, memory, ranges, op, print)?;
            }
        }
        Operation::Broadcast { root } => broadcast(comm, memory, root, whole, print)?,
        Operation::AllGather => all_gather(comm, memory, ranges, print)?,
        Operation::AllToAll => all_to_all(comm, memory, ranges, print)?,
        operation @ (Operation::Scatter { .. }
        | Operation::Gather { .. }
        | Operation::Send { .. }
        | Operation::Receive { .. }) => by_messages(comm, memory, operation, ranges, print)?,
        Operation::Barrier | Operation::Split | Operation::ReduceUpdate => {}
    }
    Ok(())
}

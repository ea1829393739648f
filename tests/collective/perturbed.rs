//! Calls that differ on one rank in one field.

use fusestep_collective::{
    Buffers, Call, CallContext, CollectiveError, Communicator, Field, Operation, ReduceOp,
};
use fusestep_tensor::DType;

/// A call that one rank may make otherwise.
pub(crate) fn call(
    comm: &mut dyn Communicator,
    field: Field,
    odd: bool,
    buffer: &mut [f32],
) -> Result<(), CollectiveError> {
    let root = usize::from(odd && field == Field::Root);
    let numel = buffer.len() - usize::from(odd && field == Field::Numel);
    let counts = if odd { [3, 4, 0, 0] } else { [4, 3, 0, 0] };
    let reduce = if odd { ReduceOp::Max } else { ReduceOp::Sum };
    let context = CallContext {
        plan_hash: if odd && field == Field::PlanHash { 0xabc } else { 0xdef },
        bucket: Some(if odd && field == Field::Bucket { 8 } else { 7 }),
    };
    comm.set_context(context);
    let operation = match field {
        Field::Operation if odd => Operation::AllGather,
        Field::ReduceOp => Operation::AllReduce(reduce),
        Field::Root => Operation::Broadcast { root },
        Field::Counts => Operation::AllGather,
        _ => Operation::AllReduce(ReduceOp::Sum),
    };
    let counts = (field == Field::Counts).then(|| &counts[..comm.world_size()]);
    comm.execute(Call {
        operation,
        dtype: if odd && field == Field::DType { DType::I32 } else { DType::F32 },
        counts,
        buffers: Buffers::InPlace(bytemuck::cast_slice_mut(&mut buffer[..numel])),
    })
}

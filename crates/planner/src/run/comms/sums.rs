//! Sums of small values over ranks.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_tensor::DType;

use crate::error::Result;
use crate::run::comms::calls::Comms;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    World,
    ShardGroup,
}

/// Adds up a vector over ranks, each of which has filled in its own elements.
pub(crate) fn sum_over(comms: &mut Comms<'_>, values: &mut [f64], scope: Scope) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    let operation = Operation::AllReduce(ReduceOp::Sum);
    let bytes = bytemuck::cast_slice_mut(values);
    match scope {
        Scope::World => comms.in_place(operation, DType::F64, None, bytes)?,
        Scope::ShardGroup => comms.in_group(operation, DType::F64, None, bytes)?,
    }
    Ok(())
}

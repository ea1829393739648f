//! Movement of elements by an operation, forward or backward.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use fusestep_collective::{Buffers, Call, Operation, ReduceOp};
use half::{bf16, f16};

use super::group::dtype_of;
use super::{Group, ParallelError, Split};
use crate::lend::{bytes, bytes_mut};

/// Movement in one direction of an operation. Blocks are of the first dimension.
#[derive(Clone, Debug)]
pub(super) enum Move {
    /// Every rank keeps its elements.
    Keep,
    /// Every rank gets the sum.
    Sum,
    /// Every rank gets the blocks of all.
    Gather(Split),
    /// Every rank gets its block of the sum.
    SumOwn(Split),
    /// Every rank keeps its block.
    Own(Split),
    /// Every rank gets the root's elements.
    FromRoot(usize),
    /// The root gets the sum, all others zeros.
    ToRoot(usize),
    /// Every rank multiplies its elements by a factor.
    Scale(f64),
}

/// An operation with its gradient, as candle calls it.
pub(super) struct Differentiable {
    pub(super) name: &'static str,
    pub(super) group: Group,
    pub(super) forward: Move,
    pub(super) backward: Move,
}

impl CustomOp1 for Differentiable {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.forward.run(self.name, &self.group, storage, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if let Move::Keep = self.backward {
            return Ok(Some(grad.clone()));
        }
        let adjoint = Differentiable {
            name: self.name,
            group: self.group.clone(),
            forward: self.backward.clone(),
            backward: self.forward.clone(),
        };
        Ok(Some(grad.contiguous()?.apply_op1_no_bwd(&adjoint)?))
    }
}

impl Move {
    /// The length of the first dimension of the result.
    fn rows(&self, rows: usize, rank: usize) -> usize {
        match self {
            Move::Gather(split) => split.total(),
            Move::SumOwn(split) | Move::Own(split) => split.counts()[rank],
            _ => rows,
        }
    }

    fn run(
        &self,
        name: &'static str,
        group: &Group,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let dtype = candle_core::backend::BackendStorage::dtype(storage);
        let width = dtype.size_in_bytes();
        let range = layout.contiguous_offsets();
        let (Some((start, end)), Some(all)) = (range, bytes(storage)) else {
            candle_core::bail!("{name}: expected contiguous f32, f64, f16 or bf16, found otherwise")
        };
        // A part without elements may begin behind the end.
        let send = all.get(start * width..end * width).unwrap_or_default();
        let mut dims = layout.dims().to_vec();
        // A row is one index of the first dimension.
        let row = dims.iter().skip(1).product::<usize>();
        if let Some(rows) = dims.first_mut() {
            *rows = self.rows(*rows, group.rank());
        }
        let shape = Shape::from(dims);
        let mut result = zeros(dtype, shape.elem_count());
        let Some(receive) = bytes_mut(&mut result) else {
            candle_core::bail!("{name}: expected f32, f64, f16 or bf16 elements, found others")
        };
        let dtype = dtype_of(name, dtype)?;
        self.elements(group, dtype, row, send, receive)?;
        if let Move::Scale(factor) = self {
            scale(&mut result, *factor);
        }
        Ok((result, shape))
    }

    fn elements(
        &self,
        group: &Group,
        dtype: fusestep_tensor::DType,
        row: usize,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), ParallelError> {
        let counts = |split: &Split| -> Vec<usize> {
            split.counts().iter().map(|rows| rows * row).collect()
        };
        let (operation, counts) = match self {
            Move::Keep | Move::Scale(_) => {
                receive.copy_from_slice(send);
                return Ok(());
            }
            Move::Own(split) => {
                let range = split.range(group.rank());
                let row = row * dtype.len_bytes();
                receive.copy_from_slice(&send[range.start * row..range.end * row]);
                return Ok(());
            }
            Move::Sum => (Operation::AllReduce(ReduceOp::Sum), None),
            Move::Gather(split) => (Operation::AllGather, Some(counts(split))),
            Move::SumOwn(split) => (Operation::ReduceScatter(ReduceOp::Sum), Some(counts(split))),
            Move::FromRoot(root) => {
                receive.copy_from_slice(send);
                let operation = Operation::Broadcast { root: *root };
                return call(group, operation, dtype, None, Buffers::InPlace(receive));
            }
            Move::ToRoot(root) => {
                receive.copy_from_slice(send);
                let reduce = ReduceOp::Sum;
                let operation = Operation::Reduce { reduce, root: *root };
                call(group, operation, dtype, None, Buffers::InPlace(receive))?;
                if group.rank() != *root {
                    receive.fill(0);
                }
                return Ok(());
            }
        };
        let buffers = Buffers::OutOfPlace { send, receive };
        call(group, operation, dtype, counts.as_deref(), buffers)
    }
}

fn call(
    group: &Group,
    operation: Operation,
    dtype: fusestep_tensor::DType,
    counts: Option<&[usize]>,
    buffers: Buffers<'_>,
) -> Result<(), ParallelError> {
    let call = Call { operation, dtype, counts, buffers };
    Ok(group.with(|comm| comm.execute(call))?)
}

/// Zeros of a floating-point dtype.
fn zeros(dtype: candle_core::DType, numel: usize) -> CpuStorage {
    match dtype {
        candle_core::DType::F64 => CpuStorage::F64(vec![0.0; numel]),
        candle_core::DType::F16 => CpuStorage::F16(vec![f16::ZERO; numel]),
        candle_core::DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; numel]),
        _ => CpuStorage::F32(vec![0.0; numel]),
    }
}

/// Multiplies in f64 and rounds once.
fn scale(storage: &mut CpuStorage, factor: f64) {
    match storage {
        CpuStorage::F32(values) => {
            let scaled = |value: &mut f32| *value = (f64::from(*value) * factor) as f32;
            values.iter_mut().for_each(scaled);
        }
        CpuStorage::F64(values) => values.iter_mut().for_each(|value| *value *= factor),
        CpuStorage::F16(values) => {
            let scaled = |value: &mut f16| *value = f16::from_f64(value.to_f64() * factor);
            values.iter_mut().for_each(scaled);
        }
        CpuStorage::BF16(values) => {
            let scaled = |value: &mut bf16| *value = bf16::from_f64(value.to_f64() * factor);
            values.iter_mut().for_each(scaled);
        }
        _ => {}
    }
}

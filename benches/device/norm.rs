//! The norm of one long gradient: one read, one conclusion.

use std::error::Error;

use fusestep_amp::{GradientRule, LossScale, MaxNorm, norm_kernel};
use fusestep_cuda::CudaBackend;
use fusestep_launch::{
    BackendError, Batch, Batchable, Buffer, Conclude, ControlBlock, ControlRule, LaunchError,
    LaunchLimits, Launches, ListBuffer, Memory as _, MultiTensorReduction, Reduce, SquareSum,
    TensorPartials, batches,
};
use fusestep_tensor::DType;

use crate::contest::Bench;
use crate::copies::{Copies, fill};
use crate::report::{Report, Subject};
use crate::sets::{NORM, NORM_ELEMENTS};

/// Times the norm of [`NORM_ELEMENTS`] elements, and checks it against the host's sum of what the
/// gradient was filled with.
pub(crate) fn measure(bench: &mut Bench<'_>, report: &mut Report) -> Result<(), Box<dyn Error>> {
    if bench.is_over() {
        report.leave_out(format!("{NORM}, for want of time"));
        return Ok(());
    }
    let backend = bench.backend;
    let numel = NORM_ELEMENTS.div_ceil(bench.arguments.scale);
    let bytes = 4 * numel;
    let kernel = norm_kernel(DType::F32)?;
    let batches = batches_of(kernel.as_ref(), numel, backend.limits())?;
    let chunks: u64 = batches.iter().map(|batch| u64::from(batch.chunks)).sum();
    let mut list = ListBuffer { list: kernel.list(), buffer: backend.allocate(bytes as usize)? };
    fill(backend, list.buffer.as_mut())?;
    let rule = GradientRule { max_norm: MaxNorm::new(1.0)?, loss_scale: LossScale::unscaled() };
    let scalars = rule.scalars();
    let mut memory = Memory::new(backend, chunks, &rule)?;
    let mut copies = Copies::new(backend, bytes, bench.arguments.scale)?;
    let subject = Subject {
        set: NORM.to_owned(),
        rule: "norm".to_owned(),
        dtype: "f32",
        way: "arguments",
        tensors: 1,
        elements: numel,
        launches: batches.len() + 1,
        rotated: 1,
        bytes,
    };
    let mut step = |_| -> Result<(), BackendError> {
        backend.reduce(Reduce {
            kernel: kernel.as_ref(),
            batches: &batches,
            offsets: &[0],
            members: &[0],
            list: Some(&list),
            partials: memory.partials.as_mut(),
            first_partial: 0,
        })?;
        backend.conclude(Conclude {
            rule: &rule,
            scalars: &scalars,
            partials: memory.partials.as_ref(),
            tensors: memory.tensors.as_ref(),
            sums: memory.sums.as_mut(),
            control: memory.control.as_mut(),
        })?;
        Ok(())
    };
    let line = bench.line(subject, &mut copies, &mut step)?;
    check(&ControlBlock::read(backend, memory.control.as_ref())?, numel)?;
    report.add(line);
    Ok(())
}

/// The batches of one tensor.
fn batches_of(
    kernel: &dyn MultiTensorReduction,
    numel: u64,
    limits: LaunchLimits,
) -> Result<Vec<Batch>, LaunchError> {
    let limits = LaunchLimits { chunk_elements: kernel.chunk_elements(), ..limits };
    let tensor = Batchable { tensor: 0, first_element: 0, numel, group: 0 };
    let layout = kernel.argument_layout();
    batches(kernel.entry(), [tensor], layout, limits)
}

/// What the reduction writes and its conclusion reads.
struct Memory {
    partials: Box<dyn Buffer>,
    tensors: Box<dyn Buffer>,
    sums: Box<dyn Buffer>,
    control: Box<dyn Buffer>,
}

impl Memory {
    /// Memory for one tensor of so many chunks, and the first control block.
    fn new(backend: &CudaBackend, chunks: u64, rule: &GradientRule) -> Result<Self, BackendError> {
        let mut memory = Self {
            partials: backend.allocate(chunks as usize * size_of::<SquareSum>())?,
            tensors: backend.allocate(size_of::<TensorPartials>())?,
            sums: backend.allocate(size_of::<SquareSum>())?,
            control: backend.allocate(size_of::<ControlBlock>())?,
        };
        let place = [0u64, chunks].map(u64::to_le_bytes).concat();
        backend.write(memory.tensors.as_mut(), 0, &place)?;
        let block = GradientRule::first_block(rule.loss_scale);
        block.write(backend, memory.control.as_mut())?;
        Ok(memory)
    }
}

/// The values are spread evenly between -0.5 and 0.5, so their squares have the mean 1/12; and no
/// sum over them is exact by chance.
fn check(block: &ControlBlock, numel: u64) -> Result<(), Box<dyn Error>> {
    let expected = (numel as f64 / 12.0).sqrt();
    let allowed = if numel > 100_000 { 0.01 } else { 0.5 };
    let found = block.grad_norm;
    let is_close = (found / expected - 1.0).abs() < allowed;
    if !is_close {
        return Err(format!("norm of {numel} elements: expected {expected}, found {found}").into());
    }
    Ok(())
}

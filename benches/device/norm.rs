//! The norm of one long gradient: one read, one conclusion.

use std::error::Error;

use fusestep_amp::{GradientRule, LossScale, MaxNorm, norm_kernel};
use fusestep_launch::{
    Backend, BackendError, Batchable, Conclude, ControlBlock, ControlRule, LaunchLimits,
    ListBuffer, Reduce, SquareSum, TensorPartials, batches,
};
use fusestep_tensor::DType;

use crate::contest::Bench;
use crate::copies::{Copies, fill};
use crate::report::{Report, Subject};
use crate::sets::{NORM, NORM_ELEMENTS};

/// Times the norm of [`NORM_ELEMENTS`] elements, and checks it against the host's sum of what the gradient was filled with.
pub(crate) fn measure(bench: &mut Bench<'_>, report: &mut Report) -> Result<(), Box<dyn Error>> {
    if bench.is_over() {
        report.leave_out(format!("{NORM}, for want of time"));
        return Ok(());
    }
    let backend = bench.backend;
    let numel = NORM_ELEMENTS.div_ceil(bench.arguments.scale);
    let bytes = 4 * numel;
    let kernel = norm_kernel(DType::F32)?;
    let limits = LaunchLimits {
        chunk_elements: kernel.chunk_elements(),
        ..backend.limits()
    };
    let tensor = Batchable {
        tensor: 0,
        numel,
        class: 0,
    };
    let batches = batches(
        kernel.entry(),
        [tensor].into_iter(),
        kernel.argument_layout(),
        limits,
    )?;
    let chunks: u64 = batches.iter().map(|batch| u64::from(batch.chunks)).sum();
    let mut list = ListBuffer {
        list: kernel.list(),
        buffer: backend.allocate(bytes as usize)?,
    };
    fill(backend, list.buffer.as_mut())?;
    let rule = GradientRule {
        max_norm: MaxNorm::new(1.0)?,
        loss_scale: LossScale::unscaled(),
    };
    let scalars = rule.scalars();
    let mut partials = backend.allocate(chunks as usize * size_of::<SquareSum>())?;
    let mut tensors = backend.allocate(size_of::<TensorPartials>())?;
    let words = [0u64, chunks].map(u64::to_le_bytes).concat();
    backend.write(tensors.as_mut(), 0, &words)?;
    let mut sums = backend.allocate(size_of::<SquareSum>())?;
    let mut control = backend.allocate(size_of::<ControlBlock>())?;
    GradientRule::first_block(rule.loss_scale).write(backend, control.as_mut())?;
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
            partials: partials.as_mut(),
            first_partial: 0,
        })?;
        backend.conclude(Conclude {
            rule: &rule,
            scalars: &scalars,
            partials: partials.as_ref(),
            tensors: tensors.as_ref(),
            sums: sums.as_mut(),
            control: control.as_mut(),
        })?;
        Ok(())
    };
    let line = bench.line(subject, &mut copies, &mut step)?;
    check(&ControlBlock::read(backend, control.as_ref())?, numel)?;
    report.add(line);
    Ok(())
}

/// The values are spread evenly between -0.5 and 0.5, so their squares have the mean 1/12; and no sum over them is exact by chance.
fn check(block: &ControlBlock, numel: u64) -> Result<(), Box<dyn Error>> {
    let expected = (numel as f64 / 12.0).sqrt();
    let allowed = if numel > 100_000 { 0.01 } else { 0.5 };
    let found = block.grad_norm;
    if !((found / expected - 1.0).abs() < allowed) {
        return Err(format!("norm of {numel} elements: expected {expected}, found {found}").into());
    }
    Ok(())
}

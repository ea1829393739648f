//! The control block: decisions that a step takes before it updates, and that kernels read without
//! the host.

use bytemuck::{Pod, Zeroable};

use crate::Buffer;

/// Bytes of a [`ControlBlock`] in a backend's memory.
pub const CONTROL_BYTES: usize = 64;

/// The decisions of one step and the counters behind them, as they lie in the backend's memory.
///
/// A [`ControlRule`](crate::ControlRule) writes it, update kernels read `grad_factor` and `found`,
/// the host reads the rest for its report. `kernels/multi_tensor.cuh` has the same struct.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ControlBlock {
    /// Factor on every gradient, to be rounded once to the compute type: the clip factor divided
    /// by the loss scale.
    pub grad_factor: f64,
    /// Norm of all gradients, with the loss scale taken out.
    pub grad_norm: f64,
    /// The factor to multiply the next step's loss with.
    pub loss_scale: f64,
    /// Gradient elements of this step that are infinite or NaN.
    pub non_finite: u64,
    /// Not 0: nothing is to be written in this step.
    pub found: u32,
    /// Steps since the scale last changed or a step was skipped.
    pub good_steps: u32,
    /// Skipped steps since the scale last changed or a step was applied.
    pub bad_steps: u32,
    /// Padding: 0.
    pub reserved: u32,
    /// Steps applied.
    pub applied: u64,
    /// Steps skipped.
    pub skipped: u64,
}

const _: () = assert!(size_of::<ControlBlock>() == CONTROL_BYTES);

impl Default for ControlBlock {
    fn default() -> Self {
        Self { grad_factor: 1.0, loss_scale: 1.0, ..Self::zeroed() }
    }
}

impl ControlBlock {
    /// The block in memory that the host reads in place; `None` if the host cannot, or the buffer
    /// is shorter.
    pub fn on_host(buffer: &dyn Buffer) -> Option<Self> {
        let bytes = buffer.host()?.get(..CONTROL_BYTES)?;
        Some(bytemuck::pod_read_unaligned(bytes))
    }
}

/// A control block's decision for an update kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// Update, with this factor on every gradient.
    Open(f64),
    /// Write nothing.
    Shut,
}

impl Gate {
    /// The gate of a launch on memory that the host reads in place; without a control block it is
    /// open with factor 1.
    ///
    /// `None` if the host cannot read the block.
    pub fn on_host(control: Option<&dyn Buffer>) -> Option<Self> {
        let Some(buffer) = control else {
            return Some(Gate::Open(1.0));
        };
        let block = ControlBlock::on_host(buffer)?;
        Some(match block.found {
            0 => Gate::Open(block.grad_factor),
            _ => Gate::Shut,
        })
    }
}

//! Reductions over many tensors: one value for each chunk, and a conclusion drawn from all of them.

use bytemuck::{Pod, Zeroable};
use fusestep_simd::Level;

use crate::{ArgumentLayout, Batch, Buffer, ControlBlock, ListBuffer, TensorList};

/// Bytes of a reduction's scalars: the address of the launch's first partial sum.
const REDUCTION_SCALAR_BYTES: usize = 8;

/// A sum of squares, and how many of its elements are infinite or NaN; the partial sum of one
/// chunk, or that of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SquareSum {
    /// Σ x² in f64.
    pub sum: f64,
    /// Elements that are infinite or NaN.
    pub non_finite: u64,
}

/// The place of a tensor's partial sums among those of all tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TensorPartials {
    /// Index of its first partial sum.
    pub first: u64,
    /// Count of its partial sums; 0 for an empty tensor or one that takes no part.
    pub count: u64,
}

/// A kernel that reads many tensors of one list in one launch and leaves one [`SquareSum`] for each
/// chunk.
pub trait MultiTensorReduction: Send + Sync {
    /// The system's stem, which names its `.cu` file and PTX module: `amp`.
    fn stem(&self) -> &'static str;

    /// The device entry: `amp_norm_f32`.
    fn entry(&self) -> &'static str;

    /// The list that is read.
    fn list(&self) -> TensorList;

    /// Elements of a chunk: part of the definition of the sum, so that no limit changes it.
    fn chunk_elements(&self) -> u32;

    /// Bytes of scalars and step scalars.
    fn argument_layout(&self) -> ArgumentLayout {
        ArgumentLayout { lists: 1, scalar_bytes: REDUCTION_SCALAR_BYTES, step_scalar_bytes: 0 }
    }

    /// Sums one chunk on the host, in the calling thread; `chunk` holds aligned elements of the
    /// list's dtype.
    fn run_host(&self, level: Level, chunk: &[u8]) -> SquareSum;
}

/// A rule that fills the control block from all partial sums. On a device one block of threads runs
/// it.
pub trait ControlRule: Send + Sync {
    /// The system's stem: `amp`.
    fn stem(&self) -> &'static str;

    /// The device entry: `amp_finish`.
    fn entry(&self) -> &'static str;

    /// The rule's settings as the device reads them; a multiple of 8 bytes.
    fn scalars(&self) -> Vec<u8>;

    /// Adds up each tensor's chunks into `sums` and those to the total, both as
    /// [`crate::tree_sum`], and writes the block for this step.
    ///
    /// `sums` is as long as `tensors`. `control` holds the block of the step before.
    fn run_host(
        &self,
        partials: &[SquareSum],
        tensors: &[TensorPartials],
        sums: &mut [SquareSum],
        control: &mut ControlBlock,
    );
}

/// A reduction, its batches and the memory they refer to.
pub struct Reduce<'a> {
    /// The kernel.
    pub kernel: &'a dyn MultiTensorReduction,
    /// The batches, made with the kernel's chunk elements; one launch each on a device.
    pub batches: &'a [Batch],
    /// First element of each tensor of the storage.
    pub offsets: &'a [u64],
    /// Position of each tensor of the storage among the caller's parameters.
    pub members: &'a [u32],
    /// The list that is read; `None` if the tensors are borrowed.
    pub list: Option<&'a ListBuffer>,
    /// One [`SquareSum`] for each chunk of all batches, in order, from `first_partial` on.
    pub partials: &'a mut dyn Buffer,
    /// Index of this reduction's first partial sum.
    pub first_partial: u64,
}

/// A control rule and the memory it reads and writes.
pub struct Conclude<'a> {
    /// The rule.
    pub rule: &'a dyn ControlRule,
    /// The rule's settings, as it wrote them.
    pub scalars: &'a [u8],
    /// The partial sums: [`SquareSum`].
    pub partials: &'a dyn Buffer,
    /// The places of each tensor's partial sums, in plan order: [`TensorPartials`].
    pub tensors: &'a dyn Buffer,
    /// Each tensor's sum: [`SquareSum`].
    pub sums: &'a mut dyn Buffer,
    /// The block: [`ControlBlock`].
    pub control: &'a mut dyn Buffer,
}

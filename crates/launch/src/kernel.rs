//! The trait of kernels, which kernel crates implement, and planner and backends call.

use fusestep_tensor::UNIT_ELEMENTS;

use crate::{
    ArgumentLayout, GroupValues, HostRun, LaunchLimits, NormedKernel, ResidentStepScalars,
    TensorList,
};

/// A kernel that updates many tensors in one launch.
///
/// A value of an implementing type is a kernel for one combination of dtypes and options. All
/// scalars are derived in f64 and rounded once, here, so every backend computes from the same
/// bytes.
pub trait MultiTensorKernel: Send + Sync {
    /// The system's stem, which names its `.cu` file and PTX module: `fused_adam`.
    fn stem(&self) -> &'static str;

    /// The device entry for these dtypes: `fused_adam_f32`.
    fn entry(&self) -> &'static str;

    /// The tensor lists in the order of a record's addresses; at most [`crate::MAX_LISTS`].
    fn lists(&self) -> &[TensorList];

    /// Bytes of scalars and step scalars.
    fn argument_layout(&self) -> ArgumentLayout;

    /// Options of the kernel as the device reads them from the header.
    fn flags(&self) -> u32;

    /// Writes the scalars shared by all tensors; `out` has the layout's `scalar_bytes`.
    fn write_scalars(&self, out: &mut [u8]);

    /// Writes the step scalars of one group; `out` has the layout's `step_scalar_bytes`.
    fn write_step_scalars(&self, values: GroupValues, out: &mut [u8]);

    /// Updates tensors on the host, in the calling thread.
    ///
    /// A kernel that needs sums over whole tensors ([`MultiTensorKernel::normed`]) looks at
    /// gradients in their list alone.
    fn run_host(&self, run: HostRun<'_, '_>);

    /// The sums that the kernel takes over a whole tensor before it updates it; `None` if it takes
    /// none.
    fn normed(&self) -> Option<&dyn NormedKernel> {
        None
    }

    /// The values from which a device derives the step scalars of a resident table; `None` if only
    /// the host derives them.
    fn resident(&self) -> Option<ResidentStepScalars> {
        None
    }

    /// Bytes of memory traffic of so many elements.
    fn traffic_bytes(&self, elements: u64) -> u64 {
        self.lists().iter().map(|list| list.traffic_bytes(elements)).sum()
    }
}

impl LaunchLimits {
    /// The limits for batches of `kernel`: a kernel that takes sums is cut at the chunks of their
    /// tree, one with state in codes at groups of [`UNIT_ELEMENTS`].
    pub fn of(self, kernel: &dyn MultiTensorKernel) -> Self {
        let is_coded = kernel.lists().iter().any(|list| list.role.unit_of().is_some());
        match kernel.normed() {
            Some(_) => self.measured(),
            None if is_coded => {
                let groups = self.chunk_elements.div_ceil(UNIT_ELEMENTS as u32);
                let most = u32::MAX / UNIT_ELEMENTS as u32;
                let chunk_elements = groups.min(most) * UNIT_ELEMENTS as u32;
                Self { chunk_elements, ..self }
            }
            None => self,
        }
    }
}

//! What a kernel crate offers to planner and backends.

use fusestep_tensor::{DType, Role, Trust};

use crate::{ArgumentLayout, HostRun, NormedKernel, ResidentStepScalars};

/// Whether a kernel reads or writes a tensor list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Access {
    /// Only read.
    Read,
    /// Read and written in place.
    ReadWrite,
    /// Only written, from other lists.
    Write,
}

/// All tensors in one role, as a kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TensorList {
    /// The part the tensors play.
    pub role: Role,
    /// Their storage type.
    pub dtype: DType,
    /// Whether the kernel writes them.
    pub access: Access,
}

impl TensorList {
    /// Bytes of memory traffic per element: one read, and one write if written.
    pub const fn traffic_bytes(&self) -> u64 {
        let len_bytes = self.dtype.len_bytes() as u64;
        match self.access {
            Access::Read | Access::Write => len_bytes,
            Access::ReadWrite => 2 * len_bytes,
        }
    }
}

/// The hyper-parameters of one tensor at one step, from which a kernel derives the step scalars it
/// reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupValues {
    /// Learning rate of the optimizer at this step.
    pub lr: f64,
    /// The tensor's factor on the learning rate.
    pub lr_scale: f64,
    /// The tensor's own weight decay; `None` for the optimizer's.
    pub weight_decay: Option<f64>,
    /// Whether a layer-wise rule scales the tensor's rate; `None` leaves it to the rule.
    pub trust: Option<Trust>,
    /// The tensor's step (t), counted from 1.
    pub step: u64,
}

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

    /// What the kernel needs to know of a whole tensor before it updates it; `None` if nothing.
    fn normed(&self) -> Option<&dyn NormedKernel> {
        None
    }

    /// How a device derives the step scalars of a resident table; `None` if only the host can.
    fn resident(&self) -> Option<ResidentStepScalars> {
        None
    }

    /// Bytes of memory traffic per element.
    fn traffic_bytes(&self) -> u64 {
        self.lists().iter().map(TensorList::traffic_bytes).sum()
    }
}

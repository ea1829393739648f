//! The memory of one storage.

use fusestep_launch::{ListBuffer, MultiTensorKernel};

use crate::update_norms::UpdateSlots;
use crate::{Plan, StorageSpec};

/// The buffers of one storage and the scalars its kernel reads.
pub(crate) struct StorageState {
    pub(crate) kernel: Box<dyn MultiTensorKernel>,
    pub(crate) offsets: Vec<u64>,
    /// For each tensor its position among the plan's parameters.
    pub(crate) params: Vec<u32>,
    /// For each tensor the parameter that it is, or is a piece of, and in that case the elements before it.
    pub(crate) members: Vec<u32>,
    pub(crate) before: Vec<u64>,
    pub(crate) lists: Vec<ListBuffer>,
    pub(crate) scalars: Vec<u8>,
    /// One set for each class of the schedule.
    pub(crate) sets: Vec<u8>,
    /// Where updates leave sums over what they change, if the plan asks for them.
    pub(crate) update_slots: Option<UpdateSlots>,
}

impl std::fmt::Debug for StorageState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StorageState")
            .field("kernel", &self.kernel.entry())
            .field("lists", &self.lists)
            .finish_non_exhaustive()
    }
}

impl Plan {
    /// For each tensor of a storage the caller's parameter that it is, or is a piece of; and in that case the elements before it.
    pub(crate) fn origins_of(&self, spec: &StorageSpec) -> (Vec<u32>, Vec<u64>) {
        if self.origins.is_empty() {
            return (spec.members.clone(), Vec::new());
        }
        let origins = spec.members.iter();
        origins.map(|&member| self.origins[member as usize]).unzip()
    }
}

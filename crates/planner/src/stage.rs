//! What a plan consists of.

use fusestep_coalesce::FlatLayout;
use fusestep_launch::{Batch, TensorList};
use fusestep_tensor::Trust;
use serde::Serialize;

use crate::SizeClass;

/// Hyper-parameters that tensors share; a per-tensor index in the argument table, never a reason to split a launch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HyperClass {
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Weight decay; `None` for the optimizer's.
    pub weight_decay: Option<f64>,
    /// Whether a layer-wise rule scales the rate; `None` leaves it to the rule.
    pub trust: Option<Trust>,
    /// Steps that these tensors have missed: their step is the state's less this.
    pub steps_behind: u64,
}

/// Tensors that lie in common buffers, one buffer for each list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StorageSpec {
    /// The kernel that updates these tensors.
    pub kernel: &'static str,
    /// Indices into the plan's parameters.
    pub members: Vec<u32>,
    /// Where each member lies, the same element offsets in every buffer.
    pub layout: FlatLayout,
    /// The lists that have a buffer here; lists that the caller lends have none.
    pub lists: Vec<TensorList>,
}

impl StorageSpec {
    /// What the buffers hold; with the dtypes, unless there is only one.
    pub(crate) fn roles(&self) -> Vec<String> {
        let one = self
            .lists
            .windows(2)
            .all(|two| two[0].dtype == two[1].dtype);
        let lists = self.lists.iter().map(|list| match one {
            true => list.role.to_string(),
            false => format!("{} {}", list.role, list.dtype),
        });
        lists.collect()
    }

    /// Bytes of all buffers, padding included.
    pub fn len_bytes(&self) -> u64 {
        let widths = self.lists.iter().map(|list| list.dtype.len_bytes() as u64);
        widths.sum::<u64>() * self.layout.total_numel()
    }

    /// Bytes of the buffers of optimizer state, padding included.
    pub fn state_bytes(&self) -> u64 {
        let state = self.lists.iter().filter(|list| list.role.is_state());
        let widths = state.map(|list| list.dtype.len_bytes() as u64);
        widths.sum::<u64>() * self.layout.total_numel()
    }
}

/// The update of tensors of one storage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Optimize {
    /// Index into the plan's storages.
    pub storage: usize,
    /// Whether tensors fit into one launch.
    pub size_class: SizeClass,
    /// Tensors of the storage (their positions in it) that this stage updates, in storage order.
    pub tensors: Vec<u32>,
    /// One launch each.
    pub batches: Vec<Batch>,
}

/// The read of all gradients: their norm, the finite check and the factor that updates multiply gradients with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// One for each storage, in order.
    pub reads: Vec<GradientRead>,
}

impl Norm {
    /// Launches of the stage: the reads and the conclusion.
    pub fn launches(&self) -> usize {
        let reads = self.reads.iter().map(|read| read.batches.len());
        reads.sum::<usize>() + 1
    }

    /// Chunks of all reads: partial sums of the stage.
    pub fn chunks(&self) -> u64 {
        let batches = self.reads.iter().flat_map(|read| &read.batches);
        batches.map(|batch| u64::from(batch.chunks)).sum()
    }
}

/// The read of one storage's gradients.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GradientRead {
    /// Index into the plan's storages.
    pub storage: usize,
    /// One launch each, in chunks of 65,536 elements whatever the limits.
    pub batches: Vec<Batch>,
}

/// One entry of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stage {
    /// Read all gradients and decide on the step.
    Norm(Norm),
    /// Apply the update rule.
    Optimize(Optimize),
}

/// The roles of a kernel's lists, as an error names them.
pub(crate) fn role_names(lists: &[TensorList]) -> String {
    let names: Vec<&str> = lists.iter().map(|list| list.role.name()).collect();
    names.join(", ")
}

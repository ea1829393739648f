//! What a plan consists of.

use std::ops::Range;

use fusestep_coalesce::{FlatLayout, LayoutOptions};
use fusestep_launch::{Batch, TensorList};
use fusestep_tensor::{DType, ParamDesc, Role, Trust};
use serde::Serialize;

use crate::passes::{GradientAccumulation, LocalSgd};
use crate::{Result, SizeClass};

/// Hyper-parameters that tensors share; a per-tensor index in the argument table, never a reason to
/// split a launch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ParameterGroup {
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Weight decay; `None` for the optimizer's.
    pub weight_decay: Option<f64>,
    /// Whether a layer-wise rule scales the rate; `None` leaves it to the rule.
    pub trust: Option<Trust>,
    /// Steps that these tensors have missed: their step is the state's less this.
    pub steps_behind: u64,
}

/// Tensors that lie in common arenas, one for each list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StorageSpec {
    /// The kernel that updates these tensors.
    pub kernel: &'static str,
    /// Index of their rule among the plan's.
    pub rule: usize,
    /// Indices into the plan's parameters.
    pub members: Vec<u32>,
    /// Where each member lies, the same element offsets in every list.
    pub layout: FlatLayout,
    /// The lists that have an arena here; lists that the caller lends have none.
    pub lists: Vec<TensorList>,
    /// Whether each rank has slices of its own under these names (pass `distributed`).
    pub distributed: bool,
    /// The shard of this rank: what it updates and keeps the state of, in order. All of the
    /// storage unless state is shared out.
    pub shard: Vec<Part>,
    /// How much of each list this rank has.
    pub extents: Vec<Extent>,
}

/// A range of a storage that lies in a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Elements of the storage.
    pub elements: Range<u64>,
    /// Place of the first of them in the shard.
    pub at: u64,
}

impl Part {
    pub(crate) fn numel(&self) -> usize {
        (self.elements.end - self.elements.start) as usize
    }

    /// Place of its first element in a list of this rank: one that it has whole begins with the
    /// storage's.
    pub(crate) fn place_in(&self, extent: Extent) -> u64 {
        match extent {
            Extent::Shard => self.at,
            Extent::Whole | Extent::Segments => self.elements.start,
        }
    }
}

/// How much of a list a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// All elements of the storage, in one allocation.
    Whole,
    /// The shard's parts, one behind the other.
    Shard,
    /// All elements, in an allocation for each segment: gradients that ranks reduce.
    Segments,
}

impl StorageSpec {
    /// The storage of some parameters of one dtype and rule, which are laid out in this order.
    pub(crate) fn of(
        params: &[ParamDesc],
        (kernel, rule): (&'static str, u32),
        members: Vec<u32>,
        lists: Vec<TensorList>,
    ) -> Result<Self> {
        let own = members.iter().map(|&member| &params[member as usize]);
        // Slots made for the narrowest element are aligned in every list.
        let width = lists.iter().map(|list| list.dtype.len_bytes()).min();
        let unit = width.or(own.clone().next().map(|own| own.dtype.len_bytes())).unwrap_or(1);
        Ok(Self {
            kernel,
            rule: rule as usize,
            layout: FlatLayout::new(own.map(ParamDesc::numel), LayoutOptions::new(unit))?,
            members,
            lists,
            distributed: false,
            shard: Vec::new(),
            extents: Vec::new(),
        })
    }

    /// What the arenas hold; with the dtypes, unless there is only one.
    pub(crate) fn roles(&self) -> Vec<String> {
        let one = self.lists.windows(2).all(|two| two[0].dtype == two[1].dtype);
        let name = |list: &TensorList| {
            if one { list.role.to_string() } else { format!("{} {}", list.role, list.dtype) }
        };
        self.lists.iter().map(name).collect()
    }

    /// Elements of this rank's shard, padding included.
    pub fn shard_numel(&self) -> u64 {
        self.shard.iter().map(|part| part.numel() as u64).sum()
    }

    /// Elements of a list's arenas on this rank, padding included.
    pub(crate) fn list_numel(&self, list: usize) -> u64 {
        match self.extents.get(list) {
            Some(Extent::Shard) => self.shard_numel(),
            _ => self.layout.total_numel(),
        }
    }

    /// Bytes of all arenas, padding included.
    pub fn len_bytes(&self) -> u64 {
        let lists = self.lists.iter().enumerate();
        lists.map(|(index, list)| list.dtype.len_bytes() as u64 * self.list_numel(index)).sum()
    }

    pub(crate) fn list(&self, role: Role) -> Option<usize> {
        self.lists.iter().position(|list| list.role == role)
    }

    /// Storage type of the gradients; of the first list where the caller lends them.
    pub(crate) fn grad_dtype(&self) -> DType {
        let list = self.list(Role::Grad).or(self.list(Role::Param));
        list.map_or(DType::F32, |list| self.lists[list].dtype)
    }

    pub(crate) fn param_dtype(&self) -> DType {
        let list = self.list(Role::Param);
        list.map_or(DType::F32, |list| self.lists[list].dtype)
    }

    /// What this rank's shard has of some elements of the storage, in order.
    pub fn own_parts(&self, elements: Range<u64>) -> impl Iterator<Item = Part> + '_ {
        let first = self.shard.partition_point(|part| part.elements.end <= elements.start);
        let parts = self.shard[first..].iter();
        let end = elements.end;
        parts.take_while(move |part| part.elements.start < end).map(move |part| {
            let start = part.elements.start.max(elements.start);
            Part {
                elements: start..part.elements.end.min(elements.end),
                at: part.at + start - part.elements.start,
            }
        })
    }
}

/// Gradients of several micro-steps, added before they are used: the first writes, later ones add,
/// the last one also divides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Accumulate {
    /// How many, and what becomes of them.
    pub rule: GradientAccumulation,
}

/// One call that reduces a bucket over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Reduce {
    /// Index into the plan's buckets.
    pub bucket: usize,
    /// What each rank gets.
    pub result: Reduced,
}

/// What each rank gets of a bucket that is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduced {
    /// All of it: an all-reduce.
    Whole,
    /// Its part: a reduce-scatter.
    Part,
}

/// The update of tensors of one storage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Optimize {
    /// Index into the plan's storages.
    pub storage: usize,
    /// The bucket whose elements are updated; `None` for all elements of the tensors.
    pub bucket: Option<usize>,
    /// Whether tensors fit into one launch.
    pub size_class: SizeClass,
    /// Tensors of the storage (their positions in it) that this stage updates, in storage order.
    pub tensors: Vec<u32>,
    /// Elements of the storage that are updated here: those of the bucket, or this rank's part of
    /// them.
    pub elements: Range<u64>,
    /// One launch each.
    pub batches: Vec<Batch>,
}

/// The read of all gradients: their norm, the finite check and the factor that updates multiply
/// gradients with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// One for each storage, in order; of several ranks one for each bucket, of this rank's part.
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

/// The read of one storage's gradients, or of a part of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GradientRead {
    /// Index into the plan's storages.
    pub storage: usize,
    /// The bucket whose part is read; `None` for the whole storage.
    pub bucket: Option<usize>,
    /// Elements of the storage.
    pub elements: Range<u64>,
    /// One launch each, in chunks of 65,536 elements whatever the limits.
    pub batches: Vec<Batch>,
}

/// The calls that bring this rank's part of the parameters to other ranks, and theirs here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gather {
    /// Index into the plan's buckets.
    pub bucket: usize,
    /// Ranges that come by a broadcast of the rank that has them; empty for one all-gather of all
    /// parts.
    pub broadcasts: Vec<Broadcast>,
}

/// Parameters of one owner that one call brings to all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Broadcast {
    /// The rank of the shard group that has updated them.
    pub owner: usize,
    /// Elements of the storage.
    pub elements: Range<u64>,
}

/// One entry of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stage {
    /// Add the gradients of micro-steps.
    Accumulate(Accumulate),
    /// Reduce a bucket over all ranks, as soon as it is ready where there are communication
    /// streams.
    Reduce(Reduce),
    /// Read all gradients and decide on the step.
    Norm(Norm),
    /// Take the sums over whole tensors that a layer-wise rule needs, each rank those of its part.
    Trust,
    /// Apply the update rule.
    Optimize(Optimize),
    /// Reduce a bucket and apply the update rule in one pass: each rank its part, on the memory of
    /// all.
    ReduceUpdate(Optimize),
    /// Bring what other ranks have updated.
    Gather(Gather),
    /// Average parameters across ranks, now and then.
    Average(LocalSgd),
}

impl Stage {
    /// The bucket that the stage is about; `None` for one about whole storages.
    pub fn bucket(&self) -> Option<usize> {
        match self {
            Stage::Reduce(reduce) => Some(reduce.bucket),
            Stage::Gather(gather) => Some(gather.bucket),
            other => other.update().and_then(|update| update.bucket),
        }
    }

    /// The update that the stage makes; `None` for one that makes none.
    pub fn update(&self) -> Option<&Optimize> {
        match self {
            Stage::Optimize(update) | Stage::ReduceUpdate(update) => Some(update),
            _ => None,
        }
    }
}

/// When a stage runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// In every micro-step.
    MicroStep,
    /// In every step, as soon as the gradients it takes are given.
    Ready,
    /// In every step.
    Step,
    /// In every so many-th step.
    Every(u64),
}

/// The roles of a kernel's lists, as an error names them.
pub(crate) fn role_names(lists: &[TensorList]) -> String {
    let names: Vec<&str> = lists.iter().map(|list| list.role.name()).collect();
    names.join(", ")
}

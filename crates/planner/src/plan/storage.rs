//! Storages of tensors that lie together: their lists, places and parts.

use std::ops::Range;

use fusestep_coalesce::{FlatLayout, LayoutOptions};
use fusestep_launch::TensorList;
use fusestep_tensor::{DType, ParamDesc, Role};
use serde::Serialize;

use crate::error::Result;

/// Tensors that lie in common arenas, one for each list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StorageSpec {
    /// The kernel that updates these tensors.
    pub kernel: &'static str,
    /// Index of the tensors' rule among the plan's.
    pub rule: usize,
    /// Indices into the plan's parameters.
    pub members: Vec<u32>,
    /// Element offsets of the members, the same in every list.
    pub layout: FlatLayout,
    /// The lists that have an arena here; lists that the caller lends have none.
    pub lists: Vec<TensorList>,
    /// Whether each rank has slices of its own under these names (pass `distributed`).
    pub distributed: bool,
    /// Shard of this rank: the ranges that it updates and keeps the state of, in order. The whole
    /// storage unless state is shared out.
    pub shard: Vec<Part>,
    /// The extent that this rank has of each list.
    pub extents: Vec<Extent>,
}

/// Key of a storage, whose tensors have it in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StorageKey {
    /// Dtype of the parameters.
    pub(crate) dtype: DType,
    /// Index of their rule among the plan's.
    pub(crate) rule: u32,
    /// Whether their state stays in f32 beside others' in int8.
    pub(crate) keeps_f32: bool,
}

/// A range of a storage that lies in a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Elements of the storage.
    pub elements: Range<u64>,
    /// Place of the part's first element in the shard.
    pub at: u64,
}

impl Part {
    pub(crate) fn numel(&self) -> usize {
        (self.elements.end - self.elements.start) as usize
    }

    /// Place of the part's first element in a list of this rank. A whole list begins with the
    /// storage's first element.
    pub(crate) fn place_in(&self, extent: Extent) -> u64 {
        match extent {
            Extent::Shard => self.at,
            Extent::Whole | Extent::Segments => self.elements.start,
        }
    }
}

/// The extent of a list that a rank has.
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
    /// The storage of some parameters of one dtype and rule, by its index, which are laid out in
    /// this order.
    pub(crate) fn of(
        params: &[ParamDesc],
        kernel: &'static str,
        rule: u32,
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

    /// Roles of the arenas; with their dtypes, unless there is only one.
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

    /// Whether state lies in codes, so that shards are cut between groups.
    pub(crate) fn is_coded(&self) -> bool {
        self.lists.iter().any(|list| list.role.unit_of().is_some())
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
        lists.map(|(index, list)| list.stride().bytes(self.list_numel(index))).sum()
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

    /// Parts of this rank's shard that lie in some elements of the storage, in order.
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

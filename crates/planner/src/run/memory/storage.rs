//! Memory of one storage.

use std::ops::Range;

use fusestep_launch::{ListBuffer, MAX_SUMS, MultiTensorKernel, Stride};
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::storage::{Extent, StorageSpec};
use crate::run::memory::update_sums::UpdateRows;

/// The arenas of one storage and the scalars its kernel reads.
pub(crate) struct StorageState {
    pub(crate) kernel: Box<dyn MultiTensorKernel>,
    pub(crate) spec: StorageSpec,
    /// An arena for each list; an empty one for gradients that lie in segments.
    pub(crate) lists: Vec<ListBuffer>,
    /// The element of the storage that each list's memory begins with, for the launch under way;
    /// empty if all begin with 0.
    pub(crate) firsts: Vec<u64>,
    pub(crate) scalars: Vec<u8>,
    /// Step scalars of each group of the schedule, one after the other.
    pub(crate) step_scalars: Vec<u8>,
    /// Sums over whole tensors, from all ranks, where a layer-wise rule updates parts of them.
    pub(crate) tensor_sums: Option<Vec<[f64; MAX_SUMS]>>,
    /// Rows for the sums that updates leave over what they change, if the plan asks for them.
    pub(crate) update_rows: Option<UpdateRows>,
}

/// Consecutive elements of one tensor that a rank has, and their place in one list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) elements: Range<u64>,
    /// Place of the first element in the list's arena.
    pub(crate) at: u64,
}

impl Held {
    /// Bytes of the elements in the arena.
    pub(crate) fn place(&self, stride: Stride) -> Range<usize> {
        let numel = (self.elements.end - self.elements.start) as usize;
        stride.place(self.at as usize..self.at as usize + numel)
    }

    /// Bytes of the elements in the whole tensor.
    pub(crate) fn within(&self, stride: Stride) -> Range<usize> {
        stride.place(self.elements.start as usize..self.elements.end as usize)
    }
}

impl StorageSpec {
    /// Parts of a tensor that lie in this rank's arena of a list.
    pub(crate) fn held(&self, tensor: usize, list: usize) -> Vec<Held> {
        let own = self.layout.range(tensor);
        match self.extents[list] {
            Extent::Shard => self.held_of_shard(tensor, Extent::Shard).collect(),
            Extent::Segments => Vec::new(),
            Extent::Whole => vec![Held { elements: 0..own.end - own.start, at: own.start }],
        }
    }

    /// Parts of a tensor in this rank's shard, and their places in a list of this extent.
    pub(crate) fn held_of_shard(
        &self,
        tensor: usize,
        extent: Extent,
    ) -> impl Iterator<Item = Held> + '_ {
        let start = self.layout.offset(tensor);
        self.own_parts(self.layout.range(tensor)).map(move |part| Held {
            at: part.place_in(extent),
            elements: part.elements.start - start..part.elements.end - start,
        })
    }

    /// The element of the storage that the memory of a list begins with, where a launch updates
    /// `elements`; gradients lie in a segment that begins with `segment`.
    pub(crate) fn first_of(&self, list: usize, elements: &Range<u64>, segment: u64) -> u64 {
        match self.extents[list] {
            Extent::Whole => 0,
            Extent::Segments => segment,
            Extent::Shard => {
                let at = self.shard.partition_point(|part| part.elements.end <= elements.start);
                self.shard.get(at).map_or(0, |part| part.elements.start.wrapping_sub(part.at))
            }
        }
    }
}

impl StorageState {
    /// Sets the first element of each list's memory for a launch over `elements`.
    pub(crate) fn set_firsts(&mut self, elements: &Range<u64>, segment: u64) {
        let spec = &self.spec;
        self.firsts.clear();
        let firsts = (0..self.lists.len()).map(|list| spec.first_of(list, elements, segment));
        self.firsts.extend(firsts);
        if self.firsts.iter().all(|&first| first == 0) {
            self.firsts.clear();
        }
    }
}

pub(crate) fn check_len(role: Role, name: &str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(PlanError::LenBytes { role, name: name.to_owned(), expected, found })
}

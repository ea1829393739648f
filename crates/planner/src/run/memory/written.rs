//! Values that callers write to a state between steps. Ranks compare their hashes, and one rank can
//! hand its values on.
//!
//! Lists that every rank has whole are compared as they are. A list that is shared out leaves each
//! rank its shard only, so the whole values are known only while they are written.

use std::collections::{BTreeMap, HashMap};

use fusestep_coalesce::HostMemory;
use fusestep_tensor::Role;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::Result;
use crate::plan::storage::Extent;

/// Writes to tensors that all ranks have alike, since the last step.
#[derive(Default)]
pub(crate) struct Written {
    /// Sum of the hashes of parameters; ranks may write them in any order.
    params: u64,
    /// Sum of the hashes of the optimizer's tensors.
    state: u64,
    /// Hash of the last write to each tensor that is shared out.
    of_shards: HashMap<(usize, Role), u64>,
    /// Whole values of parameters that are shared out, which a rank can hand on.
    whole: BTreeMap<usize, HostMemory>,
}

impl Written {
    /// Notes the values of a whole tensor.
    pub(crate) fn note(&mut self, param: usize, role: Role, extent: Extent, bytes: &[u8]) {
        let hash = xxh3_64_with_seed(bytes, (param as u64) << 8 | role as u64);
        let sum = if role == Role::Param { &mut self.params } else { &mut self.state };
        *sum = sum.wrapping_add(hash);
        if extent == Extent::Shard {
            self.of_shards.insert((param, role), hash);
        }
    }

    /// Keeps the whole values of a parameter until the next step.
    pub(crate) fn keep(&mut self, param: usize, bytes: &[u8]) -> Result<()> {
        let mut memory = HostMemory::zeroed(bytes.len())?;
        memory.bytes_mut().copy_from_slice(bytes);
        self.whole.insert(param, memory);
        Ok(())
    }

    /// The whole values of a parameter, if this rank has written it since the last step.
    pub(crate) fn whole(&self, param: usize) -> Option<&[u8]> {
        self.whole.get(&param).map(HostMemory::bytes)
    }

    /// Takes the hash of all writes since the last call.
    pub(crate) fn take_hash(&mut self) -> u64 {
        std::mem::take(&mut self.params).wrapping_add(std::mem::take(&mut self.state))
    }

    /// Hash of the last write to a tensor that is shared out.
    pub(crate) fn of_shard(&self, param: usize, role: Role) -> Option<u64> {
        self.of_shards.get(&(param, role)).copied()
    }

    /// Forgets writes to parameters that now have one rank's values on all ranks. Writes to other
    /// parameters are compared as before.
    pub(crate) fn brought(&mut self, is_brought: impl Fn(usize) -> bool) {
        self.whole.retain(|&param, _| !is_brought(param));
        self.of_shards.retain(|&(param, role), _| role != Role::Param || !is_brought(param));
        let left = self.of_shards.iter().filter(|((_, role), _)| *role == Role::Param);
        self.params = left.fold(0, |sum, (_, &hash)| sum.wrapping_add(hash));
    }

    /// Forgets everything: a step has changed the tensors on all ranks.
    pub(crate) fn forget(&mut self) {
        self.of_shards.clear();
        self.whole.clear();
    }

    /// Forgets the whole values.
    pub(crate) fn release(&mut self) {
        self.whole.clear();
    }

    /// Bytes of the whole values.
    pub(crate) fn len_bytes(&self) -> usize {
        self.whole.values().map(|memory| memory.bytes().len()).sum()
    }
}

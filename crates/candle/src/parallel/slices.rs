//! Registry of variables of which every rank has a slice, filled by layers.
//!
//! An optimizer is given variables and no layers, and a variable has no place for a note. Layers
//! therefore note their slices under candle's tensor ids, which are never given twice. A note takes
//! a few bytes for each variable, until the program ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::{Tensor, TensorId};

use super::Group;

/// Number of ranks that have slices of a variable, by the variable's id.
static SLICES: LazyLock<Mutex<HashMap<TensorId, usize>>> = LazyLock::new(Mutex::default);

/// Whether there are notes. Steps look at every variable, and most programs have no notes.
static ANY: AtomicBool = AtomicBool::new(false);

/// Notes that a tensor is this rank's slice, if the tensor is a variable and the group has several
/// ranks.
pub(super) fn note(slice: &Tensor, group: &Group) {
    if group.world_size() > 1 && slice.is_variable() {
        let mut slices = SLICES.lock().unwrap_or_else(PoisonError::into_inner);
        slices.insert(slice.id(), group.world_size());
        ANY.store(true, Ordering::Release);
    }
}

/// The number of ranks that have slices of a variable, if a layer has noted it.
pub(crate) fn ranks_of(var: &Tensor) -> Option<usize> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    let slices = SLICES.lock().unwrap_or_else(PoisonError::into_inner);
    slices.get(&var.id()).copied()
}

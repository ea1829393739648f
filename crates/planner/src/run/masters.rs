//! Masters follow parameters that are written from outside of a step.
//!
//! A parameter with a master weight is the master rounded. If a caller writes a value to which the
//! master does not round, the master takes over the value. Otherwise the master stays, so a
//! parameter and its state can be read back in any order.

use fusestep_launch::{Backend, Stride};
use fusestep_tensor::{DType, Role};

use crate::error::Result;
use crate::plan::storage::Extent;
use crate::run::memory::absorb::{narrowed, widened};
use crate::run::memory::state::State;
use crate::run::memory::storage::Held;

/// Stride of 16-bit parameters.
const PARAM: Stride = Stride::of(Role::Param, DType::BF16);

/// Stride of their masters.
const MASTER: Stride = Stride::of(Role::Master, DType::F32);

/// Before `bytes` are written to a parameter: makes master and residual follow.
pub(crate) fn follow_write(
    state: &mut State,
    backend: &dyn Backend,
    name: &str,
    bytes: &[u8],
) -> Result<()> {
    let param = state.find(name)?;
    let roles = state.roles(name)?;
    if roles.contains(&Role::Master) {
        let dtype = state.dtype(Role::Param, name)?;
        rewrite(state, backend, Role::Master, param, |held, master| {
            follow_master(dtype, &bytes[held.within(PARAM)], master);
        })?;
    }
    if roles.contains(&Role::Remainder) {
        let mut old = Vec::new();
        state.read_shard(backend, Role::Param, param, |_, bytes| old.push(bytes))?;
        let mut old = old.into_iter();
        let width = state.dtype(Role::Remainder, name)?.len_bytes();
        rewrite(state, backend, Role::Remainder, param, |held, remainder| {
            let old = old.next().unwrap_or_default();
            let new = bytes[held.within(PARAM)].chunks_exact(2).zip(old.chunks_exact(2));
            for (remainder, (new, old)) in remainder.chunks_exact_mut(width).zip(new) {
                if new != old {
                    remainder.fill(0);
                }
            }
        })?;
    }
    Ok(())
}

/// Changes a tensor's elements in this rank's shard, once all of them have been read.
fn rewrite(
    state: &mut State,
    backend: &dyn Backend,
    role: Role,
    param: usize,
    mut change: impl FnMut(&Held, &mut [u8]),
) -> Result<()> {
    let mut changed = Vec::new();
    state.read_shard(backend, role, param, |held, mut bytes| {
        change(held, &mut bytes);
        changed.push((held.clone(), bytes));
    })?;
    let (storage, list) = state.list_index(role, &state.params[param].name)?;
    let list = &mut state.storages[storage].lists[list];
    let stride = list.stride();
    for (held, bytes) in changed {
        backend.write(list.buffer.as_mut(), held.place(stride).start, &bytes)?;
    }
    Ok(())
}

/// Remembers that a parameter was borrowed for writing, if a master has to follow.
pub(crate) fn lend_for_writing(state: &mut State, param: usize) {
    let (storage, _) = state.places[param];
    let lists = &state.storages[storage].lists;
    if lists.iter().any(|list| list.role() == Role::Master) {
        state.masters.borrowed_for_writing[param] = true;
        state.masters.any_borrowed_for_writing = true;
    }
}

/// Lets masters follow what was written through views since the last step. Only host memory has
/// views.
pub(crate) fn follow_views(state: &mut State) {
    if !std::mem::take(&mut state.masters.any_borrowed_for_writing) {
        return;
    }
    for (param, borrowed) in state.masters.borrowed_for_writing.iter_mut().enumerate() {
        if !std::mem::take(borrowed) {
            continue;
        }
        let (storage, tensor) = state.places[param];
        let storage = &mut state.storages[storage];
        let start = storage.spec.layout.offset(tensor);
        let (Some(param), Some(master)) =
            (storage.spec.list(Role::Param), storage.spec.list(Role::Master))
        else {
            continue;
        };
        let whole = storage.spec.extents[param] == Extent::Whole;
        let held: Vec<Held> = storage.spec.held(tensor, master);
        let Ok([param, master]) = storage.lists.get_disjoint_mut([param, master]) else {
            continue;
        };
        let dtype = param.dtype();
        let (Some(param), Some(master)) = (param.buffer.host(), master.buffer.host_mut()) else {
            continue;
        };
        for held in held {
            let at = if whole { start + held.elements.start } else { held.at };
            let own = Held { at, ..held.clone() };
            follow_master(dtype, &param[own.place(PARAM)], &mut master[held.place(MASTER)]);
        }
    }
}

/// Sets every f32 of `master` that does not round to its 16-bit parameter to the parameter's value.
pub(crate) fn follow_master(dtype: DType, param: &[u8], master: &mut [u8]) {
    for (param, master) in param.chunks_exact(2).zip(master.chunks_exact_mut(4)) {
        let bits = u16::from_le_bytes([param[0], param[1]]);
        let value = f32::from_le_bytes([master[0], master[1], master[2], master[3]]);
        if narrowed(dtype, value) != bits {
            master.copy_from_slice(&widened(dtype, bits).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_stays_where_it_rounds_to_the_parameter() {
        let masters = [1.000_01f32, 3.0, 0.0];
        let mut bytes = masters.map(f32::to_le_bytes).concat();
        let param = [0x3f80u16, 0x3f80, 0x8000].map(u16::to_le_bytes).concat();
        follow_master(DType::BF16, &param, &mut bytes);
        let (found, _) = bytes.as_chunks();
        let found: Vec<f32> = found.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert_eq!(found[..2], [1.000_01, 1.0]);
        assert!(found[2] == 0.0 && found[2].is_sign_negative());
    }
}

//! Masters follow parameters that are written from outside of a step.
//!
//! A parameter with a master is the master rounded. Whoever writes the parameter means the value
//! written, so where the master does not round to it, the master takes it over. Where it does, it
//! stays: a parameter and its state can be read back in any order.

use fusestep_launch::Backend;
use fusestep_tensor::{DType, Role};

use crate::absorb::{narrowed, widened};
use crate::stage::Extent;
use crate::storage::Held;
use crate::{Plan, PlanError, Result, State, Tensors};

/// What masters have to follow before the next step.
pub(crate) struct Masters {
    /// Parameters borrowed for writing since the last step.
    borrowed_for_writing: Vec<bool>,
    any_borrowed_for_writing: bool,
    /// Masters of parameters that the caller lends, not written yet.
    pub(crate) awaited: Vec<bool>,
    any_awaited: bool,
}

impl Masters {
    /// Those of a state that has not been written.
    pub(crate) fn new(plan: &Plan) -> Self {
        let mut awaited = vec![false; plan.params.len()];
        for spec in &plan.storages {
            let master = spec.lists.iter().any(|list| list.role == Role::Master);
            for &member in &spec.members {
                awaited[member as usize] = master && plan.tensors == Tensors::Borrowed;
            }
        }
        Self {
            borrowed_for_writing: vec![false; plan.params.len()],
            any_borrowed_for_writing: false,
            any_awaited: awaited.contains(&true),
            awaited,
        }
    }
}

/// Refuses a step before every master has values.
pub(crate) fn check(state: &State) -> Result<()> {
    if !state.masters.any_awaited {
        return Ok(());
    }
    let mut awaited = state.params.iter().zip(&state.masters.awaited);
    match awaited.find(|(param, awaited)| **awaited && param.numel() > 0) {
        Some((param, _)) => Err(PlanError::BorrowedMaster { name: param.name.clone() }),
        None => Ok(()),
    }
}

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
        rewrite(state, backend, (Role::Master, param), |held, master| {
            follow_master(dtype, &bytes[held.within(2)], master);
        })?;
    }
    if roles.contains(&Role::Remainder) {
        let mut old = Vec::new();
        state.read_shard(backend, Role::Param, param, |_, bytes| old.push(bytes))?;
        let mut old = old.into_iter();
        rewrite(state, backend, (Role::Remainder, param), |held, remainder| {
            let old = old.next().unwrap_or_default();
            let new = bytes[held.within(2)].chunks_exact(2).zip(old.chunks_exact(2));
            for (remainder, (new, old)) in remainder.chunks_exact_mut(2).zip(new) {
                if new != old {
                    remainder.fill(0);
                }
            }
        })?;
    }
    Ok(())
}

/// Changes what this rank's shard has of a tensor, once all of it has been read.
fn rewrite(
    state: &mut State,
    backend: &dyn Backend,
    (role, param): (Role, usize),
    mut change: impl FnMut(&Held, &mut [u8]),
) -> Result<()> {
    let mut changed = Vec::new();
    state.read_shard(backend, role, param, |held, mut bytes| {
        change(held, &mut bytes);
        changed.push((held.clone(), bytes));
    })?;
    let (storage, list) = state.list_index(role, &state.params[param].name)?;
    let list = &mut state.storages[storage].lists[list];
    let width = list.dtype().len_bytes();
    for (held, bytes) in changed {
        backend.write(list.buffer.as_mut(), held.place(width).start, &bytes)?;
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
            follow_master(dtype, &param[own.place(2)], &mut master[held.place(4)]);
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
        let found: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
        assert_eq!(found[..2], [1.000_01, 1.0]);
        assert!(found[2] == 0.0 && found[2].is_sign_negative());
    }
}

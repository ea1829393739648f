//! Whole parameters on a device, gathered from the parts of ranks.

use std::ops::Range;

use fusestep_collective::Operation;
use fusestep_launch::{Backend, Buffer, DeviceBackend};
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::storage::Extent;
use crate::plan::value::Plan;
use crate::run::comms::bytes::CallKind;
use crate::run::comms::calls::Comms;
use crate::run::memory::device_params::DeviceParams;
use crate::run::memory::evaluated::Values;
use crate::run::memory::state::State;
use crate::run::memory::storage::StorageState;
use crate::run::run::Run;
use crate::run::stages::gather;
use crate::run::wanted;
use crate::run::wanted::{Here, Wanted};

pub(crate) fn gather_on_device(run: &mut Run<'_, '_>, names: &[&str]) -> Result<DeviceParams> {
    let backend = run.backend;
    let Run { plan, state, comms, .. } = run;
    let device = match plan.topology.world {
        1 => backend.device(),
        _ => comms.device_of(backend),
    };
    let Some(device) = device else {
        let name = names.first().map_or("", |name| name).to_owned();
        return Err(PlanError::NotOnDevice { name });
    };
    comms.set_plan(plan.hash());
    let mut found = DeviceParams { buffers: Vec::new(), places: vec![(0, 0..0); names.len()] };
    let (wanted, here) = wanted::asked_for(plan, state, names, Values::Params)?;
    for Here { at, param } in here {
        let (storage, tensor) = plan.places[param];
        let spec = &plan.storages[storage];
        let len_bytes = plan.params[param].numel() as usize * spec.param_dtype().len_bytes();
        let mut memory = comms.spare(backend, len_bytes)?;
        let elements = spec.layout.range(tensor);
        copy_own(backend, &state.storages[storage], &elements, memory.as_mut(), 0)?;
        device.hand_over(memory.as_mut())?;
        found.places[at] = (found.buffers.len(), 0..len_bytes);
        found.buffers.push(memory);
    }
    for group in wanted.chunk_by(|a, b| a.segment == b.segment) {
        gather_segment(plan, state, device, comms, group, &mut found)?;
    }
    Ok(found)
}

fn gather_segment(
    plan: &Plan,
    state: &State,
    device: &dyn DeviceBackend,
    comms: &mut Comms<'_>,
    wanted: &[Wanted],
    found: &mut DeviceParams,
) -> Result<()> {
    let storage = plan.segments[wanted[0].segment].storage;
    let dtype = plan.storages[storage].param_dtype();
    let block = wanted::block_of(plan, wanted);
    let mut memory = comms.spare(device, block.len_bytes)?;
    for (at, _, inside) in &block.own {
        copy_own(device, &state.storages[storage], inside, memory.as_mut(), *at)?;
    }
    for (range, counts) in block.calls {
        let kind = CallKind { operation: Operation::AllGather, dtype, counts: Some(counts) };
        gather::on_device(device, comms, &mut memory, range, kind)?;
    }
    device.hand_over(memory.as_mut())?;
    for (one, place) in wanted.iter().zip(block.places) {
        found.places[one.at] = (found.buffers.len(), place);
    }
    found.buffers.push(memory);
    Ok(())
}

/// Copies this rank's part of some elements of a storage's parameters to memory, from byte `at` on.
fn copy_own(
    backend: &dyn Backend,
    storage: &StorageState,
    elements: &Range<u64>,
    memory: &mut dyn Buffer,
    at: usize,
) -> Result<()> {
    let spec = &storage.spec;
    let Some(list) = spec.list(Role::Param) else {
        return Ok(());
    };
    let width = spec.param_dtype().len_bytes();
    let from = storage.lists[list].buffer.as_ref();
    if spec.extents[list] == Extent::Whole {
        let place = elements.start as usize * width;
        let len_bytes = (elements.end - elements.start) as usize * width;
        return Ok(backend.copy(from, place, memory, at, len_bytes)?);
    }
    let mut next = at;
    for part in spec.own_parts(elements.clone()).filter(|part| !part.elements.is_empty()) {
        let place = part.place_in(spec.extents[list]) as usize * width;
        let len_bytes = part.numel() * width;
        backend.copy(from, place, &mut *memory, next, len_bytes)?;
        next += len_bytes;
    }
    Ok(())
}

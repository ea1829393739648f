//! Parameters gathered from the parts of ranks.

use std::ops::Range;

use fusestep_coalesce::{HostMemory, zeroed_bytes};
use fusestep_collective::{CollectiveError, Operation};
use fusestep_launch::{Backend, Buffer, DeviceBackend};
use fusestep_tensor::{DType, Role};

use crate::error::{PlanError, Result};
use crate::plan::passes::fuse_all_reduce::FuseAllReduce;
use crate::plan::settings::ZeroStage;
use crate::plan::stage::Gather;
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;
use crate::run::comms::bytes::{Bytes, CallKind};
use crate::run::comms::calls::Comms;
use crate::run::memory::device;
use crate::run::memory::evaluated::{Beside, Values};
use crate::run::memory::state::State;
use crate::run::run::Run;
use crate::run::wanted::{Here, Wanted, asked_for, block_of};

/// Whole parameters, for as long as this value lives.
#[derive(Debug)]
pub struct GatheredParams {
    pub(crate) buffers: Vec<GatheredBuffer>,
    /// Buffer of each parameter, and its bytes there.
    places: Vec<(usize, Range<usize>)>,
}

/// Parameters that lie one behind the other in one segment's range: this rank's part of them, until
/// calls have brought the others'.
#[derive(Debug)]
pub(crate) struct GatheredBuffer {
    pub(crate) dtype: DType,
    /// Bytes of each bucket here, and the number of elements of each rank's part; empty if this
    /// rank has them all.
    pub(crate) calls: Vec<(Range<usize>, Vec<usize>)>,
    pub(crate) memory: HostMemory,
}

impl GatheredParams {
    /// The bytes of the parameter that was asked for at this position.
    pub fn bytes(&self, position: usize) -> &[u8] {
        match self.places.get(position) {
            Some((buffer, range)) => &self.buffers[*buffer].memory.bytes()[range.clone()],
            None => &[],
        }
    }

    /// Bytes of all parameters, which dropping this value frees.
    pub fn len_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.memory.bytes().len()).sum()
    }
}

pub(crate) fn broadcast_parameters(run: &mut Run<'_, '_>, root: usize) -> Result<()> {
    let backend = run.backend;
    let Run { plan, state, comms, .. } = run;
    state.check_plan(plan)?;
    comms.set_plan(plan.hash());
    let brought = params_to_bring(plan, state, comms, root)?;
    if !brought.contains(&true) {
        return Ok(());
    }
    let of_buckets = plan.caps.as_ref().map(|caps| caps.bytes);
    let cap_bytes = plan.broadcast_cap_bytes.or(of_buckets);
    let cap_bytes = cap_bytes.unwrap_or(FuseAllReduce::DEFAULT_CAP_BYTES);
    let any_brought =
        |spec: &&StorageSpec| spec.members.iter().any(|&member| brought[member as usize]);
    let shared = plan.storages.iter().filter(|spec| !spec.distributed);
    for spec in shared.filter(any_brought) {
        let dtype = spec.param_dtype();
        let width = dtype.len_bytes();
        let cap = (usize::try_from(cap_bytes).unwrap_or(usize::MAX) / width).max(1) * width;
        let mut memory = HostMemory::zeroed(spec.layout.total_numel() as usize * width)?;
        let place = |tensor: usize| {
            let range = spec.layout.range(tensor);
            range.start as usize * width..range.end as usize * width
        };
        if comms.rank() == root {
            for (tensor, &member) in spec.members.iter().enumerate() {
                let bytes = &mut memory.bytes_mut()[place(tensor)];
                match state.written.whole(member as usize) {
                    Some(whole) => bytes.copy_from_slice(whole),
                    None if brought[member as usize] => {
                        let name = &plan.params[member as usize].name;
                        state.read(backend, Role::Param, name, bytes)?;
                    }
                    None => {}
                }
            }
        }
        for part in memory.bytes_mut().chunks_mut(cap) {
            comms.in_place(Operation::Broadcast { root }, dtype, None, part)?;
        }
        for (tensor, &member) in spec.members.iter().enumerate() {
            if brought[member as usize] {
                let name = &plan.params[member as usize].name;
                state.write_all(backend, Role::Param, name, &memory.bytes()[place(tensor)])?;
            }
        }
    }
    state.written.brought(|param| brought[param]);
    Ok(())
}

/// Parameters that rank `root` brings to all ranks. At ZeRO stage 3 these are the parameters that
/// it has written since the last step and still has whole; else all.
fn params_to_bring(
    plan: &Plan,
    state: &State,
    comms: &mut Comms<'_>,
    root: usize,
) -> Result<Vec<bool>> {
    let count = plan.params.len();
    if plan.zero != ZeroStage::Three || !plan.reduces() || count == 0 {
        return Ok(vec![true; count]);
    }
    let has = |param| u8::from(state.written.whole(param).is_some());
    let mut told: Vec<u8> = (0..count).map(has).collect();
    comms.in_place(Operation::Broadcast { root }, DType::U8, None, &mut told)?;
    Ok(told.into_iter().map(|told| told != 0).collect())
}

/// Runs stage `gather`: brings each rank's part of a bucket to all ranks.
pub(crate) fn bring(run: &mut Run<'_, '_>, gather: &Gather) -> Result<()> {
    let bucket = &run.plan.buckets[gather.bucket];
    let spec = &run.plan.storages[bucket.storage];
    let Some(index) = spec.list(Role::Param) else {
        return Ok(());
    };
    let dtype = spec.param_dtype();
    let width = dtype.len_bytes();
    let bytes = |range: &Range<u64>| range.start as usize * width..range.end as usize * width;
    let buffer = &mut run.state.storages[bucket.storage].lists[index].buffer;
    let device = run.comms.device_of(run.backend).filter(|_| buffer.host().is_none());
    let mut call = |range, operation, counts: Option<Vec<usize>>| {
        if let Some(device) = device {
            let kind = CallKind { operation, dtype, counts };
            return on_device(device, run.comms, &mut *buffer, bytes(range), kind);
        }
        in_place(run.backend, run.comms, buffer.as_mut(), bytes(range), |comms, own| {
            comms.in_group(operation, dtype, counts.as_deref(), own)
        })
    };
    for part in &gather.broadcasts {
        let operation = Operation::Broadcast { root: part.owner };
        call(&part.elements, operation, None)?;
    }
    if gather.broadcasts.is_empty() {
        let counts = Some(bucket.counts());
        call(&bucket.elements, Operation::AllGather, counts)?;
    }
    Ok::<_, PlanError>(())
}

/// Gathers parameters, or their averages.
pub(crate) fn gather_values(
    run: &mut Run<'_, '_>,
    names: &[&str],
    values: Values,
) -> Result<GatheredParams> {
    let mut params = own_parts(run.plan, run.state, run.backend, names, values)?;
    for buffer in &mut params.buffers {
        for (range, counts) in &buffer.calls {
            let bytes = &mut buffer.memory.bytes_mut()[range.clone()];
            run.comms.in_group(Operation::AllGather, buffer.dtype, Some(counts), bytes)?;
        }
    }
    Ok(params)
}

/// Buffers for parameters, with this rank's part of them in its place.
pub(crate) fn own_parts(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    names: &[&str],
    values: Values,
) -> Result<GatheredParams> {
    let places = vec![(0, 0..0); names.len()];
    let mut params = GatheredParams { buffers: Vec::new(), places };
    let (wanted, here) = asked_for(plan, state, names, values)?;
    for Here { at, param } in here {
        let (storage, _) = plan.places[param];
        let dtype = plan.storages[storage].param_dtype();
        let len_bytes = plan.params[param].numel() as usize * dtype.len_bytes();
        let mut memory = HostMemory::zeroed(len_bytes)?;
        if len_bytes > 0 {
            let bytes = memory.bytes_mut();
            match values {
                Values::Params => state.read(backend, Role::Param, names[at], bytes)?,
                Values::Averages => state.read_average(backend, names[at], bytes)?,
            }
        }
        params.places[at] = (params.buffers.len(), 0..len_bytes);
        params.buffers.push(GatheredBuffer { dtype, calls: Vec::new(), memory });
    }
    for group in wanted.chunk_by(|a, b| a.segment == b.segment) {
        own_part(plan, state, backend, group, &mut params)?;
    }
    Ok(params)
}

/// The tensors of one segment, one call for each of its buckets.
fn own_part(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    wanted: &[Wanted],
    params: &mut GatheredParams,
) -> Result<()> {
    let segment = &plan.segments[wanted[0].segment];
    let block = block_of(plan, wanted);
    for (one, place) in wanted.iter().zip(block.places) {
        params.places[one.at] = (params.buffers.len(), place);
    }
    let spec = &plan.storages[segment.storage];
    let lists = &state.storages[segment.storage].lists;
    let mut memory = HostMemory::zeroed(block.len_bytes)?;
    for (mut next, which, inside) in block.own {
        for part in spec.own_parts(inside) {
            let read = |role| {
                let Some(index) = spec.list(role) else {
                    return Ok(None);
                };
                let dtype = spec.lists[index].dtype;
                let width = dtype.len_bytes();
                let mut bytes = zeroed_bytes(part.numel() * width)?;
                let at = part.place_in(spec.extents[index]) as usize;
                backend.read(lists[index].buffer.as_ref(), at * width, &mut bytes)?;
                Ok::<_, PlanError>(Some((dtype, bytes)))
            };
            let Some((dtype, mut bytes)) = read(Role::Param)? else {
                continue;
            };
            if let Some(factor) = wanted[which].factor {
                Beside::read(read)?.average(dtype, factor, &mut bytes);
            }
            memory.bytes_mut()[next..next + bytes.len()].copy_from_slice(&bytes);
            next += bytes.len();
        }
    }
    params.buffers.push(GatheredBuffer { dtype: spec.param_dtype(), calls: block.calls, memory });
    Ok(())
}

/// Makes a call on bytes of a device's buffer where they lie.
pub(crate) fn on_device(
    device: &dyn DeviceBackend,
    comms: &mut Comms<'_>,
    buffer: &mut Box<dyn Buffer>,
    range: Range<usize>,
    kind: CallKind,
) -> Result<()> {
    device.hand_over(buffer.as_mut())?;
    comms.on_device(buffer, range, kind)?;
    Ok(device.take_back(buffer.as_mut())?)
}

/// Makes a call on bytes of a buffer where they lie, or on a copy of a device's where calls are
/// made in host memory.
pub(crate) fn in_place(
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    buffer: &mut dyn Buffer,
    range: Range<usize>,
    call: impl FnOnce(&mut Comms<'_>, Bytes<'_>) -> Result<(), CollectiveError>,
) -> Result<()> {
    if comms.takes(backend, buffer) {
        device::hand_over(backend, buffer)?;
        if let Some(bytes) = Bytes::of(buffer, range.clone()) {
            call(comms, bytes)?;
            return Ok(device::take_back(backend, buffer)?);
        }
    }
    let mut staged = zeroed_bytes(range.len())?;
    backend.read(buffer, range.start, &mut staged)?;
    call(comms, Bytes::Host(&mut staged))?;
    Ok(backend.write(buffer, range.start, &staged)?)
}

//! Average of parameters across ranks.

use bytemuck::{cast_slice, cast_slice_mut};
use fusestep_coalesce::HostMemory;
use fusestep_collective::{Operation, ReduceOp};
use fusestep_elementwise::coded::{
    CodedError, CodedState, Coding, Dither, GROUP, decode, encode, units_of,
};
use fusestep_launch::{Backend, BackendError};
use fusestep_simd::{join_bf16, join_bf16_24, split_bf16, split_bf16_24};
use fusestep_tensor::{DType, Role};

use crate::error::{PlanError, Result};
use crate::plan::settings::{Averaged, Interval, LocalSgd};
use crate::run::comms::calls::Comms;
use crate::run::masters;
use crate::run::memory::absorb::narrowed;
use crate::run::memory::state::State;
use crate::run::memory::storage::StorageState;
use crate::run::run::Run;
use crate::run::stages::gather::in_place;

pub(crate) fn average_now(run: &mut Run<'_, '_>) -> Result<()> {
    run.state.since_average = 0;
    let Some(rule) = run.plan.averaging().filter(|_| run.plan.topology.world > 1) else {
        return Ok(());
    };
    masters::follow_views(run.state);
    run.state.params_version += 1;
    let with_state = rule.averaged == Averaged::ParamsAndState;
    let done = average_lists(run, with_state);
    run.state.or_poison(done)
}

/// Averages parameters across ranks, if an average is due; returns whether it has.
pub(crate) fn average_if_due(run: &mut Run<'_, '_>) -> Result<bool> {
    let Some(rule) = run.plan.averaging() else {
        return Ok(false);
    };
    let adapts = rule.interval == Interval::Adaptive;
    if adapts && run.state.adapting.first.is_none() {
        let loss = mean_loss(run.state, run.comms)?;
        run.state.adapting.first = Some((loss, run.state.lr()));
    }
    let now = LocalSgd { every: run.state.adapting.every.unwrap_or(rule.every), ..rule };
    run.state.since_average += 1;
    // Skipped steps count, for other ranks may have taken theirs.
    let taken = run.state.step() + run.state.skipped();
    if !now.due(taken, run.state.since_average) {
        return Ok(false);
    }
    average_now(run)?;
    if adapts && let Some((first_loss, first_lr)) = run.state.adapting.first {
        let loss = mean_loss(run.state, run.comms)?;
        let adapted = rule.adapted(first_loss, loss, first_lr, run.state.lr());
        run.state.adapting.every = Some(adapted.every);
    }
    run.state.adapting.loss = None;
    Ok(true)
}

/// Averages every list that [`LocalSgd`] asks for. Of a parameter with a 32-bit value that
/// value is averaged, and the 16-bit one is derived from it: a mean of rounded values would
/// forget what masters and residuals keep.
fn average_lists(run: &mut Run<'_, '_>, with_state: bool) -> Result<()> {
    for (storage, spec) in run.plan.storages.iter().enumerate() {
        if spec.distributed || spec.members.is_empty() {
            continue;
        }
        let own = &mut run.state.storages[storage];
        let list = |role| spec.list(role);
        match (list(Role::Param), list(Role::Master), list(Role::Remainder)) {
            (Some(param), Some(master), _) => {
                average_list(own, run.backend, run.comms, master)?;
                let masters = bytes_of(own, run.backend, master)?;
                let mut params = HostMemory::zeroed(own.lists[param].buffer.len_bytes())?;
                round_masters(spec.param_dtype(), masters.bytes(), params.bytes_mut());
                write_all(own, run.backend, param, params.bytes())?;
            }
            (Some(param), None, Some(residual)) => {
                average_split(own, run.backend, run.comms, param, residual)?
            }
            (Some(param), None, None) => average_list(own, run.backend, run.comms, param)?,
            (None, ..) => {}
        }
        if with_state {
            average_state(run, storage)?;
        }
    }
    Ok(())
}

/// Averages the state of a storage: values, and of codes what they read as, which is coded again.
fn average_state(run: &mut Run<'_, '_>, storage: usize) -> Result<()> {
    let spec = &run.plan.storages[storage];
    let kept = [Role::Master, Role::Remainder];
    for (index, list) in spec.lists.iter().enumerate() {
        let is_units = list.role.unit_of().is_some();
        if !list.role.is_state() || kept.contains(&list.role) || is_units {
            continue;
        }
        let units = list.role.units().and_then(|units| spec.list(units));
        match (Coding::of(list.role), units) {
            (Some(coding), Some(units)) => average_coded(run, storage, coding, [index, units])?,
            _ => average_list(&mut run.state.storages[storage], run.backend, run.comms, index)?,
        }
    }
    Ok(())
}

/// Averages what codes read as, and codes it again, rounded to nearest: no step dithers it.
fn average_coded(
    run: &mut Run<'_, '_>,
    storage: usize,
    coding: Coding,
    [codes, units]: [usize; 2],
) -> Result<()> {
    let spec = &run.plan.storages[storage];
    let steps: Vec<u64> = run.state.steps().collect();
    let own = &mut run.state.storages[storage];
    let mut of_elements = bytes_of(own, run.backend, codes)?;
    let mut of_groups = bytes_of(own, run.backend, units)?;
    let numel = of_elements.bytes().len();
    let mut values = HostMemory::zeroed(numel * size_of::<f32>())?;
    let groups = cast_slice::<u8, f32>(of_groups.bytes());
    let read: &mut [f32] = cast_slice_mut(values.bytes_mut());
    decode(coding, of_elements.bytes(), &groups[..units_of(numel)], read).map_err(unlike)?;
    let operation = Operation::AllReduce(ReduceOp::Average);
    run.comms.in_place(operation, DType::F32, None, values.bytes_mut())?;
    let means: &[f32] = cast_slice(values.bytes());
    let groups: &mut [f32] = cast_slice_mut(of_groups.bytes_mut());
    // Tensor by tensor, since padding stays zero.
    for (tensor, &member) in spec.members.iter().enumerate() {
        let range = spec.layout.range(tensor);
        let elements = range.start as usize..range.end as usize;
        let means = &means[elements.clone()];
        let own_groups = elements.start / GROUP..elements.start / GROUP + units_of(means.len());
        let codes = &mut of_elements.bytes_mut()[elements];
        let units = &mut groups[own_groups];
        // State begins with zeros, and a root of 0 has the code 1.
        if steps[member as usize] == 0 && means.iter().all(|mean| *mean == 0.0) {
            codes.fill(0);
            units.fill(0.0);
            continue;
        }
        encode(coding, means, CodedState { codes, units }, &Dither::NEAREST).map_err(unlike)?;
    }
    let own = &mut run.state.storages[storage];
    write_all(own, run.backend, codes, of_elements.bytes())?;
    write_all(own, run.backend, units, of_groups.bytes())
}

/// The error of lists that do not go together, which no plan has.
fn unlike(error: CodedError) -> PlanError {
    PlanError::Backend(BackendError::Unavailable { backend: "average", reason: error.to_string() })
}

/// All bytes of a list, in memory of the host.
fn bytes_of(storage: &StorageState, backend: &dyn Backend, list: usize) -> Result<HostMemory> {
    let buffer = storage.lists[list].buffer.as_ref();
    let mut bytes = HostMemory::zeroed(buffer.len_bytes())?;
    backend.read(buffer, 0, bytes.bytes_mut())?;
    Ok(bytes)
}

fn write_all(
    storage: &mut StorageState,
    backend: &dyn Backend,
    list: usize,
    bytes: &[u8],
) -> Result<()> {
    Ok(backend.write(storage.lists[list].buffer.as_mut(), 0, bytes)?)
}

/// Averages an arena in place.
fn average_list(
    storage: &mut StorageState,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    list: usize,
) -> Result<()> {
    let dtype = storage.lists[list].dtype();
    let buffer = storage.lists[list].buffer.as_mut();
    let all = 0..buffer.len_bytes();
    in_place(backend, comms, buffer, all, |comms, bytes| {
        comms.in_place(Operation::AllReduce(ReduceOp::Average), dtype, None, bytes)
    })
}

/// Averages 32-bit values that are kept as bf16 parameters and the bits these lack, in two lists.
fn average_split(
    storage: &mut StorageState,
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    param: usize,
    residual: usize,
) -> Result<()> {
    let mut high = bytes_of(storage, backend, param)?;
    let mut low = bytes_of(storage, backend, residual)?;
    let of_8_bits = storage.lists[residual].dtype() == DType::U8;
    let params = high.bytes().as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair));
    let mut values: Vec<f32> = if of_8_bits {
        let pairs = params.zip(low.bytes());
        pairs.map(|(high, low)| join_bf16_24(high, *low as i8)).collect()
    } else {
        let pairs = params.zip(low.bytes().as_chunks::<2>().0);
        pairs.map(|(high, low)| join_bf16(high, u16::from_le_bytes(*low))).collect()
    };
    let operation = Operation::AllReduce(ReduceOp::Average);
    let bytes = bytemuck::cast_slice_mut::<f32, u8>(&mut values);
    comms.in_place(operation, DType::F32, None, bytes)?;
    let highs = high.bytes_mut().as_chunks_mut::<2>().0.iter_mut();
    let lows = low.bytes_mut().chunks_exact_mut(if of_8_bits { 1 } else { 2 });
    for ((high, low), value) in highs.zip(lows).zip(values) {
        let param = if of_8_bits {
            let (param, remainder) = split_bf16_24(value);
            low.copy_from_slice(&remainder.to_le_bytes());
            param
        } else {
            let (param, remainder) = split_bf16(value);
            low.copy_from_slice(&remainder.to_le_bytes());
            param
        };
        *high = param.to_le_bytes();
    }
    write_all(storage, backend, param, high.bytes())?;
    write_all(storage, backend, residual, low.bytes())
}

/// 16-bit parameters from their masters, rounded to nearest even.
fn round_masters(dtype: DType, masters: &[u8], params: &mut [u8]) {
    let masters = masters.as_chunks::<4>().0.iter();
    for (param, master) in params.as_chunks_mut::<2>().0.iter_mut().zip(masters) {
        *param = narrowed(dtype, f32::from_le_bytes(*master)).to_le_bytes();
    }
}

/// The mean of all ranks' losses; NaN if a rank has none.
fn mean_loss(state: &State, comms: &mut Comms<'_>) -> Result<f64> {
    let mut loss = [state.adapting.loss.unwrap_or(f64::NAN)];
    let operation = Operation::AllReduce(ReduceOp::Average);
    comms.in_place(operation, DType::F64, None, bytemuck::cast_slice_mut::<f64, u8>(&mut loss))?;
    Ok(loss[0])
}

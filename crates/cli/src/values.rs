//! Parameters as bytes, as candle's variables, and as descriptors for a plan.

use anyhow::bail;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, Var};
use fusestep::Session;
use fusestep_models::Task;
use fusestep_planner::{GatheredParams, PlanError};
use fusestep_tensor::{ParamDesc, Shape};
use half::slice::HalfFloatSliceExt;
use xxhash_rust::xxh3::Xxh3;

/// The descriptors of a model's parameters, for a plan.
pub(crate) fn descs(
    task: &dyn Task,
    dtype: fusestep_tensor::DType,
) -> anyhow::Result<Vec<ParamDesc>> {
    let descs = task.shapes().into_iter().map(|(name, dims)| {
        let dims: Vec<u64> = dims.into_iter().map(|dim| dim as u64).collect();
        Ok(ParamDesc::new(name, Shape::new(dims)?, dtype))
    });
    descs.collect()
}

/// xxh3 of all parameters in name order; all ranks must call it together.
///
/// # Errors
/// Calls that fail.
pub(crate) fn params_hash(session: &mut Session<'_>) -> Result<String, PlanError> {
    let params = session.plan().params().iter();
    let mut names: Vec<String> = params.map(|param| param.name.clone()).collect();
    names.sort_unstable();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let gathered = session.gather(&names)?;
    let mut hasher = Xxh3::new();
    for at in 0..names.len() {
        hasher.update(gathered.bytes(at));
    }
    Ok(format!("{:016x}", hasher.digest()))
}

/// The element type as candle has it.
pub(crate) fn candle_dtype(dtype: fusestep_tensor::DType) -> DType {
    match dtype {
        fusestep_tensor::DType::F64 => DType::F64,
        fusestep_tensor::DType::F16 => DType::F16,
        fusestep_tensor::DType::BF16 => DType::BF16,
        _ => DType::F32,
    }
}

/// Variables with these values.
pub(crate) fn vars_of(
    params: &[ParamDesc],
    values: &GatheredParams,
) -> candle_core::Result<Vec<Var>> {
    let vars = params.iter().enumerate().map(|(at, param)| {
        let dims: Vec<usize> = param.shape.dims().iter().map(|&dim| dim as usize).collect();
        let dtype = candle_dtype(param.dtype);
        let bytes = values.bytes(at);
        Var::from_tensor(&Tensor::from_raw_buffer(bytes, dtype, &dims, &Device::Cpu)?)
    });
    vars.collect()
}

/// Shows a tensor's elements as they lie in memory; a tensor with gaps is copied first.
pub(crate) fn with_bytes<R>(
    tensor: &Tensor,
    see: impl FnOnce(&[u8]) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let own = layout.start_offset()..layout.start_offset() + tensor.elem_count();
    let Storage::Cpu(storage) = &*storage else {
        bail!("expected a tensor on the cpu, found one on another device")
    };
    match storage {
        CpuStorage::F32(all) => see(bytemuck::cast_slice(&all[own])),
        CpuStorage::F64(all) => see(bytemuck::cast_slice(&all[own])),
        CpuStorage::F16(all) => see(bytemuck::cast_slice(all[own].reinterpret_cast())),
        CpuStorage::BF16(all) => see(bytemuck::cast_slice(all[own].reinterpret_cast())),
        _ => bail!("expected floating point, found {:?}", tensor.dtype()),
    }
}

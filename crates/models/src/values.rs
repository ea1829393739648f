//! Parameters as bytes and as candle's variables.

use candle_core::{DType, Device, Storage, Tensor, Var};
use fusestep_tensor::ParamDesc;
use half::slice::HalfFloatSliceExt;

/// Variables with these values: `bytes` gives those of each parameter, by its position.
///
/// # Errors
/// Those of candle: bytes of another number than a parameter's.
pub fn vars_of<'a>(
    params: &[ParamDesc],
    bytes: impl Fn(usize) -> &'a [u8],
) -> candle_core::Result<Vec<Var>> {
    let vars = params.iter().enumerate().map(|(at, param)| {
        let dims: Vec<usize> = param.shape.dims().iter().map(|&dim| dim as usize).collect();
        let dtype = match param.dtype {
            fusestep_tensor::DType::F64 => DType::F64,
            fusestep_tensor::DType::F16 => DType::F16,
            fusestep_tensor::DType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        let bytes = bytes(at);
        Var::from_tensor(&Tensor::from_raw_buffer(bytes, dtype, &dims, &Device::Cpu)?)
    });
    vars.collect()
}

/// Shows a tensor's elements as they lie in memory; one that has gaps is copied first.
///
/// # Errors
/// That of `see`; candle's if the tensor is not floating point or lies on a device.
pub fn bytes_of<R>(
    tensor: &Tensor,
    see: impl FnOnce(&[u8]) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let elements = layout.start_offset()..layout.start_offset() + tensor.elem_count();
    let Storage::Cpu(storage) = &*storage else {
        anyhow::bail!("expected a tensor on the cpu, found one on another device")
    };
    match storage {
        candle_core::CpuStorage::F32(all) => see(bytemuck::cast_slice(&all[elements])),
        candle_core::CpuStorage::F64(all) => see(bytemuck::cast_slice(&all[elements])),
        candle_core::CpuStorage::F16(all) => {
            see(bytemuck::cast_slice(all[elements].reinterpret_cast()))
        }
        candle_core::CpuStorage::BF16(all) => {
            see(bytemuck::cast_slice(all[elements].reinterpret_cast()))
        }
        _ => anyhow::bail!(
            "expected f32, f64, f16 or bf16 elements, found {:?}",
            tensor.dtype()
        ),
    }
}

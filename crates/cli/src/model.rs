//! The example model: a perceptron with two hidden layers, in candle.

use candle_core::{D, DType, Device, Tensor, Var};
use fusestep_planner::GatheredParams;
use fusestep_tensor::{ParamDesc, Shape};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::digits::{CLASSES, Images, PIXELS};

/// Inputs and outputs of the layers.
const LAYERS: [usize; 4] = [PIXELS, 128, 64, CLASSES];

/// A bias and a weight for each layer, in this order.
pub(crate) struct Mlp {
    vars: Vec<Var>,
}

impl Mlp {
    /// A model whose first values follow from `seed` alone, not from the framework's generator.
    /// Parameters are rounded to `dtype` and kept in it; arithmetic is f32.
    pub(crate) fn new(seed: u64, dtype: DType) -> candle_core::Result<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut vars = Vec::new();
        for pair in LAYERS.windows(2) {
            let (inputs, outputs) = (pair[0], pair[1]);
            // He et al. 2015, uniform: keeps the variance through layers of rectifiers.
            let bound = (6.0 / inputs as f32).sqrt();
            let values: Vec<f32> = (0..inputs * outputs)
                .map(|_| (rng.random::<f32>() * 2.0 - 1.0) * bound)
                .collect();
            let weight = Tensor::from_vec(values, (outputs, inputs), &Device::Cpu)?;
            vars.push(Var::zeros(outputs, dtype, &Device::Cpu)?);
            vars.push(Var::from_tensor(&weight.to_dtype(dtype)?)?);
        }
        Ok(Self { vars })
    }

    /// The model whose parameters have these values.
    pub(crate) fn of(params: &[ParamDesc], values: &GatheredParams) -> candle_core::Result<Self> {
        let vars = params.iter().enumerate().map(|(at, param)| {
            let dims: Vec<usize> = param.shape.dims().iter().map(|&dim| dim as usize).collect();
            let dtype = match param.dtype {
                fusestep_tensor::DType::F64 => DType::F64,
                fusestep_tensor::DType::F16 => DType::F16,
                fusestep_tensor::DType::BF16 => DType::BF16,
                _ => DType::F32,
            };
            let bytes = values.bytes(at);
            Var::from_tensor(&Tensor::from_raw_buffer(bytes, dtype, &dims, &Device::Cpu)?)
        });
        let vars = vars.collect::<candle_core::Result<_>>()?;
        Ok(Self { vars })
    }

    /// What a plan has to know of the parameters, in their order.
    pub(crate) fn descs(dtype: fusestep_tensor::DType) -> anyhow::Result<Vec<ParamDesc>> {
        let mut descs = Vec::new();
        for (index, pair) in LAYERS.windows(2).enumerate() {
            let (inputs, outputs) = (pair[0] as u64, pair[1] as u64);
            let bias = Shape::new([outputs])?;
            let weight = Shape::new([outputs, inputs])?;
            descs.push(ParamDesc::new(format!("layer{index}.bias"), bias, dtype));
            descs.push(ParamDesc::new(
                format!("layer{index}.weight"),
                weight,
                dtype,
            ));
        }
        Ok(descs)
    }

    /// The parameters.
    pub(crate) fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// The logits of a batch of images.
    fn forward(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = images.clone();
        for (index, layer) in self.vars.chunks(2).enumerate() {
            let (bias, weight) = (
                layer[0].to_dtype(DType::F32)?,
                layer[1].to_dtype(DType::F32)?,
            );
            x = x.matmul(&weight.t()?)?.broadcast_add(&bias)?;
            if 2 * (index + 1) < self.vars.len() {
                x = x.relu()?;
            }
        }
        Ok(x)
    }

    /// The mean cross-entropy of a batch.
    pub(crate) fn loss(&self, images: &Images) -> candle_core::Result<Tensor> {
        let (pixels, labels) = tensors(images)?;
        candle_nn::loss::cross_entropy(&self.forward(&pixels)?, &labels)
    }

    /// The share of images whose most likely digit is the right one.
    pub(crate) fn accuracy(&self, images: &Images) -> candle_core::Result<f64> {
        let (pixels, labels) = tensors(images)?;
        let found = self.forward(&pixels)?.argmax(D::Minus1)?;
        let right = found.eq(&labels)?.to_dtype(DType::F32)?;
        Ok(f64::from(right.mean_all()?.to_scalar::<f32>()?))
    }
}

fn tensors(images: &Images) -> candle_core::Result<(Tensor, Tensor)> {
    let pixels = Tensor::from_slice(&images.pixels, (images.len(), PIXELS), &Device::Cpu)?;
    let labels = Tensor::from_slice(&images.labels, images.len(), &Device::Cpu)?;
    Ok((pixels, labels))
}

/// A tensor's elements as they lie in memory.
pub(crate) fn bytes_of(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        DType::F64 => bytemuck::cast_slice(&flat.to_vec1::<f64>()?).to_vec(),
        DType::F16 => bytemuck::cast_slice(&flat.to_vec1::<f16>()?).to_vec(),
        DType::BF16 => bytemuck::cast_slice(&flat.to_vec1::<bf16>()?).to_vec(),
        _ => bytemuck::cast_slice(&flat.to_vec1::<f32>()?).to_vec(),
    })
}

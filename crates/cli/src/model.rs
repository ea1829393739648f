//! The example model: a perceptron with two hidden layers, in candle.

use candle_core::{D, DType, Device, Tensor, Var};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::digits::{CLASSES, Images, PIXELS};

/// Inputs and outputs of the layers.
pub(crate) const LAYERS: [usize; 4] = [PIXELS, 128, 64, CLASSES];

/// Layers of weights and biases.
pub(crate) struct Mlp {
    layers: Vec<(Var, Var)>,
}

impl Mlp {
    /// A model whose first values follow from `seed` alone, not from the framework's generator.
    /// Parameters are rounded to `dtype` and kept in it; arithmetic is f32.
    pub(crate) fn new(seed: u64, dtype: DType) -> candle_core::Result<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut layers = Vec::new();
        for pair in LAYERS.windows(2) {
            let (inputs, outputs) = (pair[0], pair[1]);
            // He et al. 2015, uniform: keeps the variance through layers of rectifiers.
            let bound = (6.0 / inputs as f32).sqrt();
            let values: Vec<f32> = (0..inputs * outputs)
                .map(|_| (rng.random::<f32>() * 2.0 - 1.0) * bound)
                .collect();
            let weight = Tensor::from_vec(values, (outputs, inputs), &Device::Cpu)?;
            let weight = Var::from_tensor(&weight.to_dtype(dtype)?)?;
            let bias = Var::zeros(outputs, dtype, &Device::Cpu)?;
            layers.push((weight, bias));
        }
        Ok(Self { layers })
    }

    /// The parameters with their names.
    pub(crate) fn parameters(&self) -> Vec<(String, Var)> {
        let layers = self.layers.iter().enumerate();
        let named = layers.flat_map(|(index, (weight, bias))| {
            [
                (format!("layer{index}.bias"), bias.clone()),
                (format!("layer{index}.weight"), weight.clone()),
            ]
        });
        named.collect()
    }

    /// The logits of a batch of images.
    fn forward(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = images.clone();
        for (index, (weight, bias)) in self.layers.iter().enumerate() {
            let (weight, bias) = (weight.to_dtype(DType::F32)?, bias.to_dtype(DType::F32)?);
            x = x.matmul(&weight.t()?)?.broadcast_add(&bias)?;
            if index + 1 < self.layers.len() {
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

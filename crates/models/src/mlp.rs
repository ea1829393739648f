//! A perceptron with two hidden layers.

use candle_core::{D, DType, Device, Tensor, Var};
use fusestep_tensor::{ParamDesc, Shape};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Tested;
use crate::digits::{CLASSES, Images, PIXELS};

/// Inputs and outputs of the layers.
const LAYERS: [usize; 4] = [PIXELS, 128, 64, CLASSES];

/// A perceptron with two hidden layers; a bias and a weight for each layer, in this order.
#[derive(Clone, Debug)]
pub struct Mlp {
    vars: Vec<Var>,
}

impl Mlp {
    /// A model whose first values follow from `seed` alone, not from the framework's generator.
    /// Parameters are rounded to `dtype` and kept in it; arithmetic is f32.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(seed: u64, dtype: DType) -> candle_core::Result<Self> {
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

    /// The model of these parameters.
    pub fn with_vars(vars: Vec<Var>) -> Self {
        Self { vars }
    }

    /// What a plan has to know of the parameters, in their order.
    ///
    /// # Errors
    /// None that this model can meet.
    pub fn params(dtype: fusestep_tensor::DType) -> anyhow::Result<Vec<ParamDesc>> {
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
    pub fn vars(&self) -> &[Var] {
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
    ///
    /// # Errors
    /// Those of candle.
    pub fn loss(&self, images: &Images) -> candle_core::Result<Tensor> {
        let (pixels, labels) = tensors(images)?;
        candle_nn::loss::cross_entropy(&self.forward(&pixels)?, &labels)
    }

    /// The mean cross-entropy, and the share of images whose most likely digit is the right one.
    ///
    /// # Errors
    /// Those of candle.
    pub fn test(&self, images: &Images) -> candle_core::Result<Tested> {
        let (pixels, labels) = tensors(images)?;
        let logits = self.forward(&pixels)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &labels)?;
        let right = logits.argmax(D::Minus1)?.eq(&labels)?;
        let right = right.to_dtype(DType::F32)?.mean_all()?;
        Ok(Tested {
            loss: f64::from(loss.to_scalar::<f32>()?),
            accuracy: f64::from(right.to_scalar::<f32>()?),
        })
    }
}

fn tensors(images: &Images) -> candle_core::Result<(Tensor, Tensor)> {
    let pixels = Tensor::from_slice(&images.pixels, (images.len(), PIXELS), &Device::Cpu)?;
    let labels = Tensor::from_slice(&images.labels, images.len(), &Device::Cpu)?;
    Ok((pixels, labels))
}

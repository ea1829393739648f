//! The model of the digits: a perceptron with two hidden layers.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Tested;
use crate::images::{CLASSES, Images, PIXELS};

/// Inputs and outputs of the layers.
const LAYERS: [usize; 4] = [PIXELS, 128, 64, CLASSES];

/// The names and extents of the variables: a bias and a weight for each layer, in this order.
pub(crate) fn shapes() -> Vec<(String, Vec<usize>)> {
    let layers = LAYERS.windows(2).enumerate();
    let of_layer = layers.flat_map(|(index, pair)| {
        [
            (format!("layer{index}.bias"), vec![pair[1]]),
            (format!("layer{index}.weight"), vec![pair[1], pair[0]]),
        ]
    });
    of_layer.collect()
}

/// First values.
pub(crate) fn start(seed: u64, dtype: DType) -> Result<Vec<Var>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut vars = Vec::new();
    for pair in LAYERS.windows(2) {
        let (inputs, outputs) = (pair[0], pair[1]);
        // He et al. 2015, uniform: keeps the variance through layers of rectifiers.
        let bound = (6.0 / inputs as f32).sqrt();
        let values: Vec<f32> =
            (0..inputs * outputs).map(|_| (rng.random::<f32>() * 2.0 - 1.0) * bound).collect();
        let weight = Tensor::from_vec(values, (outputs, inputs), &Device::Cpu)?;
        vars.push(Var::zeros(outputs, dtype, &Device::Cpu)?);
        vars.push(Var::from_tensor(&weight.to_dtype(dtype)?)?);
    }
    Ok(vars)
}

/// The logits of a batch of images.
fn forward(vars: &[Var], images: &Tensor) -> Result<Tensor> {
    let mut x = images.clone();
    for (index, layer) in vars.chunks(2).enumerate() {
        let (bias, weight) = (layer[0].to_dtype(DType::F32)?, layer[1].to_dtype(DType::F32)?);
        x = x.matmul(&weight.t()?)?.broadcast_add(&bias)?;
        if 2 * (index + 1) < vars.len() {
            x = x.relu()?;
        }
    }
    Ok(x)
}

/// The mean cross-entropy of a batch.
pub(crate) fn loss(vars: &[Var], images: &Images) -> Result<Tensor> {
    let (pixels, labels) = tensors(images)?;
    candle_nn::loss::cross_entropy(&forward(vars, &pixels)?, &labels)
}

/// The mean cross-entropy, and the share of images whose most likely digit is the right one.
pub(crate) fn test(vars: &[Var], images: &Images) -> Result<Tested> {
    let (pixels, labels) = tensors(images)?;
    let logits = forward(vars, &pixels)?;
    let loss = candle_nn::loss::cross_entropy(&logits, &labels)?;
    let right = logits.argmax(D::Minus1)?.eq(&labels)?;
    let right = right.to_dtype(DType::F32)?.mean_all()?;
    Ok(Tested {
        loss: f64::from(loss.to_scalar::<f32>()?),
        accuracy: f64::from(right.to_scalar::<f32>()?),
    })
}

fn tensors(images: &Images) -> Result<(Tensor, Tensor)> {
    let pixels = Tensor::from_slice(&images.pixels, (images.len(), PIXELS), &Device::Cpu)?;
    let labels = Tensor::from_slice(&images.labels, images.len(), &Device::Cpu)?;
    Ok((pixels, labels))
}

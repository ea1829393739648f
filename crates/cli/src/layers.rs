//! The example model layer by layer: each layer's parameters are asked for just before they are used, and dropped after.

use candle_core::{D, DType, Device, Tensor, Var};

use crate::digits::{Images, PIXELS};
use crate::model::LAYERS;

/// A layer's weight and bias.
pub(crate) type Layer = (Tensor, Tensor);

/// Where parameters come from and gradients go.
pub(crate) trait Ranked {
    /// The parameters of a layer, for as long as they are needed.
    fn layer(&mut self, index: usize) -> anyhow::Result<Layer>;

    /// Says that parameters of [`Self::layer`] have been dropped.
    fn released(&mut self, index: usize);

    /// Takes the gradients of a layer.
    fn gradients(&mut self, index: usize, weight: &Tensor, bias: &Tensor) -> anyhow::Result<()>;
}

/// Number of layers.
pub(crate) const COUNT: usize = LAYERS.len() - 1;

/// The names of a layer's bias and weight.
pub(crate) fn names(index: usize) -> [String; 2] {
    [format!("layer{index}.bias"), format!("layer{index}.weight")]
}

fn apply(index: usize, x: &Tensor, weight: &Tensor, bias: &Tensor) -> candle_core::Result<Tensor> {
    let (weight, bias) = (weight.to_dtype(DType::F32)?, bias.to_dtype(DType::F32)?);
    let y = x.matmul(&weight.t()?)?.broadcast_add(&bias)?;
    if index + 1 < COUNT { y.relu() } else { Ok(y) }
}

/// The inputs of all layers and the logits.
fn forward(ranked: &mut dyn Ranked, images: &Images) -> anyhow::Result<Vec<Tensor>> {
    let pixels = Tensor::from_slice(&images.pixels, (images.len(), PIXELS), &Device::Cpu)?;
    let mut values = vec![pixels];
    for index in 0..COUNT {
        let (weight, bias) = ranked.layer(index)?;
        let y = apply(index, &values[index], &weight, &bias)?;
        drop((weight, bias));
        ranked.released(index);
        values.push(y);
    }
    Ok(values)
}

/// One forward and backward pass over a rank's images; returns their mean loss, and gives the gradients of `scale` times it, last
/// layer first. A rank without images still asks for every layer as often as the others, and gives no gradients.
pub(crate) fn loss_and_gradients(
    ranked: &mut dyn Ranked,
    images: &Images,
    scale: f64,
) -> anyhow::Result<f64> {
    if images.len() == 0 {
        for index in (0..COUNT).chain((0..COUNT).rev()) {
            drop(ranked.layer(index)?);
            ranked.released(index);
        }
        return Ok(0.0);
    }
    let values = forward(ranked, images)?;
    let labels = Tensor::from_slice(&images.labels, images.len(), &Device::Cpu)?;
    let logits = Var::from_tensor(&values[COUNT])?;
    let loss = candle_nn::loss::cross_entropy(&logits, &labels)?;
    let grads = (&loss * scale)?.backward()?;
    let mut grad = grads.get(&logits).cloned();
    for index in (0..COUNT).rev() {
        let (weight, bias) = ranked.layer(index)?;
        let x = Var::from_tensor(&values[index])?;
        let (weight, bias) = (Var::from_tensor(&weight)?, Var::from_tensor(&bias)?);
        let Some(above) = grad else { break };
        // The gradient of Σ y·g is that of y times g, to the bit: the factor of each y is g itself.
        let y = apply(index, &x, &weight, &bias)?;
        let grads = (y * above)?.sum_all()?.backward()?;
        grad = grads.get(&x).cloned();
        if let (Some(w), Some(b)) = (grads.get(&weight), grads.get(&bias)) {
            ranked.gradients(index, w, b)?;
        }
        drop((weight, bias, grads));
        ranked.released(index);
    }
    Ok(f64::from(loss.to_scalar::<f32>()?))
}

/// The share of images whose most likely digit is the right one.
pub(crate) fn accuracy(ranked: &mut dyn Ranked, images: &Images) -> anyhow::Result<f64> {
    let values = forward(ranked, images)?;
    let labels = Tensor::from_slice(&images.labels, images.len(), &Device::Cpu)?;
    let found = values[COUNT].argmax(D::Minus1)?;
    let right = found.eq(&labels)?.to_dtype(DType::F32)?;
    Ok(f64::from(right.mean_all()?.to_scalar::<f32>()?))
}

//! The example model layer by layer: each layer's parameters are asked for while the one before is computed, and dropped after use.

use anyhow::Context;
use candle_core::{D, DType, Device, Tensor, Var};

use crate::digits::{Images, PIXELS};
use crate::model::LAYERS;

/// A layer's weight and bias.
pub(crate) type Layer = (Tensor, Tensor);

/// Where parameters come from and gradients go.
pub(crate) trait Ranked {
    /// Says that a layer is the next one to be used, so that its parameters can come meanwhile. All ranks ask in one order.
    fn ask(&mut self, index: usize) -> anyhow::Result<()>;

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

/// The inputs of all layers and the logits; `then` is the layer used next.
fn forward(
    ranked: &mut dyn Ranked,
    images: &Images,
    then: Option<usize>,
) -> anyhow::Result<Vec<Tensor>> {
    let pixels = Tensor::from_slice(&images.pixels, (images.len(), PIXELS), &Device::Cpu)?;
    let mut values = vec![pixels];
    for index in 0..COUNT {
        let (weight, bias) = ranked.layer(index)?;
        let next = if index + 1 < COUNT {
            Some(index + 1)
        } else {
            then
        };
        next.map_or(Ok(()), |next| ranked.ask(next))?;
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
        let order: Vec<usize> = (0..COUNT).chain((0..COUNT).rev()).collect();
        for (at, &index) in order.iter().enumerate() {
            let layer = ranked.layer(index)?;
            order.get(at + 1).map_or(Ok(()), |&next| ranked.ask(next))?;
            drop(layer);
            ranked.released(index);
        }
        return Ok(0.0);
    }
    let values = forward(ranked, images, Some(COUNT - 1))?;
    let labels = Tensor::from_slice(&images.labels, images.len(), &Device::Cpu)?;
    let logits = Var::from_tensor(&values[COUNT])?;
    let loss = candle_nn::loss::cross_entropy(&logits, &labels)?;
    let grads = (&loss * scale)?.backward()?;
    let mut grad = grads.get(&logits).cloned();
    for index in (0..COUNT).rev() {
        let (weight, bias) = ranked.layer(index)?;
        if index > 0 {
            ranked.ask(index - 1)?;
        }
        let x = Var::from_tensor(&values[index])?;
        let (weight, bias) = (Var::from_tensor(&weight)?, Var::from_tensor(&bias)?);
        // Going on without would leave the other ranks waiting for this one's part of the layers below.
        let above = grad.with_context(|| {
            format!("layer{index}: expected a gradient of its outputs, found none")
        })?;
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
    let values = forward(ranked, images, None)?;
    let labels = Tensor::from_slice(&images.labels, images.len(), &Device::Cpu)?;
    let found = values[COUNT].argmax(D::Minus1)?;
    let right = found.eq(&labels)?.to_dtype(DType::F32)?;
    Ok(f64::from(right.mean_all()?.to_scalar::<f32>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts layers that are whole, and writes down who does what.
    #[derive(Default)]
    struct Counting {
        ahead: Option<usize>,
        used: Option<usize>,
        most: usize,
        log: Vec<String>,
    }

    impl Counting {
        fn note(&mut self, what: &str, index: usize) {
            self.most = self
                .most
                .max(usize::from(self.ahead.is_some()) + usize::from(self.used.is_some()));
            self.log.push(format!("{what}{index}"));
        }
    }

    impl Ranked for Counting {
        fn ask(&mut self, index: usize) -> anyhow::Result<()> {
            assert_eq!(
                self.ahead.replace(index),
                None,
                "two layers asked for at once"
            );
            self.note("ask", index);
            Ok(())
        }

        fn layer(&mut self, index: usize) -> anyhow::Result<Layer> {
            assert_eq!(self.ahead.take().unwrap_or(index), index, "another layer");
            assert_eq!(self.used.replace(index), None, "two layers in use");
            self.note("use", index);
            let (inputs, outputs) = (LAYERS[index], LAYERS[index + 1]);
            let tensor = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
            Ok((tensor(&[outputs, inputs])?, tensor(&[outputs])?))
        }

        fn released(&mut self, index: usize) {
            assert_eq!(self.used.take(), Some(index));
            self.note("drop", index);
        }

        fn gradients(&mut self, index: usize, _: &Tensor, _: &Tensor) -> anyhow::Result<()> {
            self.note("give", index);
            Ok(())
        }
    }

    #[test]
    fn a_layer_is_asked_for_while_the_one_before_is_in_use_and_no_more_than_two_are_whole() {
        let (train, _) = crate::digits::load(1).unwrap();
        let mut with = Counting::default();
        loss_and_gradients(&mut with, &train.select(&[0, 1]), 1.0).unwrap();
        assert_eq!((with.most, with.ahead, with.used), (2, None, None));
        let text = with.log.join(" ");
        assert_eq!(
            text,
            "use0 ask1 drop0 use1 ask2 drop1 use2 ask2 drop2 use2 ask1 give2 drop2 use1 ask0 give1 drop1 use0 give0 drop0"
        );
        let mut without = Counting::default();
        loss_and_gradients(&mut without, &train.select(&[]), 1.0).unwrap();
        let calls = |log: &[String]| -> Vec<String> {
            let kept = log.iter().filter(|entry| !entry.starts_with("give"));
            kept.cloned().collect()
        };
        assert_eq!(calls(&with.log), calls(&without.log), "calls in one order");
        let mut scored = Counting::default();
        accuracy(&mut scored, &train.select(&[0])).unwrap();
        assert_eq!(
            scored.log.join(" "),
            "use0 ask1 drop0 use1 ask2 drop1 use2 drop2"
        );
    }
}

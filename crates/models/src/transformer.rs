//! A small decoder-only transformer.

use candle_core::{D, DType, Device, Result, Tensor, Var, bail};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Width of feed-forward layers, in widths of the model.
const EXPANSION: usize = 4;
/// Variables of a layer.
const OF_LAYER: usize = 8;
/// Number of variables before the layers, and behind them.
const AROUND: [usize; 2] = [2, 2];
/// Summand to the mean square in a norm.
const EPS: f64 = 1e-6;

/// A decoder-only transformer of these sizes, whose variables the caller keeps. Layers of causal
/// attention and a feed-forward network, each behind an RMS norm; learned positions; a squared
/// ReLU; no biases (Vaswani et al. 2017, arXiv:1706.03762; Zhang & Sennrich 2019, arXiv:1910.07467;
/// So et al. 2021, arXiv:2109.08668).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transformer {
    /// Layers of attention and feed-forward network.
    pub layers: usize,
    /// Elements of a position between layers; a multiple of `heads`.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Most positions of a sequence.
    pub context: usize,
    /// Distinct tokens.
    pub vocabulary: usize,
}

/// 4 layers of width 256 with 4 heads, 64 positions, and the 65 characters of the text: 3,197,696
/// elements.
impl Default for Transformer {
    fn default() -> Self {
        Self { layers: 4, width: 256, heads: 4, context: 64, vocabulary: 65 }
    }
}

impl Transformer {
    /// Checks the sizes.
    ///
    /// # Errors
    /// An error that names a size that is 0 or larger than 65,536, or a width that is no multiple
    /// of the heads.
    pub fn validate(&self) -> Result<()> {
        const MOST: usize = 65_536;
        let (width, heads) = (self.width, self.heads);
        for (what, found) in [
            ("layers", self.layers),
            ("width", width),
            ("heads", heads),
            ("context", self.context),
            ("vocabulary", self.vocabulary),
        ] {
            if !(1..=MOST).contains(&found) {
                bail!("{what}: expected a number from 1 to {MOST}, found {found}");
            }
        }
        if !width.is_multiple_of(heads) {
            bail!("width: expected a multiple of the {heads} heads, found {width}");
        }
        Ok(())
    }

    /// Names and extents of the variables in their order. Matrices are `[inputs, outputs]`, so that
    /// their gradients are products without gaps.
    pub fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (width, wide) = (self.width, EXPANSION * self.width);
        let mut shapes = vec![
            ("tokens".to_owned(), vec![self.vocabulary, width]),
            ("positions".to_owned(), vec![self.context, width]),
        ];
        for layer in 0..self.layers {
            let of_layer: [(&str, Vec<usize>); OF_LAYER] = [
                ("attention.norm", vec![width]),
                ("attention.query", vec![width, width]),
                ("attention.key", vec![width, width]),
                ("attention.value", vec![width, width]),
                ("attention.out", vec![width, width]),
                ("feed_forward.norm", vec![width]),
                ("feed_forward.up", vec![width, wide]),
                ("feed_forward.down", vec![wide, width]),
            ];
            let named = of_layer.map(|(name, shape)| (format!("layers.{layer}.{name}"), shape));
            shapes.extend(named);
        }
        shapes.push(("norm".to_owned(), vec![width]));
        shapes.push(("head".to_owned(), vec![width, self.vocabulary]));
        shapes
    }

    /// First values of all variables, which follow from `seed` alone, rounded to `dtype`.
    ///
    /// # Errors
    /// Those of [`Transformer::validate`] and of candle.
    pub fn start(&self, seed: u64, dtype: DType) -> Result<Vec<Var>> {
        self.validate()?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut vars = Vec::new();
        for (name, dims) in self.shapes() {
            let numel: usize = dims.iter().product();
            // Uniform values of this standard deviation; gains are 1.
            let bound = deviation(&name, dims[0], self.layers) * 3f32.sqrt();
            let mut draw = || (rng.random::<f32>() * 2.0 - 1.0) * bound;
            let values: Vec<f32> = match dims.len() {
                1 => vec![1.0; numel],
                _ => (0..numel).map(|_| draw()).collect(),
            };
            let tensor = Tensor::from_vec(values, dims, &Device::Cpu)?;
            vars.push(Var::from_tensor(&tensor.to_dtype(dtype)?)?);
        }
        Ok(vars)
    }

    /// The logits of every next token at each position, before the softmax, in f32.
    ///
    /// # Shapes
    /// Tokens are u32, `[batch, length]`; logits `[batch·length, vocabulary]`.
    ///
    /// # Errors
    /// Sequences longer than the context; variables that are not those of [`Transformer::shapes`].
    pub fn logits(&self, vars: &[Var], tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.dims2()?;
        let (width, context) = (self.width, self.context);
        if length > context {
            bail!("tokens: expected at most {context} positions, found {length}");
        }
        let expected = AROUND[0] + OF_LAYER * self.layers + AROUND[1];
        if vars.len() != expected {
            bail!("expected {expected} variables, found {}", vars.len());
        }
        let vars = vars.iter().map(|var| var.to_dtype(DType::F32));
        let vars = vars.collect::<Result<Vec<Tensor>>>()?;
        let (before, layers) = vars.split_at(AROUND[0]);
        let (layers, behind) = layers.split_at(layers.len() - AROUND[1]);
        let x = before[0].index_select(&tokens.flatten_all()?, 0)?;
        let positions = before[1].narrow(0, 0, length)?;
        let x = x.reshape((batch, length, width))?.broadcast_add(&positions)?;
        let mut x = x.reshape((batch * length, width))?;
        let unseen = unseen(length)?;
        for layer in layers.chunks(OF_LAYER) {
            let normed = norm(&x, &layer[0])?;
            x = (&x + self.attention(&normed, &layer[1..5], batch, length, &unseen)?)?;
            let hidden = norm(&x, &layer[5])?.matmul(&layer[6])?.relu()?.sqr()?;
            x = (&x + hidden.matmul(&layer[7])?)?;
        }
        norm(&x, &behind[0])?.matmul(&behind[1])
    }

    /// softmax(Q·Kᵀ/√(width/heads))·V of each head, over positions up to the query's own.
    fn attention(
        &self,
        x: &Tensor,
        vars: &[Tensor],
        batch: usize,
        length: usize,
        unseen: &Tensor,
    ) -> Result<Tensor> {
        let of_head = self.width / self.heads;
        let heads = |var: &Tensor| {
            let split = x.matmul(var)?.reshape((batch, length, self.heads, of_head))?;
            split.transpose(1, 2)?.contiguous()
        };
        let scale = 1.0 / (of_head as f64).sqrt();
        let query = (heads(&vars[0])? * scale)?;
        let scores = query.matmul(&heads(&vars[1])?.t()?)?.broadcast_add(unseen)?;
        let mixed = softmax(&scores)?.matmul(&heads(&vars[2])?)?;
        let together = mixed.transpose(1, 2)?.reshape((batch * length, self.width))?;
        together.matmul(&vars[3])
    }

    /// The mean cross-entropy of the next tokens, in nats.
    ///
    /// # Shapes
    /// Tokens and the tokens that follow them are u32, `[batch, length]`.
    ///
    /// # Errors
    /// Those of [`Transformer::logits`].
    pub fn loss(&self, vars: &[Var], tokens: &Tensor, next: &Tensor) -> Result<Tensor> {
        candle_nn::loss::cross_entropy(&self.logits(vars, tokens)?, &next.flatten_all()?)
    }

    /// Continues a sequence of at least one token, and draws each next token by its likelihood.
    ///
    /// # Errors
    /// Those of [`Transformer::logits`].
    pub fn generate(
        &self,
        vars: &[Var],
        start: &[u32],
        more: usize,
        rng: &mut impl Rng,
    ) -> Result<Vec<u32>> {
        let mut tokens = start.to_vec();
        for _ in 0..more {
            let seen = &tokens[tokens.len().saturating_sub(self.context)..];
            let input = Tensor::from_slice(seen, (1, seen.len()), &Device::Cpu)?;
            let last = self.logits(vars, &input)?.get(seen.len() - 1)?;
            let likely = softmax(&last)?.to_vec1::<f32>()?;
            let mut left = rng.random::<f32>();
            let drawn = likely.iter().position(|share| {
                left -= share;
                left < 0.0
            });
            tokens.push(drawn.unwrap_or(likely.len() - 1) as u32);
        }
        Ok(tokens)
    }
}

/// The standard deviation of a variable's first values. Matrices keep the variance of their inputs.
/// Matrices whose products are added to the stream of all layers are smaller, the more layers there
/// are (Radford et al. 2019).
fn deviation(name: &str, inputs: usize, layers: usize) -> f32 {
    if matches!(name, "tokens" | "positions" | "head") {
        return 0.02;
    }
    let into_stream = name.ends_with(".out") || name.ends_with(".down");
    let share = if into_stream { 2 * layers } else { 1 };
    1.0 / ((inputs * share) as f32).sqrt()
}

/// yᵢⱼ = xᵢⱼ·gainⱼ / √(meanⱼ xᵢⱼ² + 1e-6).
fn norm(x: &Tensor, gain: &Tensor) -> Result<Tensor> {
    let root = (x.sqr()?.mean_keepdim(D::Minus1)? + EPS)?.sqrt()?;
    x.broadcast_div(&root)?.broadcast_mul(gain)
}

/// pᵢⱼ = exp(sᵢⱼ − mᵢ) / Σₖ exp(sᵢₖ − mᵢ), where mᵢ is the largest score of row i. The result does
/// not depend on mᵢ, so the gradient need not pass through it.
fn softmax(scores: &Tensor) -> Result<Tensor> {
    let most = scores.max_keepdim(D::Minus1)?.detach();
    let exp = scores.broadcast_sub(&most)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// The mask that hides later positions: −∞ above the diagonal, else 0.
fn unseen(length: usize) -> Result<Tensor> {
    let score = |at: usize| {
        if at % length > at / length { f32::NEG_INFINITY } else { 0.0 }
    };
    let scores: Vec<f32> = (0..length * length).map(score).collect();
    Tensor::from_vec(scores, (length, length), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: Transformer =
        Transformer { layers: 2, width: 8, heads: 2, context: 5, vocabulary: 7 };

    fn tokens(tokens: &[u32]) -> Tensor {
        Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu).unwrap()
    }

    #[test]
    fn a_position_sees_those_before_it_and_none_behind() {
        let vars = TINY.start(3, DType::F32).unwrap();
        let logits = |seen: &[u32]| {
            let logits = TINY.logits(&vars, &tokens(seen)).unwrap();
            logits.to_vec2::<f32>().unwrap()
        };
        let (one, other) = (logits(&[1, 2, 3, 4, 5]), logits(&[1, 2, 6, 4, 5]));
        for at in 0..5 {
            assert_eq!(one[at] == other[at], at < 2, "{at}");
        }
    }

    #[test]
    fn gradients_are_those_of_differences() {
        let vars = TINY.start(3, DType::F32).unwrap();
        let (seen, next) = (tokens(&[1, 2, 3, 4, 0]), tokens(&[2, 3, 4, 0, 6]));
        let loss = |vars: &[Var]| TINY.loss(vars, &seen, &next).unwrap();
        let grads = loss(&vars).backward().unwrap();
        for (at, (var, (name, _))) in vars.iter().zip(TINY.shapes()).enumerate() {
            let grad = grads.get(var).unwrap().sqr().unwrap().sum_all().unwrap();
            let slope = f64::from(grad.to_scalar::<f32>().unwrap());
            // A small step along the gradient changes the loss by its squared norm.
            let moved = |by: f64| {
                let step = (grads.get(var).unwrap() * by).unwrap();
                let mut vars = vars.clone();
                vars[at] = Var::from_tensor(&(var.as_tensor() + step).unwrap()).unwrap();
                f64::from(loss(&vars).to_scalar::<f32>().unwrap())
            };
            let by = 0.002 / slope.sqrt();
            let found = (moved(by) - moved(-by)) / (2.0 * by);
            assert!((found / slope - 1.0).abs() < 0.02, "{name}: {found} {slope}");
        }
    }

    #[test]
    fn sizes_that_make_no_model_are_refused() {
        let refused = |model: Transformer| model.start(1, DType::F32).unwrap_err().to_string();
        let error = refused(Transformer { heads: 3, ..TINY });
        assert!(error.contains("multiple of the 3 heads, found 8"), "{error}");
        let error = refused(Transformer { layers: 0, ..TINY });
        assert!(error.contains("layers: expected a number from 1"), "{error}");
        let vars = TINY.start(1, DType::F32).unwrap();
        let error = TINY.logits(&vars, &tokens(&[0; 6])).unwrap_err();
        assert!(error.to_string().contains("at most 5 positions, found 6"));
        assert!(TINY.logits(&vars[1..], &tokens(&[0])).is_err());
    }
}

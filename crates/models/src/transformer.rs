//! A small decoder-only transformer.

use candle_core::{D, DType, Device, Result, Tensor, Var, bail};
use fusestep_tensor::{ParamDesc, Shape};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::ops::{Heads, apart, causal_softmax, rms_norm, squared_relu, together};

/// Feed-forward layers are this many times as wide as the model.
const EXPANSION: usize = 4;
/// Variables of a layer.
const OF_LAYER: usize = 8;
/// Variables before the layers.
const BEFORE: usize = 2;

/// Sizes of a [`Transformer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransformerConfig {
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

/// 4 layers of width 256 with 4 heads, 128 positions, and the 65 characters of the text: 3,214,080
/// elements.
impl Default for TransformerConfig {
    fn default() -> Self {
        Self {
            layers: 4,
            width: 256,
            heads: 4,
            context: 128,
            vocabulary: 65,
        }
    }
}

impl TransformerConfig {
    /// Checks the sizes.
    ///
    /// # Errors
    /// A size that is 0, larger than 65,536, or no multiple of the heads; it is named.
    pub fn validate(&self) -> Result<()> {
        const MOST: usize = 65_536;
        for (what, found) in [
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("context", self.context),
            ("vocabulary", self.vocabulary),
        ] {
            if !(1..=MOST).contains(&found) {
                bail!("{what}: expected a number from 1 to {MOST}, found {found}");
            }
        }
        if !self.width.is_multiple_of(self.heads) {
            bail!(
                "width: expected a multiple of the {} heads, found {}",
                self.heads,
                self.width
            );
        }
        Ok(())
    }

    /// Names and extents of the variables in their order. Matrices are `[inputs, outputs]`, so that
    /// products give their gradients without gaps.
    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
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

    /// What a plan has to know of the parameters, in their order.
    ///
    /// # Errors
    /// Sizes as [`TransformerConfig::validate`] refuses them.
    pub fn params(&self, dtype: fusestep_tensor::DType) -> anyhow::Result<Vec<ParamDesc>> {
        self.validate()?;
        let descs = self.shapes().into_iter().map(|(name, dims)| {
            let shape = Shape::new(dims.iter().map(|&dim| dim as u64).collect::<Vec<_>>())?;
            Ok(ParamDesc::new(name, shape, dtype))
        });
        descs.collect()
    }
}

/// A decoder-only transformer; see the [crate's page](crate).
#[derive(Clone, Debug)]
pub struct Transformer {
    config: TransformerConfig,
    vars: Vec<Var>,
}

impl Transformer {
    /// A model whose first values follow from `seed` alone. Parameters are rounded to `dtype` and
    /// kept in it; arithmetic is f64 for f64 parameters, else f32.
    ///
    /// # Errors
    /// As [`TransformerConfig::validate`]; those of candle.
    pub fn new(config: TransformerConfig, seed: u64, dtype: DType) -> Result<Self> {
        config.validate()?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut vars = Vec::new();
        for (name, dims) in config.shapes() {
            let numel: usize = dims.iter().product();
            let deviation = deviation(&name, &dims, config.layers);
            // Uniform values of this standard deviation; gains are 1.
            let bound = deviation * 3f64.sqrt();
            let values: Vec<f64> = (0..numel)
                .map(|_| match dims.len() {
                    1 => 1.0,
                    _ => (rng.random::<f64>() * 2.0 - 1.0) * bound,
                })
                .collect();
            let tensor = Tensor::from_vec(values, dims, &Device::Cpu)?;
            vars.push(Var::from_tensor(&tensor.to_dtype(dtype)?)?);
        }
        Ok(Self { config, vars })
    }

    /// The model of these parameters, in the order of [`TransformerConfig::params`].
    ///
    /// # Errors
    /// As [`TransformerConfig::validate`]; parameters of other shapes, named.
    pub fn with_vars(config: TransformerConfig, vars: Vec<Var>) -> Result<Self> {
        config.validate()?;
        let shapes = config.shapes();
        if shapes.len() != vars.len() {
            bail!("expected {} variables, found {}", shapes.len(), vars.len());
        }
        for ((name, dims), var) in shapes.iter().zip(&vars) {
            if var.dims() != dims {
                bail!("`{name}`: expected {dims:?}, found {:?}", var.dims());
            }
        }
        Ok(Self { config, vars })
    }

    /// The sizes.
    pub fn config(&self) -> TransformerConfig {
        self.config
    }

    /// The parameters.
    pub fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// The parameters with their names.
    pub fn named_vars(&self) -> impl Iterator<Item = (String, Var)> {
        let names = self.config.shapes().into_iter().map(|(name, _)| name);
        names.zip(self.vars.iter().cloned())
    }

    /// For each position how likely each next token is, before the softmax.
    ///
    /// # Shapes
    /// Tokens are u32, `[batch, length]`; logits `[batch·length, vocabulary]`.
    ///
    /// # Errors
    /// Sequences longer than the context; those of candle.
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.dims2()?;
        let TransformerConfig {
            width,
            heads,
            context,
            ..
        } = self.config;
        if length > context {
            bail!("tokens: expected at most {context} positions, found {length}");
        }
        let heads = Heads {
            batch,
            length,
            heads,
            width: width / heads,
        };
        let vars = self.vars.iter().map(|var| computed(var));
        let vars = vars.collect::<Result<Vec<Tensor>>>()?;
        let (before, layers) = vars.split_at(BEFORE);
        let (layers, after) = layers.split_at(OF_LAYER * self.config.layers);
        let x = before[0].index_select(&tokens.flatten_all()?, 0)?;
        let x = x.reshape((batch, length, width))?;
        let positions = before[1].narrow(0, 0, length)?;
        let mut x = x.broadcast_add(&positions)?.reshape((batch * length, width))?;
        for layer in layers.chunks(OF_LAYER) {
            x = (&x + attention(&rms_norm(&x, &layer[0])?, &layer[1..5], heads)?)?;
            let hidden = rms_norm(&x, &layer[5])?.matmul(&layer[6])?;
            x = (&x + squared_relu(&hidden)?.matmul(&layer[7])?)?;
        }
        rms_norm(&x, &after[0])?.matmul(&after[1])
    }

    /// The mean cross-entropy of the next tokens, in nats.
    ///
    /// # Shapes
    /// Tokens and the ones that follow them are u32, `[batch, length]`.
    ///
    /// # Errors
    /// As [`Transformer::logits`].
    pub fn loss(&self, tokens: &Tensor, next: &Tensor) -> Result<Tensor> {
        candle_nn::loss::cross_entropy(&self.logits(tokens)?, &next.flatten_all()?)
    }

    /// Goes on from some tokens, at least one, drawing each next one by its likelihood.
    ///
    /// # Errors
    /// Those of candle.
    pub fn generate(&self, start: &[u32], more: usize, rng: &mut impl Rng) -> Result<Vec<u32>> {
        let mut tokens = start.to_vec();
        for _ in 0..more {
            let seen = &tokens[tokens.len().saturating_sub(self.config.context)..];
            let input = Tensor::from_slice(seen, (1, seen.len()), &Device::Cpu)?;
            let last = self.logits(&input)?.get(seen.len() - 1)?;
            let likely = candle_nn::ops::softmax(&last.to_dtype(DType::F64)?, D::Minus1)?;
            let mut left = rng.random::<f64>();
            let likely = likely.to_vec1::<f64>()?;
            let drawn = likely.iter().position(|share| {
                left -= share;
                left < 0.0
            });
            tokens.push(drawn.unwrap_or(likely.len() - 1) as u32);
        }
        Ok(tokens)
    }
}

/// The standard deviation of a parameter's first values: matrices keep the variance of what they
/// are multiplied with, and what is added to the stream of all layers is the smaller the more
/// layers add to it (Radford et al. 2019).
fn deviation(name: &str, dims: &[usize], layers: usize) -> f64 {
    if matches!(name, "tokens" | "positions" | "head") {
        return 0.02;
    }
    let inputs = dims[0] as f64;
    let into_stream = name.ends_with(".out") || name.ends_with(".down");
    let share = if into_stream { 2.0 * layers as f64 } else { 1.0 };
    1.0 / (inputs * share).sqrt()
}

/// A variable in the type of its arithmetic.
fn computed(var: &Var) -> Result<Tensor> {
    match var.dtype() {
        DType::F32 | DType::F64 => Ok(var.as_tensor().clone()),
        _ => var.to_dtype(DType::F32),
    }
}

/// softmax(Q·Kᵀ/√width)·V of each head, of positions up to one's own.
fn attention(x: &Tensor, vars: &[Tensor], heads: Heads) -> Result<Tensor> {
    let of_heads = |var: &Tensor| apart(&x.matmul(var)?, heads);
    let (query, key, value) = (
        of_heads(&vars[0])?,
        of_heads(&vars[1])?,
        of_heads(&vars[2])?,
    );
    let scores = query.matmul(&key.t()?)?;
    let shares = causal_softmax(&scores, 1.0 / (heads.width as f64).sqrt())?;
    together(&shares.matmul(&value)?, heads)?.matmul(&vars[3])
}

//! Seeded parameters and gradients.

use fusestep_tensor::{DType, ParamDesc, Shape};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Element counts around vector, block and chunk edges.
pub const EDGE_NUMELS: [u64; 14] =
    [0, 1, 15, 16, 17, 31, 32, 33, 511, 513, 65_535, 65_536, 65_537, 0];

/// Magnitude of a case's gradients.
pub(crate) const GRAD: f64 = 0.01;

/// Kind of the gradients of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// Ordinary values near 0.01.
    Ordinary,
    /// Among ordinary values NaN, infinities, zeros, subnormals and the largest values.
    Extreme,
}

/// Parameters with seeded values and gradients.
#[derive(Clone, Debug)]
pub struct Case {
    /// The parameters.
    pub params: Vec<ParamDesc>,
    /// Kind of the gradients.
    pub gradients: Gradients,
    /// Seed of everything random in the case.
    pub seed: u64,
    /// Steps to run.
    pub steps: u64,
}

/// Kind of a tensor's values.
struct Values {
    /// Number of the random stream.
    stream: u64,
    /// Largest of ordinary values.
    scale: f64,
    gradients: Gradients,
    dtype: DType,
}

impl Case {
    /// One parameter of `dtype` for each element count, named by position.
    pub fn new(numels: impl IntoIterator<Item = u64>, dtype: DType) -> Self {
        let params = numels.into_iter().enumerate().map(|(index, numel)| {
            let shape = Shape::new([numel]).expect("a count is a valid shape");
            ParamDesc::new(format!("tensor.{index}"), shape, dtype)
        });
        Self { params: params.collect(), gradients: Gradients::Ordinary, seed: 7, steps: 3 }
    }

    /// This case with other gradients.
    pub fn with_gradients(mut self, gradients: Gradients) -> Self {
        self.gradients = gradients;
        self
    }

    /// This case with every third parameter at half the learning rate and every fifth without
    /// weight decay.
    pub fn with_groups(mut self) -> Self {
        for (index, param) in self.params.iter_mut().enumerate() {
            if index % 3 == 1 {
                param.lr_scale = 0.5;
            }
            if index % 5 == 2 {
                param.weight_decay = Some(0.0);
            }
        }
        self
    }

    /// A parameter's first value, as bytes of its dtype.
    pub fn param_bytes(&self, index: usize) -> Vec<u8> {
        let dtype = self.params[index].dtype;
        self.values(index, Values { stream: 0, scale: 0.1, gradients: Gradients::Ordinary, dtype })
    }

    /// A parameter's gradient of one step, as bytes of its dtype.
    pub fn grad_bytes(&self, index: usize, step: u64) -> Vec<u8> {
        self.grad_bytes_as(index, step, self.params[index].dtype)
    }

    /// A parameter's gradient of one step, as bytes of any dtype of numbers.
    pub fn grad_bytes_as(&self, index: usize, step: u64, dtype: DType) -> Vec<u8> {
        let gradients = self.gradients;
        self.values(index, Values { stream: step + 1, scale: 0.01, gradients, dtype })
    }

    fn values(&self, index: usize, of: Values) -> Vec<u8> {
        let Values { stream, scale, gradients, dtype } = of;
        let mut rng =
            ChaCha8Rng::seed_from_u64(self.seed ^ ((index as u64) << 20) ^ (stream << 50));
        let param = &self.params[index];
        let mut bytes = Vec::with_capacity(param.numel() as usize * dtype.len_bytes());
        for _ in 0..param.numel() {
            let ordinary = (rng.random::<f64>() * 2.0 - 1.0) * scale;
            let value = match (gradients, rng.random_range(0..16u32)) {
                (Gradients::Extreme, 0) => f64::NAN,
                (Gradients::Extreme, 1) => f64::INFINITY,
                (Gradients::Extreme, 2) => f64::NEG_INFINITY,
                (Gradients::Extreme, 3) => -0.0,
                (Gradients::Extreme, 4) => f64::from(f32::from_bits(3)),
                (Gradients::Extreme, 5) => f64::from(f32::MAX),
                (Gradients::Extreme, 6) => 1e-30,
                _ => ordinary,
            };
            match dtype {
                DType::F32 => bytes.extend_from_slice(&(value as f32).to_le_bytes()),
                DType::F64 => bytes.extend_from_slice(&value.to_le_bytes()),
                DType::F16 => bytes.extend_from_slice(&f16::from_f64(value).to_le_bytes()),
                DType::BF16 => bytes.extend_from_slice(&bf16::from_f64(value).to_le_bytes()),
                other => panic!("cases are made of floating-point numbers, not {other}"),
            }
        }
        bytes
    }
}

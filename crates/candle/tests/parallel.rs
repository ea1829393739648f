//! Layers split over ranks, against one rank that has everything.

#[path = "parallel/cross_entropy.rs"]
mod cross_entropy;
#[path = "parallel/errors.rs"]
mod errors;
#[path = "parallel/layers.rs"]
mod layers;
#[path = "parallel/operations.rs"]
mod operations;
#[path = "parallel/training.rs"]
mod training;

use candle_core::{DType, Device, Tensor, Var};
use fusestep_candle::parallel::Group;
use fusestep_collective::{Options, run_ranks};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What each rank of a group of threads returns.
fn on_ranks<T: Send>(
    world: usize,
    body: impl Fn(&Group) -> candle_core::Result<T> + Sync,
) -> Vec<T> {
    let outcomes = run_ranks(world, &Options::default(), |comm| body(&Group::new(comm)));
    let outcomes = outcomes.unwrap().into_iter();
    outcomes.map(|rank| rank.unwrap().unwrap()).collect()
}

/// Small integers, whose sums and products are exact in any order and any dtype.
fn integers(dims: &[usize], seed: u64, dtype: DType) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let numel = dims.iter().product();
    let values: Vec<f32> = (0..numel).map(|_| rng.random_range(-3i32..=3) as f32).collect();
    let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

/// Numbers within ±`bound`.
fn noise(dims: &[usize], seed: u64, bound: f64) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let numel = dims.iter().product();
    let values: Vec<f64> = (0..numel).map(|_| (rng.random::<f64>() * 2.0 - 1.0) * bound).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

fn var(tensor: &Tensor) -> Var {
    Var::from_tensor(&tensor.force_contiguous().unwrap()).unwrap()
}

/// Exact for every dtype there is.
fn f64s(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.flatten_all().unwrap();
    flat.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    f64s(tensor).into_iter().map(f64::to_bits).collect()
}

/// The inner product, as a tensor that has gradients.
fn dot(a: &Tensor, b: &Tensor) -> Tensor {
    a.mul(b).unwrap().sum_all().unwrap()
}

/// The largest difference, relative to the largest value.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |max, value| max.max(value.abs()));
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f64::max) / largest.max(f64::MIN_POSITIVE)
}

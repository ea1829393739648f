//! An optimizer on many ranks and its checkpoints: the bits of one process, wherever laws promise
//! them.

#[path = "ranks/checkpoints.rs"]
mod checkpoints;
#[path = "ranks/errors.rs"]
mod errors;
#[path = "ranks/kills.rs"]
mod kills;
#[path = "ranks/laws.rs"]
mod laws;
#[path = "ranks/settings/mod.rs"]
mod settings;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use fusestep_candle::{Communicator, Fused, Options, Params};
use fusestep_collective::run_ranks;

/// Name and shape of each variable: edges of chunks, a scalar, one without elements.
const VARS: [(&str, &[usize]); 7] = [
    ("body.0.bias", &[17]),
    ("body.0.weight", &[17, 33]),
    ("body.1.bias", &[1]),
    ("body.1.weight", &[3, 0]),
    ("embedding.weight", &[257, 256]),
    ("head.bias", &[]),
    ("head.weight", &[40, 9]),
];

/// A number that depends on the key alone: a multiple of 1/64 within ±0.5, so that sums and means
/// over ranks and micro-steps that are powers of two are exact in any order.
fn exact(key: [u64; 3]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for part in key {
        x = (x ^ part.wrapping_mul(0xbf58_476d_1ce4_e5b9)).rotate_left(29);
        x = (x ^ (x >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
    }
    ((x >> 40) % 65) as f32 / 64.0 - 0.5
}

fn tensor(shape: &[usize], dtype: DType, value: impl Fn(u64) -> f32) -> Tensor {
    let numel = shape.iter().product::<usize>() as u64;
    let values: Vec<f32> = (0..numel).map(value).collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

/// Variables of their own for one rank; those of different seeds differ.
fn vars(dtype: DType, seed: u64) -> Vec<(String, Var)> {
    let var = |(index, (name, shape)): (usize, &(&str, &[usize]))| {
        let first = tensor(shape, dtype, |at| exact([seed, index as u64, at]));
        ((*name).to_owned(), Var::from_tensor(&first).unwrap())
    };
    VARS.iter().enumerate().map(var).collect()
}

/// Gradients of one part of a global batch, of which there are 8 in each step; whoever has several
/// gives their mean.
fn gradients(vars: &[(String, Var)], step: u64, parts: std::ops::Range<u64>) -> GradStore {
    let mut store = GradStore::default();
    let count = (parts.end - parts.start) as f32;
    for (index, (_, var)) in vars.iter().enumerate() {
        let grad = tensor(var.dims(), var.dtype(), |at| {
            let of = |part| exact([1000 + 8 * step + part, index as u64, at]);
            parts.clone().map(of).sum::<f32>() / count
        });
        store.insert(var, grad);
    }
    store
}

/// All bits of a tensor.
fn bits(tensor: &Tensor) -> Vec<u64> {
    let flat = tensor.flatten_all().unwrap();
    let wide = flat.to_dtype(DType::F64).unwrap();
    let values: Vec<f64> = wide.to_vec1().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

fn all_bits(vars: &[(String, Var)]) -> Vec<Vec<u64>> {
    vars.iter().map(|(_, var)| bits(var.as_tensor())).collect()
}

/// How a run is shared out.
#[derive(Clone, Copy, Debug)]
struct Shared {
    world: usize,
    zero: u8,
    /// Micro-steps of an update.
    micro: u32,
}

/// Steps `steps` of one rank, each with its part of the batch.
fn step_ranked<P: Params>(
    ranked: &mut Fused<'_, P>,
    shared: Shared,
    steps: std::ops::Range<u64>,
) -> candle_core::Result<()> {
    let rank = ranked.communicator().rank() as u64;
    let (world, micro) = (shared.world as u64, u64::from(shared.micro));
    let own = 8 / world / micro;
    let named: Vec<(String, Var)> =
        ranked.variables().map(|(name, var)| (name.to_owned(), var.clone())).collect();
    for step in steps {
        for at in 0..micro {
            let first = (at * world + rank) * own;
            ranked.step(&gradients(&named, step, first..first + own))?;
        }
    }
    Ok(())
}

/// Steps `steps` of one optimizer in one process, which has the whole batch.
fn step_whole<P: Params>(
    fused: &mut Fused<'_, P>,
    vars: &[(String, Var)],
    steps: std::ops::Range<u64>,
) -> candle_core::Result<()> {
    for step in steps {
        fused.step(&gradients(vars, step, 0..8))?;
    }
    Ok(())
}

/// These options for that many micro-steps and that stage.
fn sharing(options: &Options, shared: Shared) -> Options {
    Options { zero: shared.zero, accumulate: shared.micro, ..options.clone() }
}

/// What every rank returns.
fn on_ranks<R: Send>(world: usize, body: impl Fn(&mut dyn Communicator) -> R + Sync) -> Vec<R> {
    let options = fusestep_collective::Options::default();
    let outcomes = run_ranks(world, &options, |mut comm| body(&mut comm)).unwrap();
    outcomes
        .into_iter()
        .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}

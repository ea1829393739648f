//! Variables on a CUDA device: a model trained there with each step's bits held to the host's, and
//! the time of a step beside candle's AdamW on the shapes of models.
//!
//! `cargo run --release -p fusestep-candle --features cuda --example device [SHAPES.json...]`

use std::collections::HashMap;
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::AdamW;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Layers of the model that is trained.
const WIDTHS: [usize; 4] = [64, 1024, 1024, 10];

/// Examples of a batch.
const BATCH: usize = 256;

/// Rounds of which the median is told.
const ROUNDS: usize = 11;

fn params() -> ParamsAdamW {
    ParamsAdamW { lr: 1e-3, ..ParamsAdamW::default() }
}

fn random(shape: &[usize], scale: f32, rng: &mut ChaCha8Rng, device: &Device) -> Result<Tensor> {
    let numel = shape.iter().product();
    let values: Vec<f32> = (0..numel).map(|_| (rng.random::<f32>() - 0.5) * scale).collect();
    Tensor::from_vec(values, shape, device)
}

/// A weight and a bias for each layer.
fn model(device: &Device) -> Result<Vec<(String, Var)>> {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut vars = Vec::new();
    for (layer, pair) in WIDTHS.windows(2).enumerate() {
        let scale = 2.0 / (pair[0] as f32).sqrt();
        let weight = random(&[pair[0], pair[1]], scale, &mut rng, device)?;
        let bias = random(&[pair[1]], 0.1, &mut rng, device)?;
        vars.push((format!("{layer}.weight"), Var::from_tensor(&weight)?));
        vars.push((format!("{layer}.bias"), Var::from_tensor(&bias)?));
    }
    Ok(vars)
}

fn loss(vars: &[(String, Var)], x: &Tensor, classes: &Tensor) -> Result<Tensor> {
    let mut x = x.clone();
    for (layer, pair) in vars.chunks(2).enumerate() {
        if layer > 0 {
            x = x.relu()?;
        }
        x = x.matmul(&pair[0].1)?.broadcast_add(&pair[1].1)?;
    }
    candle_nn::loss::cross_entropy(&x, classes)
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let values: Vec<f32> = tensor.flatten_all()?.to_device(&Device::Cpu)?.to_vec1()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// Trains on the device; after every step the host takes the same one with the device's gradients,
/// and all variables must have the same bits.
fn train(device: &Device) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let x = random(&[BATCH, WIDTHS[0]], 2.0, &mut rng, device)?;
    let classes: Vec<u32> = (0..BATCH).map(|_| rng.random_range(0..10)).collect();
    let classes = Tensor::from_vec(classes, BATCH, device)?;
    let (there, here) = (model(device)?, model(&Device::Cpu)?);
    let mut on_device = AdamW::new(there.clone(), params())?;
    let mut on_host = AdamW::new(here.clone(), params())?;
    let mut losses = Vec::new();
    for step in 1..=50 {
        let loss = loss(&there, &x, &classes)?;
        losses.push(loss.to_scalar::<f32>()?);
        let grads = loss.backward()?;
        let mut copies = GradStore::default();
        for ((_, from), (_, to)) in there.iter().zip(&here) {
            let grad = grads.get(from).expect("every variable is reached");
            copies.insert(to, grad.to_device(&Device::Cpu)?);
        }
        on_device.step(&grads)?;
        on_host.step(&copies)?;
        for ((name, there), (_, here)) in there.iter().zip(&here) {
            assert!(bits(there)? == bits(here)?, "step {step}, `{name}`");
        }
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!(
        "trained 50 steps on {device:?}: loss {first:.4} -> {last:.4}, the host's bits in all"
    );
    assert!(last < 0.1 * first, "the loss did not fall");
    assert_eq!(on_device.report().copied_gradients, 0);
    Ok(())
}

/// Median milliseconds of a step, device included; rounds of both take turns.
fn times(
    device: &Device,
    vars: &[Vec<(String, Var)>; 2],
    grads: [&GradStore; 2],
) -> Result<[f64; 2]> {
    let plain = vars[0].iter().map(|(_, var)| var.clone()).collect();
    let mut theirs = candle_nn::AdamW::new(plain, params())?;
    let mut ours = AdamW::new(vars[1].clone(), params())?;
    let mut all = [Vec::new(), Vec::new()];
    let steps = 5;
    for round in 0..=ROUNDS {
        for (at, found) in all.iter_mut().enumerate() {
            device.synchronize()?;
            let begun = Instant::now();
            for _ in 0..steps {
                match at {
                    0 => theirs.step(grads[0])?,
                    _ => ours.step(grads[1])?,
                }
            }
            device.synchronize()?;
            // The first loads kernels.
            if round > 0 {
                found.push(begun.elapsed().as_secs_f64() * 1e3 / f64::from(steps));
            }
        }
    }
    Ok(all.map(|mut found| {
        found.sort_by(f64::total_cmp);
        found[found.len() / 2]
    }))
}

fn contest(name: &str, shapes: &[Vec<usize>], device: &Device) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut vars = [Vec::new(), Vec::new()];
    let mut grads = [GradStore::default(), GradStore::default()];
    let mut elements = 0;
    for (at, shape) in shapes.iter().enumerate() {
        let (value, grad) =
            (random(shape, 1.0, &mut rng, device)?, random(shape, 0.1, &mut rng, device)?);
        elements += value.elem_count();
        for (vars, grads) in vars.iter_mut().zip(&mut grads) {
            let var = Var::from_tensor(&value.copy()?)?;
            grads.insert(&var, grad.clone());
            vars.push((format!("v{at}"), var));
        }
    }
    let [theirs, ours] = times(device, &vars, [&grads[0], &grads[1]])?;
    println!(
        "| {name} | {} | {:.1} | {theirs:.3} | {ours:.3} | {:.1} | {:.2} |",
        shapes.len(),
        elements as f64 / 1e6,
        theirs / ours,
        28.0 * elements as f64 / ours / 1e9,
    );
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let device = Device::new_cuda(0)?;
    train(&device)?;
    println!(
        "\n| shapes | tensors | M elements | candle's AdamW, ms | ours, ms | ratio | ours, TB/s |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    contest(
        "MLP above",
        &model(&Device::Cpu)?.iter().map(|(_, var)| var.dims().to_vec()).collect::<Vec<_>>(),
        &device,
    )?;
    contest("1000x1024", &vec![vec![1024]; 1000], &device)?;
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path)?;
        let listed: Vec<HashMap<String, serde_json::Value>> = serde_json::from_str(&text)?;
        let shapes: Vec<Vec<usize>> = listed
            .iter()
            .map(|entry| serde_json::from_value(entry["shape"].clone()))
            .collect::<serde_json::Result<_>>()?;
        contest(&path, &shapes, &device)?;
    }
    Ok(())
}

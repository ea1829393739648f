//! Trains a transformer of 3.2 million elements on Shakespeare, character by character: with
//! candle's AdamW, with ours on one process, and on four ranks.
//!
//! Every step takes the same 16 windows of the text in four parts. One process adds the gradients
//! of the parts in their order, and four ranks, which have a part each, do so too: sums of floating
//! point associate in one way alone, so it is this that gives the same bits, and they are compared
//! at the end. candle's AdamW takes the 16 windows at once: its losses are close, not equal.
//!
//! `cargo run --release -p fusestep-candle --example transformer [-- STEPS]`

use std::error::Error;
use std::time::{Duration, Instant};

use candle_core::{DType, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{AdamW, Communicator, Options, Solo};
use fusestep_collective::{Collectives, run_ranks};
use fusestep_models::{Task, Text, Transformer};

const PARTS: usize = 4;
const BATCH: usize = 16;
/// Steps of which a mean loss is printed.
const SHOWN: usize = 10;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// What a training ends with.
struct Trained {
    losses: Vec<f32>,
    vars: Vec<Var>,
    whole: Duration,
    /// Time of the optimizer's calls: gradients handed over, reduced and stepped with.
    steps: Duration,
}

/// The windows of a part of a step's batch, from all over the text.
fn windows(task: &Text, step: usize, part: std::ops::Range<usize>) -> Vec<usize> {
    let at = part.map(|at| (step * BATCH + at) * 7919 % task.samples());
    at.collect()
}

fn params() -> ParamsAdamW {
    ParamsAdamW { lr: 1e-3, ..ParamsAdamW::default() }
}

/// candle's own optimizer on whole batches.
fn with_candle(task: &Text, steps: usize) -> Outcome<Trained> {
    let vars = task.start(1, DType::F32)?;
    let mut optimizer = candle_nn::AdamW::new(vars.clone(), params())?;
    let (begun, mut of_steps) = (Instant::now(), Duration::ZERO);
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = task.loss(&vars, &windows(task, step, 0..BATCH))?;
        let grads = loss.backward()?;
        let stepping = Instant::now();
        optimizer.step(&grads)?;
        of_steps += stepping.elapsed();
        losses.push(loss.to_scalar()?);
    }
    Ok(Trained { losses, vars, whole: begun.elapsed(), steps: of_steps })
}

/// Our optimizer on one rank, which has as many of the parts as ranks leave to it.
fn with_ours(task: &Text, steps: usize, comm: &mut dyn Communicator) -> Outcome<Trained> {
    let vars = task.start(1, DType::F32)?;
    let names = task.shapes().into_iter().map(|(name, _)| name);
    let named: Vec<(String, Var)> = names.zip(vars.iter().cloned()).collect();
    let (rank, world) = (comm.rank(), comm.world_size());
    let micro = PARTS / world;
    let options = Options { accumulate: micro as u32, zero: 1, ..Options::default() };
    let mut optimizer = AdamW::with_options(named, params(), &options)?.on(comm)?;
    let (begun, mut of_steps) = (Instant::now(), Duration::ZERO);
    let mut losses = Vec::new();
    for step in 0..steps {
        let mut sum = 0.0;
        for at in 0..micro {
            let of_part = BATCH / PARTS;
            let first = (at * world + rank) * of_part;
            let loss = task.loss(&vars, &windows(task, step, first..first + of_part))?;
            let grads = loss.backward()?;
            // So that the time of a step is not that of waiting for another rank's backward pass.
            optimizer.communicator().barrier()?;
            let stepping = Instant::now();
            optimizer.step(&grads)?;
            of_steps += stepping.elapsed();
            sum += loss.to_scalar::<f32>()?;
        }
        losses.push(sum / micro as f32);
    }
    Ok(Trained { losses, vars, whole: begun.elapsed(), steps: of_steps })
}

/// Four ranks, as threads.
fn on_ranks(task: &Text, steps: usize) -> Outcome<Vec<Trained>> {
    let options = fusestep_collective::Options::default();
    let outcomes = run_ranks(PARTS, &options, |mut comm| with_ours(task, steps, &mut comm))?;
    let trained = outcomes.into_iter().map(|outcome| match outcome {
        Ok(trained) => trained,
        Err(panic) => std::panic::resume_unwind(panic),
    });
    trained.collect()
}

/// All bits of the variables.
fn bits(trained: &Trained) -> Outcome<Vec<u32>> {
    let mut bits = Vec::new();
    for var in &trained.vars {
        let values = var.flatten_all()?.to_vec1::<f32>()?;
        bits.extend(values.into_iter().map(f32::to_bits));
    }
    Ok(bits)
}

fn speed(name: &str, trained: &Trained, task: &Text) {
    let tokens = trained.losses.len() * BATCH * task.tokens_of_sample();
    println!(
        "{name:<22} {:>7.0} characters a second, {:>4.1} % of the time in the optimizer",
        tokens as f64 / trained.whole.as_secs_f64(),
        100.0 * trained.steps.as_secs_f64() / trained.whole.as_secs_f64(),
    );
}

fn main() -> Outcome<()> {
    let steps = match std::env::args().nth(1) {
        Some(steps) => steps.parse()?,
        None => 60,
    };
    let task = Text::shakespeare(Transformer::default())?;
    println!("{}", task.describe());
    let candle = with_candle(&task, steps)?;
    let one = with_ours(&task, steps, &mut Solo::new())?;
    let ranks = on_ranks(&task, steps)?;
    println!("steps      candle's AdamW   ours, one process   4 ranks");
    for first in (0..steps).step_by(SHOWN) {
        let shown = first..(first + SHOWN).min(steps);
        let mean = |losses: &[f32]| losses[shown.clone()].iter().sum::<f32>() / shown.len() as f32;
        let of_ranks: f32 = ranks.iter().map(|rank| mean(&rank.losses)).sum();
        println!(
            "{:>3}..{:<4} {:>16.4} {:>19.4} {:>9.4}",
            shown.start,
            shown.end,
            mean(&candle.losses),
            mean(&one.losses),
            of_ranks / PARTS as f32,
        );
    }
    speed("candle's AdamW", &candle, &task);
    speed("ours, one process", &one, &task);
    speed("ours, 4 ranks, ZeRO 1", &ranks[0], &task);
    let bits_of_one = bits(&one)?;
    for (rank, trained) in ranks.iter().enumerate() {
        if bits(trained)? != bits_of_one {
            return Err(format!("rank {rank} has other bits than one process").into());
        }
    }
    println!(
        "{} elements have the same bits on one process and on {PARTS} ranks",
        bits_of_one.len()
    );
    Ok(())
}

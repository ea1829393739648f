//! Trains a classifier of 20,480 classes that no rank has all of, and holds it against one rank.
//!
//! Four ranks share out the batch and the classes: the features of all samples come together, each
//! rank has the logits of its classes, and the softmax goes over all of them. The classifier's
//! weight is a distributed parameter, the layer below it a shared one; LAMB and clipping take the
//! norms of whole tensors.
//!
//! `cargo run --release -p fusestep-candle --example sharded_classifier`

use std::error::Error;
use std::num::NonZeroUsize;
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Module;
use fusestep_candle::parallel::{
    ColumnInput, ColumnParallel, ColumnParallelLinear, Group, Split, sharded_cross_entropy,
};
use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_lamb::Lamb;
use fusestep_planner::{
    ClipByGlobalNorm, Comms, Distributed, FuseAllReduce, Optimizer, Plan, Planner, Run, State,
    Topology,
};
use fusestep_tensor::{ParamDesc, Role, Shape};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const WORLD: usize = 4;
const CLASSES: usize = 20_480;
const INPUTS: usize = 32;
const FEATURES: usize = 64;
const BATCH: usize = 128;
const STEPS: u64 = 60;
/// Classes that the data has samples of, all over the range.
const SEEN: usize = 64;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Numbers within ±`bound`, by seed alone.
fn noise(numel: usize, seed: u64, bound: f32) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let draw = |_| (rng.random::<f32>() * 2.0 - 1.0) * bound;
    (0..numel).map(draw).collect()
}

/// The batch of a step: points around their class's centre, and classes.
fn batch(step: u64) -> candle_core::Result<(Tensor, Tensor)> {
    let mut rng = ChaCha8Rng::seed_from_u64(1_000 + step);
    let (mut points, mut labels) = (Vec::with_capacity(BATCH * INPUTS), Vec::new());
    for _ in 0..BATCH {
        let seen = rng.random_range(0..SEEN);
        let centre = noise(INPUTS, 10_000 + seen as u64, 1.0);
        points.extend(centre.iter().map(|x| x + rng.random::<f32>() * 0.2 - 0.1));
        labels.push((seen * (CLASSES / SEEN)) as u32);
    }
    let points = Tensor::from_vec(points, (BATCH, INPUTS), &Device::Cpu)?;
    Ok((points, Tensor::new(labels, &Device::Cpu)?))
}

/// A rank's variables, their planned step, and where it keeps them.
struct Training {
    group: Group,
    backend: CpuBackend,
    plan: Plan,
    state: State,
    vars: [(&'static str, Var); 2],
    split: Split,
}

impl Training {
    fn new(group: &Group) -> Outcome<Self> {
        let split = Split::even(CLASSES, group);
        let own = split.range(group.rank());
        let whole = noise(CLASSES * FEATURES, 2, 0.05);
        let rows = &whole[own.start * FEATURES..own.end * FEATURES];
        let shared = noise(FEATURES * INPUTS, 1, 0.3);
        let var = |values: &[f32], rows: usize, columns: usize| {
            Var::from_slice(values, (rows, columns), &Device::Cpu)
        };
        let vars = [
            ("classifier.weight", var(rows, own.len(), FEATURES)?),
            ("features.weight", var(&shared, FEATURES, INPUTS)?),
        ];
        let mut params = Vec::new();
        for (name, var) in &vars {
            let dims: Vec<u64> = var.dims().iter().map(|&dim| dim as u64).collect();
            params.push(ParamDesc::new(*name, Shape::new(dims)?, fusestep_tensor::DType::F32));
        }
        let rule = Lamb { lr: 0.05, ..Lamb::default() };
        let planner = Planner::new(Optimizer::from(rule))
            .with(FuseAllReduce::of_bytes(1 << 20))
            .with(Distributed::params(["classifier.weight"]))
            .with(ClipByGlobalNorm::new(1.0));
        let topology = Topology::new(group.rank(), group.world_size())?;
        let plan = planner.plan_for(&params, topology)?;
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend)?;
        for (name, var) in &vars {
            let values: Vec<f32> = var.flatten_all()?.to_vec1()?;
            state.write(&backend, Role::Param, name, &bytes_of(&values))?;
        }
        Ok(Self { group: group.clone(), backend, plan, state, vars, split })
    }

    /// One step on this rank's part of a batch; the loss over the whole batch, and the norm of all
    /// gradients.
    fn step(&mut self, (points, labels): (&Tensor, &Tensor)) -> Outcome<(f32, f64)> {
        let group = &self.group;
        let [(_, weight), (_, below)] = &self.vars;
        let options = ColumnParallel {
            input: ColumnInput::Rows,
            split: Some(self.split.clone()),
            ..ColumnParallel::default()
        };
        let weight = weight.as_tensor().clone();
        let classifier = ColumnParallelLinear::from_slice(weight, None, &options, group)?;
        let features = points.matmul(&below.t()?)?.tanh()?;
        // The step takes the mean of the ranks' gradients, and this is their sum.
        let features = group.scale_gradient(&features, group.world_size() as f64)?;
        let logits = classifier.forward(&features)?;
        let labels = group.all_gather_labels(labels)?;
        let losses = sharded_cross_entropy(&logits, &labels, &self.split, group)?;
        let loss = losses.mean_all()?;
        let grads = loss.backward()?;
        let (plan, state, backend) = (&self.plan, &mut self.state, &self.backend);
        let vars = &self.vars;
        let report = group.with(|comm| -> Outcome<_> {
            let mut comms = Comms::direct(comm);
            let mut run = Run::of(plan, state, backend, &mut comms);
            for (name, var) in vars {
                let grad = grads.get(var).ok_or("a variable without a gradient")?;
                let grad: Vec<f32> = grad.flatten_all()?.to_vec1()?;
                run.push_grad(name, &bytes_of(&grad))?;
            }
            Ok(run.step()?)
        })?;
        for (name, var) in &self.vars {
            let values = self.state.param::<f32>(name)?;
            var.set(&Tensor::from_slice(values, var.shape(), &Device::Cpu)?)?;
        }
        let norm = report.update.and_then(|update| update.grad_norm);
        Ok((loss.to_scalar()?, norm.unwrap_or_default()))
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// What a run ends with: losses, gradient norms and the classifier's whole weight.
struct Trained {
    losses: Vec<f32>,
    norms: Vec<f64>,
    weight: Vec<f64>,
    step_ms: f64,
}

fn train(group: &Group) -> Outcome<Trained> {
    let mut training = Training::new(group)?;
    let samples = Split::even(BATCH, group).range(group.rank());
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    for step in 0..STEPS {
        let (points, labels) = batch(step)?;
        let points = points.narrow(0, samples.start, samples.len())?;
        let labels = labels.narrow(0, samples.start, samples.len())?;
        let (loss, norm) = training.step((&points, &labels))?;
        losses.push(loss);
        norms.push(norm);
    }
    let step_ms = begun.elapsed().as_secs_f64() * 1e3 / STEPS as f64;
    let weight = group.all_gather(training.vars[0].1.as_tensor(), 0)?;
    let weight = weight.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
    Ok(Trained { losses, norms, weight, step_ms })
}

/// The norm of a difference, relative to that of what is expected.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    (difference / squares(&mut expected.iter().copied())).sqrt()
}

fn main() -> Outcome<()> {
    let one = train(&Group::solo())?;
    let outcomes = run_ranks(WORLD, &Options::default(), |comm| train(&Group::new(comm)))?;
    let mut ranks = Vec::new();
    for outcome in outcomes {
        ranks.push(outcome.map_err(|_| "a rank panicked")??);
    }
    for step in (0..STEPS as usize).step_by(10).chain([STEPS as usize - 1]) {
        let (one_loss, loss) = (one.losses[step], ranks[0].losses[step]);
        println!("step {step:3}: loss {loss:8.5} on {WORLD} ranks, {one_loss:8.5} on one");
    }
    println!(
        "{:.1} ms a step on one rank, {:.1} on {WORLD}; {} of {CLASSES} classes on each",
        one.step_ms,
        ranks[0].step_ms,
        CLASSES / WORLD
    );
    let first = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert!(ranks.iter().all(|rank| first(&rank.losses) == first(&ranks[0].losses)));
    let (begin, end) = (one.losses[0], one.losses[STEPS as usize - 1]);
    assert!(end < begin / 4.0, "expected it to learn, found a loss of {begin} and then {end}");
    // Sums over samples are in another order, and products of matrices may be of other blocks.
    for (found, expected) in ranks[0].norms.iter().zip(&one.norms) {
        assert!((found / expected - 1.0).abs() < 1e-3, "norms {found} and {expected}");
    }
    let difference = distance(&ranks[0].weight, &one.weight);
    println!("weights of the classifier: {difference:.1e} apart, relative to their norm");
    assert!(difference < 1e-5);
    Ok(())
}

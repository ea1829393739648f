//! `fusestep train`: a small model learns handwritten digits with the planned optimizer.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::bail;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use clap::Args;
use fusestep_candle::{AnyRule, Fusion, Options};
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_launch::{Objective, Precision, WeightDecay};
use fusestep_planner::Optimizer as UpdateRule;
use fusestep_tensor::DType;
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::digits::{self, Images};
use crate::engine::{Engine, Watch};
use crate::gradients::GradientArgs;
use crate::model::Mlp;
use crate::options::{ParamDType, PrecisionArgs, parse_threads, threads};
use crate::output::{duration, print, print_json, write_page};
use crate::ranks::RankArgs;
use crate::report::report_page;
use crate::rules::{OptimizerArgs, Rule, warn_unmatched};
use crate::train_ranks::{self, Trained};

/// Flags of `train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Passes over the training images
    #[arg(long, default_value = "20")]
    pub(crate) epochs: NonZeroUsize,
    /// Images of one step, of all ranks together
    #[arg(long, default_value = "32")]
    pub(crate) batch: NonZeroUsize,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    #[command(flatten)]
    pub(crate) gradients: GradientArgs,
    #[command(flatten)]
    pub(crate) precision: PrecisionArgs,
    /// Number of ranks, each a thread with its part of every batch
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<NonZeroUsize>,
    /// What carries calls between ranks [default: thread]
    #[arg(long, value_enum)]
    pub(crate) engine: Option<Engine>,
    #[command(flatten)]
    pub(crate) watch: Watch,
    #[command(flatten)]
    pub(crate) rank_args: RankArgs,
    /// Element type of parameters and gradients
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) dtype: ParamDType,
    /// Decides the first parameters, the split and the order of images
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Threads of the optimizer, of all ranks together [default: all]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// One launch and one call per tensor, no pass
    #[arg(long)]
    pub(crate) naive: bool,
    /// Save parameters, optimizer state and position after every epoch
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Save after every this many batches, too, within a merge window and between averages as well
    #[arg(long, value_name = "K", requires = "checkpoint")]
    pub(crate) save_every: Option<NonZeroU64>,
    /// Go on from the checkpoint: of however many ranks, unless it was saved within a merge window or under --local-sgd
    #[arg(long, requires = "checkpoint")]
    pub(crate) resume: bool,
    /// Write a page with the curves and the plan
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct TrainSummary {
    pub(crate) epochs: usize,
    pub(crate) steps: u64,
    /// Steps that changed nothing because a gradient was not finite.
    pub(crate) skipped_steps: u64,
    pub(crate) final_loss: f64,
    pub(crate) test_accuracy: f64,
    /// Mean time of our optimizer's step.
    pub(crate) optimizer_ns_per_step: f64,
    /// The update rule.
    pub(crate) optimizer: &'static str,
    /// Element type of parameters and gradients.
    pub(crate) dtype: &'static str,
    /// Mean time of candle's AdamW on the same gradients, if the rule is AdamW.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) candle_ns_per_step: Option<f64>,
    /// How far the last step moved all parameters, ‖new − old‖, with `--update-norms`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) update_norm: Option<f64>,
    /// xxh3 of all parameter bytes in name order.
    pub(crate) params_hash: String,
    pub(crate) launches_per_step: usize,
    #[serde(flatten)]
    pub(crate) ranks: RankNumbers,
    pub(crate) history: Vec<Epoch>,
}

/// What each rank holds and sends.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankNumbers {
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// What carries calls between them.
    pub(crate) engine: &'static str,
    /// ZeRO stage.
    pub(crate) zero: u8,
    /// Bytes of optimizer state on rank 0, padding included.
    pub(crate) state_bytes_per_rank: u64,
    /// Calls between ranks for each update; of stage 3 also those that gather layers.
    pub(crate) collectives_per_step: f64,
    /// Bytes that each rank sends for each update, by ring algorithms.
    pub(crate) bytes_sent_per_step: f64,
    /// Most bytes of whole parameters that were held for layers in use.
    pub(crate) layer_peak_bytes: u64,
    /// Most bytes of buckets of gradients that were held at one time.
    pub(crate) bucket_peak_bytes: u64,
    /// Bytes of all parameters.
    pub(crate) parameter_bytes: u64,
}

impl TrainArgs {
    /// What carries calls between ranks.
    pub(crate) fn engine(&self) -> Engine {
        self.engine.unwrap_or(Engine::Thread)
    }

    /// Whether the step of many ranks is asked for, be it of one rank.
    fn of_ranks(&self) -> bool {
        self.ranks.is_some()
            || self.engine.is_some()
            || self.rank_args.any()
            || self.checkpoint.is_some()
    }
}

/// One pass over the training images.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Epoch {
    /// Mean training loss.
    pub(crate) loss: f64,
    pub(crate) test_accuracy: f64,
}

pub(crate) fn run(args: &TrainArgs) -> anyhow::Result<()> {
    if args.of_ranks() {
        return run_ranks(args);
    }
    args.watch.require_none("--ranks or --engine")?;
    let (train, test) = digits::load(args.seed)?;
    let model = Mlp::new(args.seed, args.dtype.into())?;
    let lr = default_lr(args.optimizer.optimizer);
    let rule = args.optimizer.clone().with_default_lr(lr).rule()?;
    let options = Options {
        threads: Some(threads(args.threads)),
        precision: args.precision.precision(),
        fusion: match args.naive {
            true => Fusion::Naive,
            false => Fusion::Fused,
        },
        clip_norm: args.gradients.clip_norm,
        update_norms: args.gradients.update_norms,
        loss_scale: args.gradients.loss_scale()?,
        exclude: args.optimizer.exclude.clone(),
    };
    let optimizer = AnyRule::with_options(model.parameters(), rule, &options)?;
    for pattern in optimizer.unmatched_excludes() {
        warn_unmatched(pattern, optimizer.plan().params().len());
    }
    // candle's step is not comparable with one that keeps other tensors, reads gradients twice or decays other parameters.
    let alike = args.dtype == ParamDType::F32
        && options.precision == Precision::default()
        && options.clip_norm.is_none()
        && options.loss_scale.is_none()
        && !options.update_norms
        && options.exclude.is_empty();
    let shadow = match alike {
        true => Shadow::new(&model.parameters(), rule)?,
        false => None,
    };
    if !args.json {
        print(&format!(
            "{} training and {} test images of handwritten digits\n{}",
            train.len(),
            test.len(),
            optimizer.plan()
        ))?;
    }
    let mut training = Training {
        model,
        optimizer,
        shadow,
        optimizer_ns: 0.0,
        steps: 0,
        skipped: 0,
    };
    let history = training.run(args, &train, &test)?;
    let summary = training.summary(args, history)?;
    if let Some(path) = &args.report {
        write_page(path, &report_page(&summary, training.optimizer.plan()))?;
    }
    if args.json {
        return print_json(&summary);
    }
    print(&summary.to_string())
}

fn run_ranks(args: &TrainArgs) -> anyhow::Result<()> {
    let Some(Trained { summary, plan }) = train_ranks::run(args)? else {
        return Ok(());
    };
    if let Some(path) = &args.report {
        write_page(path, &report_page(&summary, plan.local()))?;
    }
    match args.json {
        true => print_json(&summary),
        false => print(&summary.to_string()),
    }
}

/// A learning rate at which the rule learns the digits.
pub(crate) fn default_lr(rule: Rule) -> f64 {
    match rule {
        Rule::Adamw | Rule::Adam => 2e-3,
        Rule::Sgd => 0.2,
        Rule::Momentum => 0.05,
        Rule::Lion => 3e-4,
        Rule::Adagrad => 0.02,
        Rule::Lars => 10.0,
        Rule::Lamb => 0.01,
    }
}

impl std::fmt::Display for TrainSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} epochs, {} steps: loss {:.4}, test accuracy {:.2} %",
            self.epochs,
            self.steps,
            self.final_loss,
            100.0 * self.test_accuracy
        )?;
        write!(
            f,
            "optimizer: {} and {} launches per step",
            duration(self.optimizer_ns_per_step),
            self.launches_per_step,
        )?;
        if let Some(candle) = self.candle_ns_per_step {
            write!(
                f,
                "; candle's AdamW on the same gradients: {} ({:.1} times as long)",
                duration(candle),
                candle / self.optimizer_ns_per_step,
            )?;
        }
        writeln!(f)?;
        if let Some(norm) = self.update_norm {
            writeln!(f, "norm of the last update: {norm}")?;
        }
        if self.ranks.ranks > 1 {
            let numbers = &self.ranks;
            writeln!(
                f,
                "{} ranks ({}), zero stage {}: {} bytes of optimizer state each, {:.1} calls and {:.0} bytes sent per step, at most {} of {} parameter bytes held for layers",
                numbers.ranks,
                numbers.engine,
                numbers.zero,
                numbers.state_bytes_per_rank,
                numbers.collectives_per_step,
                numbers.bytes_sent_per_step,
                numbers.layer_peak_bytes,
                numbers.parameter_bytes,
            )?;
        }
        writeln!(f, "parameters: xxh3 {}", self.params_hash)
    }
}

/// A model being trained.
struct Training {
    model: Mlp,
    optimizer: AnyRule,
    shadow: Option<Shadow>,
    optimizer_ns: f64,
    steps: u64,
    skipped: u64,
}

impl Training {
    fn run(
        &mut self,
        args: &TrainArgs,
        train: &Images,
        test: &Images,
    ) -> anyhow::Result<Vec<Epoch>> {
        let mut rng = ChaCha8Rng::seed_from_u64(args.seed.wrapping_add(1));
        let mut order: Vec<usize> = (0..train.len()).collect();
        let batch = args.batch.get();
        let bar = progress_bar((args.epochs.get() * train.len().div_ceil(batch)) as u64);
        let mut history = Vec::new();
        for epoch in 1..=args.epochs.get() {
            order.shuffle(&mut rng);
            let mut sum = 0.0;
            for positions in order.chunks(batch) {
                let loss = self.step(&train.select(positions))?;
                if !loss.is_finite() {
                    bail!(
                        "epoch {epoch}: expected a finite loss, found {loss}; use a smaller --lr"
                    );
                }
                sum += loss * positions.len() as f64;
                bar.inc(1);
            }
            let epoch = Epoch {
                loss: sum / train.len() as f64,
                test_accuracy: self.model.accuracy(test)?,
            };
            bar.set_message(format!(
                "loss {:.4}  test accuracy {:.2} %",
                epoch.loss,
                100.0 * epoch.test_accuracy
            ));
            history.push(epoch);
        }
        bar.finish();
        Ok(history)
    }

    /// One forward, backward and update; returns the loss.
    fn step(&mut self, images: &Images) -> anyhow::Result<f64> {
        let loss = self.model.loss(images)?;
        let scaled = (&loss * self.optimizer.loss_scale())?;
        let grads = scaled.backward()?;
        if let Some(shadow) = &mut self.shadow {
            shadow.step(&self.optimizer, &grads)?;
        }
        let start = Instant::now();
        self.optimizer.step(&grads)?;
        self.optimizer_ns += start.elapsed().as_nanos() as f64;
        self.steps += 1;
        self.skipped += u64::from(self.optimizer.report().skipped);
        Ok(f64::from(loss.to_scalar::<f32>()?))
    }

    fn summary(&self, args: &TrainArgs, history: Vec<Epoch>) -> anyhow::Result<TrainSummary> {
        let last = history.last().copied().unwrap_or(Epoch {
            loss: f64::NAN,
            test_accuracy: 0.0,
        });
        let steps = self.steps.max(1) as f64;
        let params = self.optimizer.plan().params().iter();
        let parameter_bytes = params.map(|p| p.numel() * p.dtype.len_bytes() as u64).sum();
        Ok(TrainSummary {
            epochs: args.epochs.get(),
            steps: self.steps,
            skipped_steps: self.skipped,
            final_loss: last.loss,
            test_accuracy: last.test_accuracy,
            optimizer_ns_per_step: self.optimizer_ns / steps,
            optimizer: self.optimizer.plan().optimizer().name(),
            dtype: DType::from(args.dtype).name(),
            candle_ns_per_step: self.shadow.as_ref().map(|shadow| shadow.ns / steps),
            update_norm: self.optimizer.report().update_norm,
            params_hash: params_hash(&self.optimizer)?,
            launches_per_step: self.optimizer.plan().launches(),
            ranks: RankNumbers {
                ranks: 1,
                engine: Engine::Thread.name(),
                zero: 0,
                state_bytes_per_rank: self.optimizer.plan().state_bytes(),
                collectives_per_step: 0.0,
                bytes_sent_per_step: 0.0,
                layer_peak_bytes: parameter_bytes,
                bucket_peak_bytes: 0,
                parameter_bytes,
            },
            history,
        })
    }
}

/// candle's AdamW on copies of the variables, given the same gradients: what the step would have cost.
struct Shadow {
    vars: Vec<Var>,
    optimizer: candle_nn::AdamW,
    ns: f64,
}

impl Shadow {
    /// None unless the rule is candle's AdamW too.
    fn new(vars: &[(String, Var)], rule: UpdateRule) -> candle_core::Result<Option<Self>> {
        let UpdateRule::Adam(Adam {
            weight_decay: WeightDecay::Decoupled(weight_decay),
            second_moment: SecondMoment::Running,
            objective: Objective::Minimize,
            lr,
            beta1,
            beta2,
            eps,
        }) = rule
        else {
            return Ok(None);
        };
        let params = ParamsAdamW {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        };
        let copies: candle_core::Result<Vec<Var>> = vars
            .iter()
            .map(|(_, var)| Var::from_tensor(&var.as_tensor().copy()?.detach()))
            .collect();
        let vars = copies?;
        Ok(Some(Self {
            optimizer: candle_nn::AdamW::new(vars.clone(), params)?,
            vars,
            ns: 0.0,
        }))
    }

    fn step(&mut self, ours: &AnyRule, grads: &GradStore) -> candle_core::Result<()> {
        let mut own = GradStore::default();
        for ((_, var), copy) in ours.variables().zip(&self.vars) {
            if let Some(grad) = grads.get(var) {
                own.insert(copy, grad.clone());
            }
        }
        let start = Instant::now();
        self.optimizer.step(&own)?;
        self.ns += start.elapsed().as_nanos() as f64;
        Ok(())
    }
}

fn params_hash(optimizer: &AnyRule) -> candle_core::Result<String> {
    let mut hasher = Xxh3::new();
    for (_, var) in optimizer.variables() {
        let flat = Tensor::flatten_all(var)?;
        match flat.dtype() {
            candle_core::DType::F64 => hasher.update(bytemuck::cast_slice(&flat.to_vec1::<f64>()?)),
            candle_core::DType::F16 => hasher.update(bytemuck::cast_slice(&flat.to_vec1::<f16>()?)),
            candle_core::DType::BF16 => {
                hasher.update(bytemuck::cast_slice(&flat.to_vec1::<bf16>()?));
            }
            _ => hasher.update(bytemuck::cast_slice(&flat.to_vec1::<f32>()?)),
        }
    }
    Ok(format!("{:016x}", hasher.digest()))
}

fn progress_bar(steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps  {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

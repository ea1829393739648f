//! `fusestep train` on many ranks: each has its part of every batch, of gradients, state and parameters.

use std::collections::BTreeMap;
use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use candle_core::{Device, Tensor};
use fusestep_collective::{Collectives, Communicator, ReduceOp, even_counts};
use fusestep_cpu::CpuBackend;
use fusestep_launch::Backend;
use fusestep_planner::{
    Comms, FolderLock, GatheredParams, PendingGather, Planner, RankPlan, RankState, Topology, Zero,
};
use fusestep_tensor::{DType, ParamDesc, Shape};
use half::{bf16, f16};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::Xxh3;

use crate::digits::{self, Images};
use crate::engine::Ranks;
use crate::layers::{self, COUNT, Layer, Ranked};
use crate::model::Mlp;
use crate::options::threads;
use crate::ranks::Fused;
use crate::train::{Epoch, RankNumbers, TrainArgs, TrainSummary, default_lr};

/// What a run ends with.
pub(crate) struct Trained {
    pub(crate) summary: TrainSummary,
    pub(crate) plan: RankPlan,
}

/// Trains on all ranks; returns what rank 0 has found, on rank 0 only.
pub(crate) fn run(args: &TrainArgs) -> anyhow::Result<Option<Trained>> {
    let engine = args.engine();
    let ranks = args.ranks.unwrap_or(NonZeroUsize::MIN);
    engine.run(&Ranks::threads(ranks, args.watch.clone()), |comm| {
        train(args, comm)
    })
}

fn train(args: &TrainArgs, comm: &mut dyn Communicator) -> anyhow::Result<Trained> {
    let (train, test) = digits::load(args.seed)?;
    let model = Mlp::new(args.seed, args.dtype.into())?;
    let topology = Topology::of(comm);
    let mut params = Vec::new();
    for (name, var) in model.parameters() {
        let dims: Vec<u64> = var.dims().iter().map(|&dim| dim as u64).collect();
        params.push(ParamDesc::new(
            name,
            Shape::new(dims)?,
            DType::from(args.dtype),
        ));
    }
    args.optimizer.exclude(&mut params);
    let lr = default_lr(args.optimizer.optimizer);
    let rule = args.optimizer.clone().with_default_lr(lr).rule()?;
    let planner = Planner::new(rule);
    let planner = if args.naive { planner.naive() } else { planner };
    let planner = args.precision.planner(planner, &params);
    let planner = args.gradients.passes(planner);
    let planner = args.rank_args.passes(planner, Fused::from(args.naive))?;
    let plan = planner.plan_for(&params, topology)?;
    let of_rank = threads(args.threads).get().div_ceil(topology.world);
    let backend = CpuBackend::new(NonZeroUsize::new(of_rank).unwrap_or(NonZeroUsize::MIN))?;
    if let Some(folder) = &args.checkpoint {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("--checkpoint {}", folder.display()))?;
    }
    let first = topology.rank == 0;
    let folder = args.checkpoint.as_ref().filter(|_| first);
    let _lock = folder.map(|folder| FolderLock::take(folder)).transpose()?;
    let mut state = plan.allocate(&backend)?;
    for (name, var) in model.parameters() {
        plan.write_param(&mut state, &backend, &name, &bytes_of(var.as_tensor())?)?;
    }
    // From here on parameters are where the plan says, not here.
    drop(model);
    let rings = args.rank_args.ring_count(Fused::from(args.naive));
    let comms = match args.rank_args.shard_group {
        Some(group) => Comms::in_groups(comm, group, rings)?,
        None => Comms::with_rings(comm, rings)?,
    };
    let mut run = Run {
        plan: &plan,
        state,
        backend,
        ahead: None,
        comms,
        live_bytes: 0,
        peak_bytes: 0,
        bucket_peak_bytes: 0,
        update_norm: None,
        layer_bytes: [0; COUNT],
        update_ns: 0.0,
        steps: 0,
    };
    let history = run.epochs(args, &train, &test)?;
    let summary = run.summary(args, history)?;
    drop(run);
    Ok(Trained { summary, plan })
}

struct Run<'a> {
    plan: &'a RankPlan,
    state: RankState,
    backend: CpuBackend,
    /// The layer asked for ahead. Before `comms`: giving it up closes the ring that `comms` would wait for.
    ahead: Option<(usize, PendingGather)>,
    comms: Comms<'a>,
    /// Bytes of parameters that layers hold right now, on their way or in use, and the most they have held.
    live_bytes: usize,
    peak_bytes: usize,
    /// The most bytes that buckets have held.
    bucket_peak_bytes: u64,
    /// Of the last update, if it is measured.
    update_norm: Option<f64>,
    layer_bytes: [usize; COUNT],
    update_ns: f64,
    steps: u64,
}

impl Ranked for Run<'_> {
    fn ask(&mut self, index: usize) -> anyhow::Result<()> {
        // Without rings it would be here at once, and only take memory longer.
        if !self.comms.has_rings() || self.plan.zero() != Zero::Zero3 {
            return Ok(());
        }
        let names = layers::names(index);
        let names = [names[0].as_str(), names[1].as_str()];
        let pending = self
            .plan
            .prefetch(&self.state, &self.backend, &mut self.comms, &names)?;
        self.hold(pending.len_bytes());
        self.ahead = Some((index, pending));
        Ok(())
    }

    fn layer(&mut self, index: usize) -> anyhow::Result<Layer> {
        let names = layers::names(index);
        let names = [names[0].as_str(), names[1].as_str()];
        // The first layer of a pass nobody could ask for ahead: it goes the same way, so that calls keep one order.
        if self.ahead.is_none() {
            self.ask(index)?;
        }
        let gathered = match self.ahead.take() {
            Some((asked, pending)) => {
                let gathered = pending.wait(&self.state)?;
                ensure!(
                    asked == index,
                    "layer{index}: expected to be asked for ahead, found layer{asked}"
                );
                gathered
            }
            None => {
                let (state, backend) = (&self.state, &self.backend);
                let gathered = self.plan.gather(state, backend, &mut self.comms, &names)?;
                self.hold(gathered.len_bytes());
                gathered
            }
        };
        let layer = (
            self.tensor(&gathered, names, 1)?,
            self.tensor(&gathered, names, 0)?,
        );
        // The gathered copy and the tensors made of it lie side by side for a moment.
        self.hold(gathered.len_bytes());
        self.live_bytes -= gathered.len_bytes();
        self.layer_bytes[index] = gathered.len_bytes();
        Ok(layer)
    }

    fn released(&mut self, index: usize) {
        self.live_bytes -= std::mem::take(&mut self.layer_bytes[index]);
    }

    fn gradients(&mut self, index: usize, weight: &Tensor, bias: &Tensor) -> anyhow::Result<()> {
        let names = layers::names(index);
        for (name, grad) in names.iter().rev().zip([weight, bias]) {
            let bytes = bytes_of(grad)?;
            self.plan
                .give_gradient(&mut self.state, &mut self.comms, name, &bytes)?;
        }
        Ok(())
    }
}

impl Run<'_> {
    /// Counts bytes of parameters that are whole from now on.
    fn hold(&mut self, len_bytes: usize) {
        self.live_bytes += len_bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    fn tensor(
        &self,
        gathered: &GatheredParams,
        names: [&str; 2],
        at: usize,
    ) -> anyhow::Result<Tensor> {
        let name = names[at];
        let desc = self.plan.params().iter().find(|param| param.name == name);
        let desc = desc.with_context(|| format!("`{name}`: expected a parameter of the model"))?;
        let dims: Vec<usize> = desc.shape.dims().iter().map(|&dim| dim as usize).collect();
        let dtype = match desc.dtype {
            DType::F64 => candle_core::DType::F64,
            DType::F16 => candle_core::DType::F16,
            DType::BF16 => candle_core::DType::BF16,
            _ => candle_core::DType::F32,
        };
        let bytes = gathered.bytes(at);
        Ok(Tensor::from_raw_buffer(bytes, dtype, &dims, &Device::Cpu)?)
    }

    fn epochs(
        &mut self,
        args: &TrainArgs,
        train: &Images,
        test: &Images,
    ) -> anyhow::Result<Vec<Epoch>> {
        let mut rng = ChaCha8Rng::seed_from_u64(args.seed.wrapping_add(1));
        let mut order: Vec<usize> = (0..train.len()).collect();
        let mut history = Vec::new();
        let start = self.resume(args)?;
        for epoch in 1..=args.epochs.get() {
            order.shuffle(&mut rng);
            // The order of images follows from all shuffles before it.
            if epoch <= start.epochs {
                continue;
            }
            let (begun, mut sum) = match epoch == start.epochs + 1 {
                true => (start.batches, start.loss_sum),
                false => (0, 0.0),
            };
            for (at, positions) in order.chunks(args.batch.get()).enumerate().skip(begun) {
                let loss = self.step(args, train, positions)?;
                // All ranks see the same mean, so they give up together.
                if !loss.is_finite() {
                    bail!(
                        "epoch {epoch}: expected a finite loss, found {loss}; use a smaller --lr"
                    );
                }
                sum += loss * positions.len() as f64;
                let batches = (epoch - 1) * order.len().div_ceil(args.batch.get()) + at + 1;
                let due = |every: NonZeroU64| (batches as u64).is_multiple_of(every.get());
                if args.save_every.is_some_and(due) {
                    let position = Position {
                        epochs: epoch - 1,
                        batches: at + 1,
                        loss_sum: sum,
                    };
                    self.save(args, position)?;
                }
            }
            // What is left of a merge window belongs to this epoch's images.
            let report = self
                .plan
                .flush(&mut self.state, &self.backend, &mut self.comms)?;
            self.steps += u64::from(report.update.is_some());
            self.update_norm = report
                .update
                .map_or(self.update_norm, |update| update.update_norm);
            if args.rank_args.local_sgd.is_some() {
                self.plan
                    .average_now(&mut self.state, &self.backend, &mut self.comms)?;
            }
            history.push(Epoch {
                loss: sum / train.len() as f64,
                test_accuracy: layers::accuracy(self, test)?,
            });
            let position = Position {
                epochs: epoch,
                ..Position::default()
            };
            self.save(args, position)?;
        }
        Ok(history)
    }

    /// Goes on from the checkpoint; returns where it was.
    fn resume(&mut self, args: &TrainArgs) -> anyhow::Result<Position> {
        let Some(folder) = args.checkpoint.as_ref().filter(|_| args.resume) else {
            return Ok(Position::default());
        };
        let caller = self.plan.load(&mut self.state, &self.backend, folder)?;
        for (key, own) in images(args) {
            let found = caller.get(key).map_or("nothing", String::as_str);
            if found != own {
                bail!(
                    "{}: {key}: expected {own}, found {found}; resume with the same images",
                    folder.display()
                );
            }
        }
        let position = Position::read(&caller);
        position.with_context(|| format!("{}: expected where the run was", folder.display()))
    }

    fn save(&mut self, args: &TrainArgs, position: Position) -> anyhow::Result<()> {
        let Some(folder) = &args.checkpoint else {
            return Ok(());
        };
        let mut caller = position.texts();
        for (key, own) in images(args) {
            caller.insert(key.to_owned(), own);
        }
        let (state, backend) = (&self.state, &self.backend);
        Ok(self
            .plan
            .save(state, backend, &mut self.comms, folder, caller)?)
    }

    /// One batch, shared out among ranks; returns the mean loss over all of it.
    fn step(
        &mut self,
        args: &TrainArgs,
        train: &Images,
        positions: &[usize],
    ) -> anyhow::Result<f64> {
        let Topology { rank, world } = self.plan.topology();
        let counts = even_counts(positions.len(), world);
        let start: usize = counts[..rank].iter().sum();
        let own = train.select(&positions[start..start + counts[rank]]);
        // Gradients are averaged over ranks, so a rank with more images than others counts for more.
        let share = match args.rank_args.local_sgd {
            Some(_) => 1.0,
            None => (counts[rank] * world) as f64 / positions.len() as f64,
        };
        if self.plan.micro_steps() > 1 && positions.len() != args.batch.get() {
            self.state
                .set_weight(positions.len() as f64 / args.batch.get() as f64);
        }
        let scale = share * self.state.loss_scale();
        let loss = layers::loss_and_gradients(self, &own, scale)?;
        let mut total = [loss * counts[rank] as f64];
        self.comms
            .communicator()
            .all_reduce(&mut total, ReduceOp::Sum)?;
        self.state.set_loss(total[0] / positions.len() as f64);
        let start = Instant::now();
        let report = self
            .plan
            .run_with(&mut self.state, &self.backend, &mut self.comms)?;
        self.update_ns += start.elapsed().as_nanos() as f64;
        self.steps += u64::from(report.update.is_some());
        self.update_norm = report
            .update
            .map_or(self.update_norm, |update| update.update_norm);
        self.bucket_peak_bytes = self.bucket_peak_bytes.max(report.bucket_peak_bytes);
        Ok(total[0] / positions.len() as f64)
    }

    fn summary(&mut self, args: &TrainArgs, history: Vec<Epoch>) -> anyhow::Result<TrainSummary> {
        let last = history.last().copied().unwrap_or(Epoch {
            loss: f64::NAN,
            test_accuracy: 0.0,
        });
        let steps = self.steps.max(1) as f64;
        let (calls, bytes) = (self.comms.calls(), self.comms.bytes_sent());
        let params_hash = self.params_hash()?;
        let parameter_bytes = self
            .plan
            .params()
            .iter()
            .map(|p| p.numel() * p.dtype.len_bytes() as u64);
        Ok(TrainSummary {
            epochs: args.epochs.get(),
            steps: self.steps,
            skipped_steps: self.state.skipped(),
            final_loss: last.loss,
            test_accuracy: last.test_accuracy,
            optimizer_ns_per_step: self.update_ns / steps,
            optimizer: self.plan.local().optimizer().name(),
            dtype: DType::from(args.dtype).name(),
            candle_ns_per_step: None,
            update_norm: self.update_norm,
            params_hash,
            launches_per_step: self.plan.local().launches(),
            ranks: RankNumbers {
                ranks: self.plan.topology().world,
                engine: args.engine().name(),
                zero: self.plan.zero().number(),
                state_bytes_per_rank: self.plan.state_bytes(),
                collectives_per_step: calls as f64 / steps,
                bytes_sent_per_step: bytes as f64 / steps,
                layer_peak_bytes: self.peak_bytes as u64,
                bucket_peak_bytes: self.bucket_peak_bytes,
                parameter_bytes: parameter_bytes.sum(),
            },
            history,
        })
    }

    /// xxh3 of all parameters in name order, one gathered at a time.
    fn params_hash(&mut self) -> anyhow::Result<String> {
        let mut names: Vec<&str> = self.plan.params().iter().map(|p| p.name.as_str()).collect();
        names.sort_unstable();
        let mut hasher = Xxh3::new();
        for name in names {
            let backend: &dyn Backend = &self.backend;
            let gathered = self
                .plan
                .gather(&self.state, backend, &mut self.comms, &[name])?;
            hasher.update(gathered.bytes(0));
        }
        Ok(format!("{:016x}", hasher.digest()))
    }
}

/// Where in its images a run is.
#[derive(Clone, Copy, Debug, Default)]
struct Position {
    /// Epochs that are over.
    epochs: usize,
    /// Batches of the next that are over, and the sum of their images' losses.
    batches: usize,
    loss_sum: f64,
}

impl Position {
    fn texts(self) -> BTreeMap<String, String> {
        let entries = [
            ("epochs", self.epochs.to_string()),
            ("batches", self.batches.to_string()),
            // Bits, so that the epoch's mean is the same to the last one.
            ("loss_sum", format!("{:016x}", self.loss_sum.to_bits())),
        ];
        entries.map(|(key, value)| (key.to_owned(), value)).into()
    }

    fn read(texts: &BTreeMap<String, String>) -> Option<Self> {
        let bits = u64::from_str_radix(texts.get("loss_sum")?, 16).ok()?;
        Some(Self {
            epochs: texts.get("epochs")?.parse().ok()?,
            batches: texts.get("batches")?.parse().ok()?,
            loss_sum: f64::from_bits(bits),
        })
    }
}

/// What decides which images a batch has.
fn images(args: &TrainArgs) -> [(&'static str, String); 2] {
    [
        ("seed", args.seed.to_string()),
        ("batch", args.batch.to_string()),
    ]
}

/// A tensor's elements as they lie in memory.
fn bytes_of(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        candle_core::DType::F64 => bytemuck::cast_slice(&flat.to_vec1::<f64>()?).to_vec(),
        candle_core::DType::F16 => bytemuck::cast_slice(&flat.to_vec1::<f16>()?).to_vec(),
        candle_core::DType::BF16 => bytemuck::cast_slice(&flat.to_vec1::<bf16>()?).to_vec(),
        _ => bytemuck::cast_slice(&flat.to_vec1::<f32>()?).to_vec(),
    })
}

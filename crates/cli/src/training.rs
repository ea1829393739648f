//! The run of `fusestep train` on one rank of any number: each has its part of every batch.

mod announce;
mod checkpoints;
mod compared;
mod handshake;
mod record;
pub(crate) mod recorder;
mod run;
mod saved_as;
mod summary;
mod tally;

use std::num::NonZeroU64;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{bail, ensure};
use candle_core::Var;
use candle_core::backprop::GradStore;
use fusestep::{Section, Session, StepOptions};
use fusestep_collective::{Collectives, Communicator, ReduceOp, even_counts};
use fusestep_models::Task;
use fusestep_planner::{MicroStepReport, Plan, Topology};
use fusestep_tensor::{DType, ParamDesc};
use indicatif::ProgressBar;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use self::announce::{announce, announce_scale};
use self::checkpoints::{Position, check_folder, make_folder};
use self::compared::{Compared, advice, require_comparisons};
use self::handshake::{compare_calls, own_settings};
use self::recorder::{Recorded, Recorder, Stopped};
use self::run::Training;
use self::tally::Tally;
use crate::figures::Known;
use crate::options::{BackendName, threads};
use crate::output::{Told, detail, print, progress, tells};
use crate::planning::{agreed, planner_of, told};
use crate::shadow::Shadow;
use crate::train::args::TrainArgs;
use crate::train::summary::{Epoch, TrainSummary};
use crate::values::{candle_dtype, vars_of, with_bytes};

/// The result of a run.
pub(crate) struct Trained {
    pub(crate) summary: TrainSummary,
    pub(crate) plan: Plan,
    /// The run and its curves, for a page.
    pub(crate) recorded: Option<Recorded>,
}

/// The run that the command line asks for.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) args: &'a TrainArgs,
    pub(crate) options: &'a StepOptions,
    /// Figures of the machine, from which settings are chosen.
    pub(crate) known: &'a Known,
    pub(crate) params: &'a [ParamDesc],
    /// Place for what rank 0 has of a run that ends early.
    pub(crate) stopped: &'a Mutex<Option<Stopped>>,
}

/// Trains as one rank of `comm`.
pub(crate) fn train(
    asked: Asked<'_>,
    task: &dyn Task,
    comm: &mut dyn Communicator,
) -> anyhow::Result<Trained> {
    let Asked { args, options, known, params, stopped } = asked;
    let topology = Topology::of(comm);
    let first = topology.rank == 0;
    require_samples(args, topology.world)?;
    let is_cpu = args.backend == BackendName::Cpu;
    let mut reason = None;
    let threads = if is_cpu { known.threads(args.threads, &mut reason)? } else { threads(None)? };
    let of_rank = threads.get().div_ceil(topology.world);
    let backend = args.backend.of_rank(of_rank, comm.device())?;
    let mut chosen = agreed(options, params, backend.limits(), comm)?;
    chosen.note(reason);
    known.explain(&mut chosen, topology);
    let planner = planner_of(&chosen, params, topology, backend.limits())?;
    let plan = planner.plan_for(params, topology)?;
    let options = &chosen.options;
    if first {
        detail(&format!("threads of each rank: {of_rank}"));
    }
    compare_calls(args, options, comm)?;
    if let Some(folder) = &args.checkpoint {
        make_folder(folder, args.resume, first)?;
    }
    let mut session = Session::on(options, params, Box::new(backend), comm).map_err(told)?;
    session.compare_also(own_settings(args));
    if let Some(folder) = &args.checkpoint {
        session.own_folder(folder)?;
        if first {
            check_folder(folder, args.resume)?;
        }
    }
    let vars = task.start(args.seed, candle_dtype(args.dtype))?;
    for (param, var) in params.iter().zip(&vars) {
        with_bytes(var, |bytes| Ok(session.write_param(&param.name, bytes)?))?;
    }
    let shadow = if compares(args, &plan) { Shadow::new(&vars, options.rule)? } else { None };
    let batch = batch_of(args, options);
    let batches = args.epochs * task.samples_of_epoch().div_ceil(batch);
    require_comparisons(args, batches, topology.rank)?;
    let mut run = Training {
        args,
        options,
        names: params.iter().map(|param| param.name.as_str()).collect(),
        session,
        task,
        shadow,
        bar: if first { progress(batches as u64, "batches") } else { ProgressBar::hidden() },
        tally: Tally::default(),
        compared: Compared::default(),
        resumed_epochs: None,
        history: Vec::new(),
        recorder: Recorder::default(),
        warned: false,
    };
    run.session.meet()?;
    let last = run.epochs_or_stopped(stopped)?;
    let summary = run.summary(last)?;
    let recorded = run.recorded()?;
    drop(run);
    Ok(Trained { summary, plan, recorded })
}

/// Refuses batches that leave a rank without a sample.
fn require_samples(args: &TrainArgs, ranks: usize) -> anyhow::Result<()> {
    ensure!(
        args.batch >= ranks,
        "--batch: expected a sample for each of {ranks} ranks at least, found {}; give a larger \
         --batch, or start fewer ranks",
        args.batch
    );
    Ok(())
}

/// Samples between two losses: a batch, or, with lanes, all batches of an update.
fn batch_of(args: &TrainArgs, options: &StepOptions) -> usize {
    let of_lane = options.lanes.map_or(1, |lanes| options.micro_batches() / u64::from(lanes));
    args.batch.saturating_mul(of_lane as usize)
}

/// Settings under which a step does the same work.
const SAME_WORK: [Section; 4] =
    [Section::Rate, Section::Launches, Section::Backward, Section::Calls];

/// Whether candle's step would do the same work. A step that keeps other tensors, reads gradients
/// twice or decays other parameters is not comparable.
fn compares(args: &TrainArgs, plan: &Plan) -> bool {
    plan.topology().world == 1
        && plan.micro_steps() == 1
        && args.dtype == DType::F32
        && args.settings.changed_beyond(&SAME_WORK, &[]).is_none()
}

/// The gradients of a backward pass and the variables that have them; none without samples.
type Grads = Option<(Vec<Var>, GradStore)>;

impl Training<'_> {
    /// The current parameters; at ZeRO stage 3 all ranks must call it together.
    fn vars(&mut self) -> anyhow::Result<Vec<Var>> {
        let gathered = self.session.gather(&self.names)?;
        let len_bytes = gathered.len_bytes() as u64;
        self.tally.layer_peak_bytes = self.tally.layer_peak_bytes.max(len_bytes);
        Ok(vars_of(self.session.plan().params(), &gathered)?)
    }

    /// [`Self::vars`] for a step, whose time counts as ours.
    fn timed_vars(&mut self) -> anyhow::Result<Vec<Var>> {
        let begun = Instant::now();
        let vars = self.vars()?;
        self.tally.ours_ns += begun.elapsed().as_nanos() as f64;
        Ok(vars)
    }

    /// [`Self::epochs`]; leaves what there is for a page in `stopped` if they end in an error.
    fn epochs_or_stopped(&mut self, stopped: &Mutex<Option<Stopped>>) -> anyhow::Result<Epoch> {
        let ended = self.epochs();
        if ended.is_err()
            && let Ok(mut stopped) = stopped.lock()
            && let Some(own) = self.stopped()
        {
            *stopped = Some(own);
        }
        ended
    }

    /// Trains; returns the last epoch of all runs.
    fn epochs(&mut self) -> anyhow::Result<Epoch> {
        let batch = batch_of(self.args, self.options);
        let mut rng = ChaCha8Rng::seed_from_u64(self.args.seed.wrapping_add(1));
        let mut order: Vec<usize> = (0..self.task.samples()).collect();
        let resumed = self.resume()?;
        // Behind all that may refuse the run, whose reason would stand behind a long plan.
        if self.session.plan().topology().rank == 0 {
            announce(self.args, self.task, self.session.plan(), batch)?;
            announce_scale(self.options, self.session.loss_scale());
        }
        self.resumed_epochs = resumed.map(|position| position.epochs);
        if resumed.is_some() {
            self.warn_of_resumed()?;
        }
        self.begin_records()?;
        let start = resumed.unwrap_or_default();
        let of_epoch = self.task.samples_of_epoch();
        let mut done = start.epochs * of_epoch.div_ceil(batch) + start.batches;
        self.bar.set_position(done as u64);
        for epoch in 1..=self.args.epochs {
            order.shuffle(&mut rng);
            // The order of samples follows from all shuffles before it.
            if epoch <= start.epochs {
                continue;
            }
            let last_loss = self.history.last().map_or(start.last_loss, |epoch| epoch.loss);
            self.recorder.epoch = epoch;
            let mut at = Position { epochs: epoch - 1, last_loss, ..Position::default() };
            if epoch == start.epochs + 1 {
                (at.batches, at.loss_sum) = (start.batches, start.loss_sum);
            }
            for positions in order[..of_epoch].chunks(batch).skip(at.batches) {
                let loss = match self.options.lanes {
                    Some(_) => self.window(positions)?,
                    None => self.step(positions)?,
                };
                // All ranks see the same mean, so they give up together.
                if !loss.is_finite() {
                    let advice = advice(self.args, self.options);
                    bail!("epoch {epoch}: expected a finite loss, found {loss}; {advice}");
                }
                at.loss_sum += loss * positions.len() as f64;
                at.batches += 1;
                done += 1;
                self.bar.inc(1);
                let due = |every: NonZeroU64| (done as u64).is_multiple_of(every.get());
                if self.args.save_every.is_some_and(due) {
                    self.save(at)?;
                }
            }
            let ended = self.end_epoch(at)?;
            self.history.push(ended);
        }
        self.finish_saves()?;
        self.bar.finish();
        self.compared.tell(self.args, self.session.plan().topology().rank);
        match self.history.last().copied() {
            Some(last) => Ok(last),
            None => self.tested(start.last_loss),
        }
    }

    /// Ends an epoch: updates with the rest of the last micro-steps, which belong to this epoch's
    /// samples, tests the model and saves.
    fn end_epoch(&mut self, at: Position) -> anyhow::Result<Epoch> {
        let begun = self.begin();
        let report = match self.options.lanes {
            // Windows of lanes end with the samples of an epoch.
            Some(_) => Default::default(),
            None => self.session.flush()?,
        };
        if self.options.local_sgd.is_some() {
            self.session.average_now()?;
        }
        self.count_update(&report, &begun);
        self.count_batch(&begun);
        self.record(&report)?;
        let ended = self.tested(at.loss_sum / self.task.samples_of_epoch() as f64)?;
        self.record_epoch(ended);
        let told = format!("epoch {}: {ended}", at.epochs + 1);
        self.bar.set_message(told.clone());
        if self.session.plan().topology().rank == 0 && !self.args.json && tells(Told::Usual) {
            self.bar.suspend(|| print(&format!("{told}\n")))?;
        }
        self.save(Position {
            epochs: at.epochs + 1,
            last_loss: ended.loss,
            ..Position::default()
        })?;
        Ok(ended)
    }

    /// An epoch of this loss, with the loss and accuracy of the averages at the test.
    fn tested(&mut self, loss: f64) -> anyhow::Result<Epoch> {
        let tested = self.task.test(&self.averages()?)?;
        Ok(Epoch { loss, test_loss: tested.loss, test_accuracy: tested.accuracy })
    }

    /// The averages of the parameters, for a rule that has some, otherwise the parameters; all
    /// ranks must call it together.
    fn averages(&mut self) -> anyhow::Result<Vec<Var>> {
        let averages = self.session.gather_averages(&self.names)?;
        Ok(vars_of(self.session.plan().params(), &averages)?)
    }

    /// Takes a step with one batch, shared out among ranks; returns the mean loss over all of it.
    fn step(&mut self, positions: &[usize]) -> anyhow::Result<f64> {
        self.session.begin_step()?;
        self.warn();
        self.begin_batch();
        let (whole, beside) = (self.begin(), self.candle_ns());
        let Topology { rank, world, .. } = self.session.plan().topology();
        let counts = even_counts(positions.len(), world);
        let start: usize = counts[..rank].iter().sum();
        let own = &positions[start..start + counts[rank]];
        // Gradients are averaged over ranks, so a rank with more samples than others counts for
        // more.
        let share = match self.options.local_sgd {
            Some(_) => 1.0,
            None => (counts[rank] * world) as f64 / positions.len() as f64,
        };
        let batch = self.args.batch;
        if self.session.plan().micro_steps() > 1 && positions.len() != batch {
            self.session.state_mut().set_weight(positions.len() as f64 / batch as f64)?;
        }
        let vars = self.timed_vars()?;
        let (loss, grads) = self.gradients(&vars, own, share)?;
        // Where giving gradients makes the calls of a step, no other call may come between.
        let calls_while_given = self.session.run().calls_while_given();
        let begun = Instant::now();
        if !calls_while_given {
            self.give(&grads)?;
        }
        self.tally.ours_ns += begun.elapsed().as_nanos() as f64;
        let mut total = [loss * own.len() as f64];
        // The step below begins on all ranks at once, so its time is its own and not that of the
        // slowest backward pass.
        self.session.communicator().all_reduce(&mut total, ReduceOp::Sum)?;
        let loss = total[0] / positions.len() as f64;
        self.session.set_loss(loss);
        self.recorder.add_loss(loss, positions.len());
        let begun = self.begin();
        if calls_while_given {
            self.give(&grads)?;
        }
        let report = self.session.step()?;
        self.count_update(&report, &begun);
        self.count_batch(&whole);
        self.tally.batch_ns -= self.candle_ns() - beside;
        self.record(&report)?;
        self.tally.tokens += positions.len() * self.task.tokens_of_sample();
        self.compared.after_batch(self.args, &mut self.session)?;
        Ok(loss)
    }

    /// Makes the update of a global batch, whose micro-batches follow from the samples alone, not
    /// from the ranks that compute them; returns the mean loss over all of it.
    fn window(&mut self, positions: &[usize]) -> anyhow::Result<f64> {
        self.begin_batch();
        let whole = self.begin();
        let counts = even_counts(positions.len(), self.options.micro_batches() as usize);
        let micro_batches = counts.iter().filter(|count| **count > 0).count();
        let is_even = counts[..micro_batches].iter().all(|count| *count == counts[0]);
        self.session.state_mut().set_micro_batches(micro_batches as u64)?;
        // Once for all micro-batches: ranks with other numbers of them make the same calls.
        let vars = self.timed_vars()?;
        let mut losses = vec![0.0; counts.len()];
        let mut report = MicroStepReport::default();
        let mut is_over = false;
        while !is_over {
            self.session.begin_step()?;
            self.warn();
            let micro_batch = self.session.state().micro_batch().map(|number| number as usize);
            // A rank without samples makes its step as well.
            let count = micro_batch.map_or(1, |number| counts[number]);
            if !is_even {
                self.session.state_mut().set_weight(count as f64)?;
            }
            let mut begun = self.begin();
            if let Some(number) = micro_batch {
                let start: usize = counts[..number].iter().sum();
                let (loss, grads) = self.gradients(&vars, &positions[start..start + count], 1.0)?;
                losses[number] = loss * count as f64;
                begun = self.begin();
                self.give(&grads)?;
            }
            report = self.session.step()?;
            is_over = report.update.is_some();
            self.count_update(&report, &begun);
        }
        self.tally.drop_window(&report, micro_batches);
        // Each is of one rank, and 0 on the others; their sum is in the order of micro-batches.
        self.session.communicator().all_reduce(&mut losses, ReduceOp::Sum)?;
        self.count_batch(&whole);
        self.tally.tokens += positions.len() * self.task.tokens_of_sample();
        let loss = losses.iter().sum::<f64>() / positions.len() as f64;
        self.recorder.add_loss(loss, positions.len());
        self.record(&report)?;
        self.compared.after_batch(self.args, &mut self.session)?;
        Ok(loss)
    }

    /// Time of candle's optimizer so far.
    fn candle_ns(&self) -> f64 {
        self.shadow.as_ref().map_or(0.0, |shadow| shadow.ns)
    }

    /// Makes one forward and backward pass over this rank's samples. Returns their mean loss, and
    /// the gradients of `share` times that loss. A rank without samples has no gradients.
    fn gradients(
        &mut self,
        vars: &[Var],
        samples: &[usize],
        share: f64,
    ) -> anyhow::Result<(f64, Grads)> {
        if samples.is_empty() {
            return Ok((0.0, None));
        }
        let begun = Instant::now();
        let loss = self.task.loss(vars, samples)?;
        let scale = self.session.loss_scale();
        let grads = (&loss * (share * scale))?.backward()?;
        self.recorder.model_seconds += begun.elapsed().as_secs_f64();
        if let Some(shadow) = &mut self.shadow {
            shadow.step(vars, &grads, self.session.state().lr())?;
        }
        Ok((f64::from(loss.to_scalar::<f32>()?), Some((vars.to_vec(), grads))))
    }

    /// Gives gradients to the plan, the last layer's first, as a backward pass finds them.
    fn give(&mut self, grads: &Grads) -> anyhow::Result<()> {
        let Some((vars, grads)) = grads else {
            return Ok(());
        };
        for (name, var) in self.names.iter().zip(vars).rev() {
            let Some(grad) = grads.get(var) else { continue };
            let session = &mut self.session;
            with_bytes(grad, |bytes| Ok(session.push_grad_bytes(name, bytes)?))?;
        }
        Ok(())
    }
}

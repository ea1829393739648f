//! The optimizer of one rank of many.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer;
use fusestep::{Session, SessionError};
use fusestep_collective::Communicator;
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Interval, MicroStepReport, Plan, Reach, State, Topology};
use fusestep_tensor::ParamDesc;

use crate::gradients::{Addresses, Gradients};
use crate::group::{self, GroupRules};
use crate::lend::{bytes_of, copy, write_in_place};
use crate::parallel::slices;
use crate::planning::Settings;
use crate::variables::Names;
use crate::{AdapterError, Fused, Options, Params, Report, memory};

/// An update rule on candle variables as one rank of a communicator, [`Fused::on`]: gradients of
/// micro-steps are added, reduced over ranks and stepped with in the optimizer's own memory, and
/// the variables get what is new.
///
/// All ranks make the same calls. Parameters get the same bits at every ZeRO stage, with any bucket
/// cap and any streams; on one rank, those of [`Fused`].
#[derive(Debug)]
pub struct Ranked<'c, P: Params> {
    pub(crate) vars: Vec<(String, Var)>,
    pub(crate) names: Names,
    addresses: Addresses,
    params: P,
    group_rules: GroupRules,
    pub(crate) session: Session<'c>,
    report: Report,
    /// Variables of which every rank has a slice.
    slices: BTreeSet<String>,
}

impl<P: Params> Fused<P> {
    /// This optimizer as one rank of `comm`, before its first step. Ranks compare their options
    /// and, unless [`Options::initial`] says otherwise, take over the variables of rank 0. All
    /// ranks call it.
    ///
    /// Slices of layers that are split over these ranks ([`crate::parallel`]) stay each rank's own,
    /// and so do variables that [`Options::distributed`] names: no rank gets another's values or
    /// gradients of them, and norms are those of the whole tensors.
    ///
    /// # Errors
    /// An [`AdapterError`]: options out of range or that contradict each other, ranks that differ
    /// in them, memory that cannot be had, an optimizer that has been used.
    /// # Cost
    /// Memory for a copy of the variables and for gradients, less what [`Options::zero`] shares
    /// out.
    pub fn on(self, comm: &mut dyn Communicator) -> candle_core::Result<Ranked<'_, P>> {
        if self.state.step() > 0 || self.checkpoints.in_flight() {
            let steps = self.state.step();
            return Err(AdapterError::InUse { steps }.into());
        }
        memory::check_host(&self.vars)?;
        let topology = Topology::of(comm);
        Ok(self.ranked(topology, |options, params, backend| {
            Session::on(options, params, Box::new(backend), comm)
        })?)
    }

    fn ranked<'c>(
        self,
        topology: Topology,
        make: impl FnOnce(&Options, &[ParamDesc], CpuBackend) -> Result<Session<'c>, SessionError>,
    ) -> Result<Ranked<'c, P>, AdapterError> {
        // The rule as it was given: rules that have become equal since stay two.
        let options = Options {
            rule: *self.plan.optimizer(),
            ..self.options.with_slices(&self.vars, topology.world)?
        };
        let backend = CpuBackend::new(threads(&options, topology));
        let mut session = make(&options, self.plan.params(), backend)?;
        for (rule, now) in self.state.rules().iter().enumerate().skip(1) {
            session.state_mut().set_lr_of(rule, now.lr())?;
        }
        session.state_mut().set_optimizer(self.params.rule())?;
        if self.state.takes_any_settings() {
            session.state_mut().any_settings();
        }
        session.set_checkpoints(self.checkpoints);
        let mut ranked = Ranked {
            vars: self.vars,
            names: self.names,
            addresses: self.addresses,
            params: self.params,
            group_rules: self.group_rules,
            session,
            report: Report::default(),
            slices: options.distributed.into_iter().collect(),
        };
        ranked.follow()?;
        if ranked.session.bring_first()? {
            ranked.set_variables()?;
        } else {
            ranked.session.compare_settings()?;
        }
        Ok(ranked)
    }
}

/// Threads of a rank: its share of the machine where ranks are on one.
fn threads(options: &Options, topology: Topology) -> NonZeroUsize {
    let sharing = match topology.reach {
        Reach::SharedMemory => topology.world,
        Reach::Calls => 1,
    };
    let all = memory::threads(options);
    NonZeroUsize::new(all.div_ceil(sharing.max(1))).unwrap_or(NonZeroUsize::MIN)
}

impl<P: Params> Ranked<'_, P> {
    /// Computes the gradients of `loss` and ends a micro-step with them: at the last one of an
    /// update the variables change. Multiply the loss with [`Ranked::loss_scale`] before, if it is
    /// scaled.
    ///
    /// # Errors
    /// As [`Ranked::step`].
    pub fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        let grads = loss.backward()?;
        if self.plan().averaging().is_some_and(|rule| rule.interval == Interval::Adaptive) {
            let scaled = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            self.set_loss(scaled / self.loss_scale());
        }
        self.step(&grads)
    }

    /// Ends a micro-step with these gradients, each copied or added in one pass from where candle
    /// has it; at the last one of an update reduces them over ranks, updates, and writes the
    /// variables in place. A rank without data gives an empty store.
    ///
    /// A variable whose gradient is missing on some ranks has zero there; missing on all, it stays
    /// as it is.
    ///
    /// # Errors
    /// An [`AdapterError`] naming the variable whose gradient does not fit, a hyper-parameter out
    /// of range, a save behind that has failed: nothing has been written then. A call between ranks
    /// that failed, and the optimizer refuses further steps.
    pub fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        let stepped = self.take(grads).and_then(|gradients| self.try_step(&gradients));
        self.note(stepped)
    }

    /// Updates from fewer micro-steps than asked for, at an epoch's end; nothing if there are none.
    ///
    /// # Errors
    /// As [`Ranked::step`].
    pub fn flush(&mut self) -> candle_core::Result<()> {
        let flushed = self.try_flush();
        self.note(flushed)
    }

    /// The gradients that fit their variables.
    fn take(&self, grads: &GradStore) -> Result<Gradients, AdapterError> {
        self.check_devices()?;
        self.check_slices()?;
        let taken = Gradients::take(&self.vars, &self.addresses, grads);
        taken.map_err(AdapterError::from_candle)
    }

    fn try_flush(&mut self) -> Result<(), AdapterError> {
        self.begin_step()?;
        let ended = self.session.flush()?;
        self.take_up(ended)
    }

    fn try_step(&mut self, gradients: &Gradients) -> Result<(), AdapterError> {
        self.begin_step()?;
        // The last layer's first, as a backward pass finds them: so buckets become full in order.
        let named = self.vars.iter().zip(&gradients.of_var).rev();
        for ((name, _), grad) in named {
            let Some(grad) = grad else { continue };
            let (storage, layout) = grad.storage_and_layout();
            let bytes = bytes_of(&storage, layout).map_err(AdapterError::from_candle)?;
            self.session.push_grad_bytes(name, bytes)?;
        }
        let ended = self.session.step()?;
        self.report.copied_gradients = gradients.copied;
        self.take_up(ended)
    }

    /// Hears of a save that has failed, takes the settings of the moment, and meets other ranks.
    fn begin_step(&mut self) -> Result<(), AdapterError> {
        self.session.set_rule(0, self.params.rule())?;
        Ok(self.session.begin_step()?)
    }

    /// Reports an update and hands what is new to the variables.
    fn take_up(&mut self, ended: MicroStepReport) -> Result<(), AdapterError> {
        let Some(update) = ended.update else {
            return Ok(());
        };
        self.report = Report {
            dropped_micro_steps: ended.dropped_micro_steps,
            ..Report::of(&update, self.report.copied_gradients)
        };
        if update.skipped && !ended.averaged {
            return Ok(());
        }
        self.set_variables()
    }

    /// Writes the variables from the optimizer's own memory, in place.
    pub(crate) fn set_variables(&mut self) -> Result<(), AdapterError> {
        if self.plan().zero() == fusestep_planner::ZeroStage::Three {
            let names: Vec<&str> = self.vars.iter().map(|(name, _)| name.as_str()).collect();
            let gathered = self.session.gather(&names)?;
            for (index, (_, var)) in self.vars.iter().enumerate() {
                let written = write_in_place(var, &mut |own| copy(gathered.bytes(index), own));
                written.map_err(AdapterError::from_candle)?;
            }
            return Ok(());
        }
        for (name, var) in &self.vars {
            let written = write_in_place(var, &mut |own| {
                let read = self.session.read_param(name, own);
                read.map_err(candle_core::Error::wrap)
            });
            written.map_err(AdapterError::from_candle)?;
        }
        Ok(())
    }

    /// Takes the variables over into the optimizer's own memory.
    fn follow(&mut self) -> Result<(), AdapterError> {
        for (name, var) in &self.vars {
            let (storage, layout) = var.storage_and_layout();
            let bytes = bytes_of(&storage, layout).map_err(AdapterError::from_candle)?;
            self.session.write_param(name, bytes)?;
        }
        Ok(())
    }

    /// A variable moved since the optimizer was built would be read where it is no more.
    fn check_devices(&self) -> Result<(), AdapterError> {
        memory::check_host(&self.vars)
    }

    /// A variable that has become a slice since would get other ranks' gradients.
    fn check_slices(&self) -> Result<(), AdapterError> {
        let is_late = |(name, var): &&(String, Var)| {
            slices::ranks_of(var).is_some() && !self.slices.contains(name)
        };
        match self.vars.iter().find(is_late) {
            Some((name, _)) => Err(AdapterError::SplitLate { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// Remembers a failure: other ranks may wait elsewhere. One of a checkpoint comes on all of
    /// them in the same call.
    pub(crate) fn note<R>(&mut self, outcome: Result<R, AdapterError>) -> candle_core::Result<R> {
        if let Err(error) = &outcome
            && !error.is_of_checkpoint()
        {
            self.session.fail(error);
        }
        Ok(outcome?)
    }
}

impl<P: Params> Ranked<'_, P> {
    /// Hands variables that were written outside of a step on to the optimizer; all ranks write the
    /// same.
    ///
    /// # Errors
    /// An [`AdapterError`] if a variable is not contiguous in host memory any more.
    pub fn follow_variables(&mut self) -> candle_core::Result<()> {
        let followed = self.follow();
        self.session.meet_again();
        self.note(followed)
    }

    /// The factor to multiply the next loss with before `backward`; 1 without
    /// [`Options::loss_scale`].
    pub fn loss_scale(&self) -> f64 {
        self.session.loss_scale()
    }

    /// Tells the loss of the step under way, for an adaptive interval of LocalSGD;
    /// [`Ranked::backward_step`] tells its own.
    pub fn set_loss(&mut self, loss: f64) {
        self.session.set_loss(loss);
    }

    /// The weight of the micro-step under way, whose gradients are the mean over fewer examples
    /// than the others'; 1 unless it is set.
    ///
    /// # Errors
    /// As [`State::set_weight`].
    pub fn set_weight(&mut self, weight: f64) -> candle_core::Result<()> {
        let set = self.session.state_mut().set_weight(weight);
        Ok(set.map_err(AdapterError::from)?)
    }

    /// The hyper-parameters.
    pub fn params(&self) -> &P {
        &self.params
    }

    /// Sets the hyper-parameters from the next step on, which refuses values out of range; all
    /// ranks set the same.
    pub fn set_params(&mut self, params: P) {
        self.params = params;
    }

    /// The base learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.params.lr()
    }

    /// The learning rate of the next step ([`Fused::scheduled_rate`]).
    pub fn scheduled_rate(&self) -> f64 {
        self.params.lr() * self.state().lr_factor()
    }

    /// Sets the base learning rate from the next step on; all ranks set the same.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.params.set_lr(lr);
    }

    /// Sets a group's learning rate ([`Fused::set_group_learning_rate`]); all ranks set the same.
    ///
    /// # Errors
    /// As [`Fused::set_group_learning_rate`].
    pub fn set_group_learning_rate(&mut self, group: usize, lr: f64) -> candle_core::Result<()> {
        let rule = self.group_rules.number(group)?;
        Ok(group::set_lr(self.session.state_mut(), rule, &mut self.params, lr)?)
    }

    /// Files of other settings are taken from now on ([`State::any_settings`]); all ranks call it.
    pub fn any_settings(&mut self) {
        self.session.state_mut().any_settings();
    }

    /// Files of other settings are refused again ([`State::same_settings`]); all ranks call it.
    pub fn same_settings(&mut self) {
        self.session.state_mut().same_settings();
    }

    /// The plan of a step.
    pub fn plan(&self) -> &Plan {
        self.session.plan()
    }

    /// Report of the last update; launches and elements are this rank's.
    pub fn report(&self) -> Report {
        self.report
    }

    /// The optimizer's memory on this rank.
    pub fn state(&self) -> &State {
        self.session.state()
    }

    /// The communicator, for calls of one's own, which all ranks make between steps.
    pub fn communicator(&mut self) -> &mut dyn Communicator {
        self.session.communicator()
    }

    /// The variables with their names, in plan order.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }
}

/// candle's trait, for programs that train by any optimizer on one rank or on many.
impl<P: Params> Optimizer for Ranked<'_, P> {
    type Config = P;

    /// The optimizer of a world of one; [`Fused::on`] makes one of many ranks.
    fn new(vars: Vec<Var>, config: P) -> candle_core::Result<Self> {
        let fused = Fused::new(vars, config)?;
        memory::check_host(&fused.vars)?;
        Ok(fused.ranked(Topology::SOLO, |options, params, backend| {
            Session::new(options, params, Box::new(backend))
        })?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ranked::step(self, grads)
    }

    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        Ranked::backward_step(self, loss)
    }

    fn learning_rate(&self) -> f64 {
        Ranked::learning_rate(self)
    }

    fn set_learning_rate(&mut self, lr: f64) {
        Ranked::set_learning_rate(self, lr);
    }
}

//! The optimizer.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{Tensor, Var, WithDType};
use fusestep::{OptionError, Session};
use fusestep_checkpoint::save_state;
use fusestep_collective::Communicator;
use fusestep_planner::{Plan, State};
use fusestep_tensor::{Element, Role};
use half::bf16;

use crate::evaluate::with_values;
use crate::gradients::Addresses;
use crate::group::{self, GroupRules};
use crate::lend;
use crate::lend::copy;
use crate::memory::Memory;
use crate::variables::Names;
use crate::{AdapterError, Options, Params, Report};

/// An update rule on candle variables: one planned step over all of them, on one rank or many.
///
/// [`crate::AdamW`], [`crate::Sgd`], [`crate::Lars`] and the others are this with their
/// hyper-parameters; see the [crate's page](crate). One process steps in candle's own memory, on
/// all threads. [`Fused::on`] makes it one rank of a communicator: then gradients of micro-steps
/// are added, reduced over ranks and stepped with in the optimizer's own memory, and the variables
/// get what is new. All ranks make the same calls. Parameters get the same bits at every ZeRO
/// stage, with any bucket cap, any streams, and any number of threads.
#[derive(Debug)]
pub struct Fused<'c, P> {
    pub(crate) vars: Vec<(String, Var)>,
    pub(crate) names: Names,
    pub(crate) addresses: Addresses,
    pub(crate) params: P,
    pub(crate) options: Options,
    pub(crate) group_rules: GroupRules,
    pub(crate) session: Session<'c>,
    /// Tensors that steps update; behind the session, whose state lies in their memory.
    pub(crate) tensors: Tensors,
}

/// Tensors that steps update.
#[derive(Debug)]
pub(crate) enum Tensors {
    /// Variables, which candle lends for each call, and the setting that a step without ranks
    /// refuses.
    Borrowed { memory: Memory, needs_ranks: Option<OptionError> },
    /// Copies of the variables, of one process alone.
    Kept,
    /// Copies of the variables, of one rank; every rank has a slice of the named ones.
    OnRanks { slices: BTreeSet<String> },
}

impl<'c, P: Params> Fused<'c, P> {
    /// The factor to multiply the next loss with before `backward`; 1 without
    /// [`Options::loss_scale`].
    pub fn loss_scale(&self) -> f64 {
        self.session.loss_scale()
    }

    /// Tells the loss of the step under way, for its report and for an adaptive interval of
    /// LocalSGD; `backward_step` tells its own to whom [`Fused::on_step`] has set.
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

    /// The number, within the global batch of an update, of the micro-batch whose gradients this
    /// rank gives next; `None` without [`Options::lanes`], and once it has given all of its own.
    pub fn micro_batch(&self) -> Option<u64> {
        self.session.state().micro_batch()
    }

    /// Says that the next update is of so many micro-batches only.
    ///
    /// # Errors
    /// As [`State::set_micro_batches`].
    pub fn set_micro_batches(&mut self, count: u64) -> candle_core::Result<()> {
        let set = self.session.state_mut().set_micro_batches(count);
        Ok(set.map_err(AdapterError::from)?)
    }

    /// How far each variable moved in the last step, ‖new − old‖ in plan order; `None` without
    /// [`Options::update_norms`].
    ///
    /// # Errors
    /// An [`AdapterError`] inside candle's error: the sums cannot be read.
    pub fn update_norms(&self) -> candle_core::Result<Option<Vec<f64>>> {
        let norms = self.state().update_norms(self.session.backend());
        Ok(norms.map_err(AdapterError::from)?)
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

    /// The learning rate of the next step: the base rate, times the factor of
    /// [`Options::schedule`].
    pub fn scheduled_rate(&self) -> f64 {
        self.params.lr() * self.state().lr_factor()
    }

    /// Sets the learning rate of one of [`Options::groups`], counted from 0, from the next step on;
    /// groups that were given equal rules have one, and a group that was given the optimizer's own
    /// has the optimizer's. All ranks set the same.
    ///
    /// # Errors
    /// An [`AdapterError`] if there is no such group, or the rate is out of range.
    pub fn set_group_learning_rate(&mut self, group: usize, lr: f64) -> candle_core::Result<()> {
        let rule = self.group_rules.number(group)?;
        Ok(group::set_lr(self.session.state_mut(), rule, &mut self.params, lr)?)
    }

    /// The plan of a step.
    pub fn plan(&self) -> &Plan {
        self.session.plan()
    }

    /// Report of the last update; of zeros before the first one.
    pub fn report(&self) -> Report {
        self.session.report().copied().unwrap_or_default()
    }

    /// Calls `hook` with the report of every update from here on ([`Session::on_step`]), before the
    /// variables get what is new. [`Fused::on`] makes an optimizer without hook.
    pub fn on_step(&mut self, hook: impl FnMut(&Report) + Send + 'c) {
        self.session.on_step(hook);
    }

    /// Measures the seconds of every step's parts from here on ([`Session::time_steps`]).
    pub fn time_steps(&mut self) {
        self.session.time_steps();
    }

    /// The optimizer's memory on this rank.
    pub fn state(&self) -> &State {
        self.session.state()
    }

    /// The communicator, for calls of one's own, which all ranks make between steps; that of a
    /// world of one without [`Fused::on`].
    pub fn communicator(&mut self) -> &mut dyn Communicator {
        self.session.communicator()
    }

    /// The variables with their names, in plan order.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// A copy of one of the optimizer's own tensors of a variable, such as its first moment.
    ///
    /// # Errors
    /// An [`AdapterError`] if there is no such variable or tensor, or other ranks have parts of it.
    pub fn moment(&self, role: Role, name: &str) -> candle_core::Result<Tensor> {
        let var = self.vars.iter().find(|(known, _)| known == name);
        let shape = var.map_or(candle_core::Shape::from(()), |(_, var)| var.shape().clone());
        let dtype = self.state().dtype(role, name).map_err(AdapterError::from)?;
        match dtype {
            fusestep_tensor::DType::F64 => self.copy::<f64>(role, name, shape),
            fusestep_tensor::DType::BF16 => self.copy::<bf16>(role, name, shape),
            // Every other list is f32, but for remainders, whose bits are no values: reading them
            // as f32 is refused.
            _ => self.copy::<f32>(role, name, shape),
        }
    }

    fn copy<T: Element + WithDType>(
        &self,
        role: Role,
        name: &str,
        shape: candle_core::Shape,
    ) -> candle_core::Result<Tensor> {
        let cpu = &candle_core::Device::Cpu;
        let (state, backend) = (self.state(), self.session.backend());
        if backend.host().is_some() {
            let values = state.view::<T>(role, name);
            let values = values.map_err(AdapterError::from)?;
            return Tensor::from_slice(values, shape, cpu);
        }
        let mut values = vec![T::default(); shape.elem_count()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        let read = state.read(backend, role, name, bytes);
        read.map_err(AdapterError::from)?;
        Tensor::from_vec(values, shape, cpu)
    }

    /// Writes the optimizer's own tensors and step counts as a safetensors file: `<name>@moment1`,
    /// …, metadata `step`.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, tensors that ranks share out, or the file cannot be written;
    /// an existing file is as it was then.
    pub fn save(&self, path: impl AsRef<Path>) -> candle_core::Result<()> {
        self.names.check()?;
        let saved = save_state(self.state(), self.session.backend(), path.as_ref());
        Ok(saved.map_err(AdapterError::from)?)
    }

    /// Reads what [`Fused::save`] wrote; all ranks read the same.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, or a file that is not this optimizer's; nothing has changed
    /// then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> candle_core::Result<()> {
        self.names.check()?;
        let loaded = self.session.load_state(path);
        loaded.map_err(AdapterError::from)?;
        Ok(())
    }

    /// Files of other settings are loaded and resumed from now on ([`State::any_settings`]), also
    /// by the optimizer of many ranks that [`Fused::on`] makes of it; all ranks call it.
    pub fn any_settings(&mut self) {
        self.session.state_mut().any_settings();
    }

    /// Files of other settings are refused from now on, as at first ([`State::same_settings`]); all
    /// ranks call it.
    pub fn same_settings(&mut self) {
        self.session.state_mut().same_settings();
    }

    /// Runs `work` while the variables have the values for evaluation. Under
    /// [`crate::ScheduleFree`] these are the averages, as after `optimizer.eval()` of its authors'
    /// package. Under any other rule the variables keep their values. Afterwards the averaged
    /// variables have their old bits, whether `work` succeeds, fails or panics, and writes of
    /// `work` to them are lost. All ranks call it.
    ///
    /// # Errors
    /// That of `work`; an [`AdapterError`] if a variable is not contiguous in host memory any more,
    /// or a call between ranks fails.
    /// # Cost
    /// None if the variables keep their values; else a copy of them for as long as `work` runs, and
    /// a pass over the optimizer's state.
    pub fn evaluate<R>(
        &mut self,
        work: impl FnOnce() -> candle_core::Result<R>,
    ) -> candle_core::Result<R> {
        if !self.state().averages() {
            return work();
        }
        if let Tensors::Borrowed { .. } = &self.tensors {
            return with_values(&self.vars, work, |index, bytes| {
                let averaged = self.session.average_borrowed(&self.vars[index].0, bytes);
                Ok(averaged.map_err(AdapterError::from)?)
            });
        }
        let names: Vec<&str> = self.vars.iter().map(|(name, _)| name.as_str()).collect();
        let gathered = self.session.gather_averages(&names);
        let gathered = gathered.map_err(AdapterError::from)?;
        with_values(&self.vars, work, |index, bytes| copy(gathered.bytes(index), bytes))
    }

    /// Hands variables that were written outside of a step on to the optimizer: to f32 masters that
    /// do not round to them, and to the optimizer's own copies. All ranks write the same.
    ///
    /// # Errors
    /// An [`AdapterError`] if memory cannot be had, or a variable is not contiguous any more.
    pub fn follow_variables(&mut self) -> candle_core::Result<()> {
        let followed = self.follow();
        self.session.meet_again();
        self.note(followed)
    }

    pub(crate) fn follow(&mut self) -> Result<(), AdapterError> {
        let (session, is_lent) =
            (&mut self.session, matches!(self.tensors, Tensors::Borrowed { .. }));
        for (name, var) in &self.vars {
            let followed = lend::with_bytes(var.as_tensor(), |bytes| {
                Ok(if is_lent {
                    session.follow_borrowed(name, bytes)
                } else {
                    session.write_param(name, bytes)
                })
            });
            followed.map_err(AdapterError::from_candle)??;
        }
        Ok(())
    }

    /// Remembers a failure: other ranks may wait elsewhere. One of a checkpoint comes on all of
    /// them in the same call.
    pub(crate) fn note<R>(&mut self, outcome: Result<R, AdapterError>) -> candle_core::Result<R> {
        if let (Err(error), Tensors::OnRanks { .. }) = (&outcome, &self.tensors)
            && !error.is_of_checkpoint()
        {
            self.session.fail(error);
        }
        Ok(outcome?)
    }
}

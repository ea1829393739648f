//! The optimizer.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var, WithDType};
use candle_nn::Optimizer;
use fusestep_collective::require_alone;
use fusestep_planner::{Checkpoints, Plan, State, StepReport};
use fusestep_tensor::{Element, Role};
use half::bf16;

use crate::gradients::{Addresses, Gradients};
use crate::group::{self, GroupRules};
use crate::lend;
use crate::memory::Memory;
use crate::planning::Settings;
use crate::variables::{Names, Variables};
use crate::{AdapterError, IntoVariables, OptionError, Options, Params};

/// An update rule on candle variables: one planned step over all of them, in place, on all threads.
///
/// [`crate::AdamW`], [`crate::Sgd`], [`crate::Lars`] and the others are this with their
/// hyper-parameters; see the [crate's page](crate).
#[derive(Debug)]
pub struct Fused<P> {
    pub(crate) vars: Vec<(String, Var)>,
    pub(crate) names: Names,
    pub(crate) addresses: Addresses,
    pub(crate) params: P,
    pub(crate) options: Options,
    /// The setting that a step without ranks refuses.
    needs_ranks: Option<OptionError>,
    pub(crate) group_rules: GroupRules,
    pub(crate) plan: Plan,
    pub(crate) state: State,
    /// Behind the state, whose memory it gave.
    pub(crate) memory: Memory,
    report: Report,
    pub(crate) checkpoints: Checkpoints,
    /// Whether the variables are what a model is evaluated with.
    pub(crate) evaluating: AtomicBool,
}

/// Report of the last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Steps run.
    pub step: u64,
    /// Launches issued.
    pub launches: u64,
    /// Elements updated.
    pub elements: u64,
    /// Variables that had no gradient and stayed as they were.
    pub without_gradient: u64,
    /// Gradients that had to be copied: not contiguous, or lying in a variable's own memory.
    pub copied_gradients: u64,
    /// Norm of all gradients, with the loss scale taken out; `None` unless [`Options`] clip or
    /// scale.
    pub grad_norm: Option<f64>,
    /// Norm of what the step changed in all variables, ‖new − old‖; `None` unless [`Options`] ask
    /// for it.
    pub update_norm: Option<f64>,
    /// Gradient elements that are infinite or NaN; counted where [`Options`] clip or scale.
    pub non_finite: u64,
    /// Whether the step was skipped because of them: no variable, no state and no step count has
    /// changed.
    pub skipped: bool,
    /// Micro-steps whose gradients went with the skipped step: one, or all whose gradients were
    /// added for it.
    pub dropped_micro_steps: u32,
}

impl Report {
    pub(crate) fn of(report: &StepReport, copied_gradients: u64) -> Self {
        Self {
            step: report.step,
            launches: report.launches,
            elements: report.elements,
            without_gradient: report.without_gradient,
            copied_gradients,
            grad_norm: report.grad_norm,
            update_norm: report.update_norm,
            non_finite: report.non_finite,
            skipped: report.skipped,
            dropped_micro_steps: report.skipped.into(),
        }
    }
}

impl<P: Params> Fused<P> {
    /// An optimizer of these variables on the threads of rayon's pool, in which candle works, too.
    ///
    /// # Errors
    /// An [`AdapterError`] inside candle's error: a hyper-parameter out of range, a variable of
    /// another dtype than f32, f64, f16 or bf16, or that is neither on the CPU nor, with the
    /// feature `cuda`, on the CUDA device of the others, or one given twice; no variables at all.
    pub fn new(vars: impl IntoVariables, params: P) -> candle_core::Result<Self> {
        Self::with_options(vars, params, &Options::default())
    }

    /// [`Fused::new`] with the other hyper-parameters at their defaults.
    ///
    /// # Errors
    /// As [`Fused::new`].
    pub fn new_lr(vars: impl IntoVariables, learning_rate: f64) -> candle_core::Result<Self>
    where
        P: Default,
    {
        let mut params = P::default();
        params.set_lr(learning_rate);
        Self::new(vars, params)
    }

    /// [`Fused::new`] on the caller's thread and at most `threads − 1` of rayon's; the bits do not
    /// depend on it.
    ///
    /// # Errors
    /// As [`Fused::new`].
    pub fn with_threads(
        vars: impl IntoVariables,
        params: P,
        threads: NonZeroUsize,
    ) -> candle_core::Result<Self> {
        let options = Options { threads: Some(threads.get()), ..Options::default() };
        Self::with_options(vars, params, &options)
    }

    /// An optimizer without any pass: one launch per variable. The oracle of the fused one.
    ///
    /// # Errors
    /// As [`Fused::new`].
    pub fn naive(
        vars: impl IntoVariables,
        params: P,
        threads: NonZeroUsize,
    ) -> candle_core::Result<Self> {
        let threads = Some(threads.get());
        let options = Options { threads, naive: true, ..Options::default() };
        Self::with_options(vars, params, &options)
    }

    /// [`Fused::new`] with clipping, loss scaling, 16-bit variables and their masters, and the rest
    /// of [`Options`].
    ///
    /// # Errors
    /// As [`Fused::new`], and for an option out of range, a precision that a variable cannot have,
    /// and a text of [`Options::exclude`] or [`Options::groups`] that is in no variable's name.
    pub fn with_options(
        vars: impl IntoVariables,
        params: P,
        options: &Options,
    ) -> candle_core::Result<Self> {
        let variables = vars.into_variables().floating_point();
        let memory = Memory::of(&variables.vars, options)?;
        let backend = memory.backend();
        let descriptors = variables.descriptors(options, &memory)?;
        let planner = options.borrowing_planner(params.rule(), &descriptors, backend.limits());
        let planner = planner.map_err(AdapterError::from)?;
        let plan = planner.plan(&descriptors).map_err(AdapterError::from)?;
        let state = plan.allocate(backend).map_err(AdapterError::from)?;
        let Variables { vars, names } = variables;
        let mut optimizer = Self {
            addresses: Addresses::of(&vars),
            vars,
            names,
            params,
            options: options.clone(),
            // Names that are known to be slices change nothing of a rank's own step.
            needs_ranks: Options { distributed: Vec::new(), ..options.clone() }
                .check_borrowed()
                .err(),
            group_rules: GroupRules::of(&options.groups, state.rules()),
            plan,
            state,
            memory,
            report: Report::default(),
            checkpoints: Checkpoints::default(),
            evaluating: AtomicBool::new(false),
        };
        optimizer.follow_variables()?;
        Ok(optimizer)
    }

    /// Lets f32 masters follow variables that were written outside of a step, where they do not
    /// round to the values there.
    ///
    /// # Errors
    /// An [`AdapterError`] if memory cannot be had.
    pub fn follow_variables(&mut self) -> candle_core::Result<()> {
        for (name, var) in &self.vars {
            let (state, backend) = (&mut self.state, self.memory.backend());
            lend::with_bytes(var.as_tensor(), |bytes| {
                let done = state.follow_borrowed(backend, name, bytes);
                Ok(done.map_err(AdapterError::from)?)
            })?;
        }
        Ok(())
    }

    /// The factor to multiply the next loss with before `backward`; 1 without
    /// [`Options::loss_scale`].
    pub fn loss_scale(&self) -> f64 {
        let scale = self.state.loss_scale();
        scale.map_or(1.0, |scale| scale.scale())
    }

    /// How far each variable moved in the last step, ‖new − old‖ in plan order; `None` without
    /// [`Options::update_norms`].
    ///
    /// # Errors
    /// An [`AdapterError`] inside candle's error: the sums cannot be read.
    pub fn update_norms(&self) -> candle_core::Result<Option<Vec<f64>>> {
        let norms = self.state.update_norms(self.memory.backend());
        Ok(norms.map_err(AdapterError::from)?)
    }

    /// The hyper-parameters.
    pub fn params(&self) -> &P {
        &self.params
    }

    /// Sets the hyper-parameters from the next step on; that step refuses values out of range.
    pub fn set_params(&mut self, params: P) {
        self.params = params;
    }

    /// Sets the learning rate of one of [`Options::groups`], counted from 0, from the next step on;
    /// groups that were given equal rules have one, and a group that was given the optimizer's own
    /// has the optimizer's.
    ///
    /// # Errors
    /// An [`AdapterError`] if there is no such group, or the rate is out of range.
    pub fn set_group_learning_rate(&mut self, group: usize, lr: f64) -> candle_core::Result<()> {
        let rule = self.group_rules.number(group)?;
        Ok(group::set_lr(&mut self.state, rule, &mut self.params, lr)?)
    }

    /// The learning rate of the next step: the base rate, times the factor of
    /// [`Options::schedule`].
    pub fn scheduled_rate(&self) -> f64 {
        self.params.lr() * self.state.lr_factor()
    }

    /// The plan of a step.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Report of the last step.
    pub fn report(&self) -> Report {
        self.report
    }

    /// The variables with their names, in plan order.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// A copy of one of the optimizer's own tensors of a variable, such as its first moment.
    ///
    /// # Errors
    /// An [`AdapterError`] if there is no such variable or tensor.
    pub fn moment(&self, role: Role, name: &str) -> candle_core::Result<Tensor> {
        let var = self.vars.iter().find(|(known, _)| known == name);
        let shape = var.map_or(candle_core::Shape::from(()), |(_, var)| var.shape().clone());
        let dtype = self.state.dtype(role, name).map_err(AdapterError::from)?;
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
        let backend = self.memory.backend();
        if backend.host().is_some() {
            let values = self.state.view::<T>(role, name);
            let values = values.map_err(AdapterError::from)?;
            return Tensor::from_slice(values, shape, cpu);
        }
        let mut values = vec![T::default(); shape.elem_count()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        let read = self.state.read(backend, role, name, bytes);
        read.map_err(AdapterError::from)?;
        Tensor::from_vec(values, shape, cpu)
    }

    /// Writes the optimizer's own tensors and step counts as a safetensors file: `<name>@moment1`,
    /// …, metadata `step`.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, or the file cannot be written; an existing file is as it was
    /// then.
    pub fn save(&self, path: impl AsRef<Path>) -> candle_core::Result<()> {
        self.names.check()?;
        let saved = self.state.save(self.memory.backend(), path.as_ref());
        Ok(saved.map_err(AdapterError::from)?)
    }

    /// Files of other settings are loaded and resumed from now on ([`State::any_settings`]), also
    /// by the optimizer of many ranks that [`Fused::on`] makes of it.
    pub fn any_settings(&mut self) {
        self.state.any_settings();
    }

    /// Files of other settings are refused from now on, as at first ([`State::same_settings`]).
    pub fn same_settings(&mut self) {
        self.state.same_settings();
    }

    /// Reads what [`Fused::save`] wrote.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, or a file that is not this optimizer's; nothing has changed
    /// then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> candle_core::Result<()> {
        self.names.check()?;
        let loaded = self.state.load(self.memory.backend(), path.as_ref());
        loaded.map_err(AdapterError::from)?;
        Ok(())
    }
}

impl<P: Params> Optimizer for Fused<P> {
    type Config = P;

    fn new(vars: Vec<Var>, config: P) -> candle_core::Result<Self> {
        Fused::new(vars, config)
    }

    /// Updates all variables that have a gradient, in place.
    ///
    /// # Errors
    /// An [`AdapterError`] naming the variable whose gradient does not fit, or a hyper-parameter
    /// out of range; nothing has been written then. In a process of a launcher that has joined none
    /// of the others [`AdapterError::TakenForWhole`].
    /// # Cost
    /// The memory traffic of the rule's kernel, 28 bytes per f32 element for AdamW; one lock at a
    /// time on each thread.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        require_alone().map_err(AdapterError::from)?;
        if let Some(refused) = &self.needs_ranks {
            return Err(AdapterError::from(refused.clone()).into());
        }
        self.options.check_slices(&self.vars, self.state.rules())?;
        self.look_after_saves()?;
        let gradients = Gradients::take(&self.vars, &self.addresses, grads)?;
        let rule = self.params.rule();
        if rule != *self.state.optimizer() {
            let set = self.state.set_optimizer(rule);
            set.map_err(AdapterError::from)?;
        }
        for (index, grad) in gradients.of_var.iter().enumerate() {
            if grad.is_none() {
                self.state.set_without_gradient_at(index);
            }
        }
        let report = self.memory.step(&self.plan, &mut self.state, &self.vars, &gradients)?;
        self.report = Report::of(&report, gradients.copied);
        Ok(())
    }

    /// The base rate; [`Fused::scheduled_rate`] is what the next step takes.
    fn learning_rate(&self) -> f64 {
        self.params.lr()
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.params.set_lr(lr);
    }
}

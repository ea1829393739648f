//! The optimizer.

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Tensor, Var, WithDType};
use candle_nn::Optimizer;
use fusestep_cpu::{CpuBackend, LentPiece};
use fusestep_launch::{Backend, BackendError};
use fusestep_planner::{Plan, Planner, State, Tensors};
use fusestep_tensor::{Element, Role};
use half::{bf16, f16};

use crate::gradients::{Addresses, Gradients};
use crate::variables::{Names, Variables};
use crate::{AdapterError, IntoVariables, Params};

/// An update rule on candle variables: one planned step over all of them, in place, on all threads.
///
/// [`crate::AdamW`], [`crate::Sgd`] and [`crate::Lion`] are this with their hyper-parameters; see the [crate's page](crate).
#[derive(Debug)]
pub struct Fused<P> {
    vars: Vec<(String, Var)>,
    names: Names,
    addresses: Addresses,
    params: P,
    plan: Plan,
    state: State,
    backend: CpuBackend,
    report: Report,
}

/// What the last step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Steps run.
    pub step: u64,
    /// Launches issued.
    pub launches: u64,
    /// Elements updated.
    pub elements: u64,
    /// Variables that had no gradient and stayed as they were.
    pub absent: u64,
    /// Gradients that had to be copied: not contiguous, or lying in a variable's own memory.
    pub copied_gradients: u64,
}

impl<P: Params> Fused<P> {
    /// An optimizer of these variables on all threads of the machine.
    ///
    /// # Errors
    /// An [`AdapterError`] inside candle's error: a hyper-parameter out of range, a variable of another dtype or device than f32,
    /// f64, f16 or bf16 on the CPU, or one given twice.
    pub fn new(vars: impl IntoVariables, params: P) -> candle_core::Result<Self> {
        let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self::with_threads(vars, params, threads)
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

    /// [`Fused::new`] on a given number of threads, the caller's included; the bits do not depend on it.
    ///
    /// # Errors
    /// As [`Fused::new`].
    pub fn with_threads(
        vars: impl IntoVariables,
        params: P,
        threads: NonZeroUsize,
    ) -> candle_core::Result<Self> {
        let backend = CpuBackend::new(threads).map_err(AdapterError::from)?;
        let planner = Planner::new(params.rule()).limits(backend.limits());
        Self::with_planner(vars, params, planner, backend)
    }

    /// [`Fused::with_threads`] on a planner that `planned` has changed: how exactly variables and state are kept
    /// ([`Planner::precision`]), other passes.
    ///
    /// # Errors
    /// As [`Fused::new`], and for a precision that a variable cannot have.
    pub fn with_plan(
        vars: impl IntoVariables,
        params: P,
        threads: NonZeroUsize,
        planned: impl FnOnce(Planner) -> Planner,
    ) -> candle_core::Result<Self> {
        let backend = CpuBackend::new(threads).map_err(AdapterError::from)?;
        let planner = Planner::new(params.rule()).limits(backend.limits());
        Self::with_planner(vars, params, planned(planner), backend)
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
        let backend = CpuBackend::new(threads).map_err(AdapterError::from)?;
        let planner = Planner::new(params.rule()).limits(backend.limits()).naive();
        Self::with_planner(vars, params, planner, backend)
    }

    fn with_planner(
        vars: impl IntoVariables,
        params: P,
        planner: Planner,
        backend: CpuBackend,
    ) -> candle_core::Result<Self> {
        let variables = vars.into_variables().floating_point();
        let descriptors = variables.descriptors()?;
        let plan = planner.tensors(Tensors::Lent).plan(&descriptors);
        let plan = plan.map_err(AdapterError::from)?;
        let state = plan.allocate(&backend).map_err(AdapterError::from)?;
        let Variables { vars, names } = variables;
        let mut optimizer = Self {
            addresses: Addresses::of(&vars),
            vars,
            names,
            params,
            plan,
            state,
            backend,
            report: Report::default(),
        };
        optimizer.follow_variables()?;
        Ok(optimizer)
    }

    /// Lets f32 master weights take over what variables were set to since the last step; without such masters there is nothing to
    /// do. Masters take over the variables' first values by themselves.
    ///
    /// # Errors
    /// An [`AdapterError`] if a variable was replaced by one of another shape or dtype.
    pub fn follow_variables(&mut self) -> candle_core::Result<()> {
        for (name, var) in &self.vars {
            let roles = self.state.roles(name).map_err(AdapterError::from)?;
            if !roles.contains(&Role::Master) {
                continue;
            }
            let flat = var.as_tensor().flatten_all()?;
            let bytes: Vec<u8> = match var.dtype() {
                DType::F16 => bytemuck::cast_slice(&flat.to_vec1::<f16>()?).to_vec(),
                DType::BF16 => bytemuck::cast_slice(&flat.to_vec1::<bf16>()?).to_vec(),
                _ => continue,
            };
            let followed = self.state.follow_lent(&self.backend, name, &bytes);
            followed.map_err(AdapterError::from)?;
        }
        Ok(())
    }

    /// The hyper-parameters.
    pub fn params(&self) -> &P {
        &self.params
    }

    /// Sets the hyper-parameters from the next step on; that step refuses values out of range.
    pub fn set_params(&mut self, params: P) {
        self.params = params;
    }

    /// The plan of a step.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the last step did.
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
            // Every other list is f32, but for remainders, whose bits are no values: reading them as f32 is refused.
            _ => self.copy::<f32>(role, name, shape),
        }
    }

    fn copy<T: Element + WithDType>(
        &self,
        role: Role,
        name: &str,
        shape: candle_core::Shape,
    ) -> candle_core::Result<Tensor> {
        let values = self.state.view::<T>(role, name);
        let values = values.map_err(AdapterError::from)?;
        Tensor::from_slice(values, shape, &candle_core::Device::Cpu)
    }

    /// Writes the optimizer's own tensors and step counts as a safetensors file: `<name>@moment1`, …, metadata `step`.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, or the file cannot be written; an existing file is as it was then.
    pub fn save(&self, path: impl AsRef<Path>) -> candle_core::Result<()> {
        self.check_named()?;
        let saved = self.state.save(&self.backend, path.as_ref());
        Ok(saved.map_err(AdapterError::from)?)
    }

    /// Reads what [`Fused::save`] wrote.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, or a file that is not this optimizer's; nothing has changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> candle_core::Result<()> {
        self.check_named()?;
        let loaded = self.state.load(&self.backend, path.as_ref());
        Ok(loaded.map_err(AdapterError::from)?)
    }

    fn check_named(&self) -> Result<(), AdapterError> {
        match self.names {
            Names::Given => Ok(()),
            Names::Positions => Err(AdapterError::Unnamed),
        }
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
    /// An [`AdapterError`] naming the variable whose gradient does not fit, or a hyper-parameter out of range; nothing has been
    /// written then.
    /// # Cost
    /// The memory traffic of the rule's kernel, 28 bytes per f32 element for AdamW; one lock at a time on each thread.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        let gradients = Gradients::take(&self.vars, &self.addresses, grads)?;
        let rule = self.params.rule();
        if rule != *self.state.optimizer() {
            let set = self.state.set_optimizer(rule);
            set.map_err(AdapterError::from)?;
        }
        for (index, grad) in gradients.of_var.iter().enumerate() {
            if grad.is_none() {
                self.state.set_absent_at(index);
            }
        }
        let (vars, backend) = (&self.vars, &self.backend);
        let report = self.plan.run_each(&mut self.state, &mut |launch| {
            let members = launch.members;
            backend.launch_lent(launch, &|piece| {
                let member = members[piece.tensor()] as usize;
                match &gradients.of_var[member] {
                    Some(grad) => lend(&vars[member], grad, piece),
                    None => Ok(()),
                }
            })
        });
        let report = report.map_err(AdapterError::from)?;
        self.report = Report {
            step: report.step,
            launches: report.launches,
            elements: report.elements,
            absent: report.absent,
            copied_gradients: gradients.copied,
        };
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr()
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.params.set_lr(lr);
    }
}

/// Lets candle lock one variable and its gradient and updates the variable in place.
fn lend(
    (name, var): &(String, Var),
    grad: &Tensor,
    piece: LentPiece<'_>,
) -> Result<(), BackendError> {
    let update = Update(Cell::new(Some(piece)));
    let done = var.as_tensor().inplace_op2(grad, &update);
    done.map_err(|error| BackendError::Device {
        backend: "cpu",
        operation: format!("updating variable `{name}`"),
        code: 0,
        text: error.to_string(),
    })
}

/// The update as an in-place operation of candle; taken out of its cell when candle calls it, once.
struct Update<'a>(Cell<Option<LentPiece<'a>>>);

impl InplaceOp2 for Update<'_> {
    fn name(&self) -> &'static str {
        "fused-step"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        param_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> candle_core::Result<()> {
        let name = InplaceOp2::name(self);
        let (Some(param_range), Some(grad_range)) = (
            param_layout.contiguous_offsets(),
            grad_layout.contiguous_offsets(),
        ) else {
            candle_core::bail!("{name}: expected contiguous tensors, found strides")
        };
        let Some(piece) = self.0.take() else {
            candle_core::bail!("{name}: expected one call for each update, found a second")
        };
        let (params, grads) = (param_range.0..param_range.1, grad_range.0..grad_range.1);
        let (param, grad): (&mut [u8], &[u8]) = match (param, grad) {
            (CpuStorage::F32(param), CpuStorage::F32(grad)) => (
                bytemuck::cast_slice_mut(&mut param[params]),
                bytemuck::cast_slice(&grad[grads]),
            ),
            (CpuStorage::F64(param), CpuStorage::F64(grad)) => (
                bytemuck::cast_slice_mut(&mut param[params]),
                bytemuck::cast_slice(&grad[grads]),
            ),
            (CpuStorage::F16(param), CpuStorage::F16(grad)) => (
                bytemuck::cast_slice_mut(&mut param[params]),
                bytemuck::cast_slice(&grad[grads]),
            ),
            (CpuStorage::BF16(param), CpuStorage::BF16(grad)) => (
                bytemuck::cast_slice_mut(&mut param[params]),
                bytemuck::cast_slice(&grad[grads]),
            ),
            _ => candle_core::bail!("{name}: expected f32, f64, f16 or bf16 tensors of one dtype"),
        };
        piece.update(param, grad).map_err(candle_core::Error::wrap)
    }
}

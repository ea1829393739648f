//! Steps, in candle's memory or in the optimizer's own.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer;
use fusestep_collective::require_alone;
use fusestep_planner::{Interval, MicroStepReport, ZeroStage};

use crate::fused::Tensors;
use crate::gradients::Gradients;
use crate::lend::{bytes_of, copy, write_in_place};
use crate::{AdapterError, Fused, Params, memory, slices};

impl<P: Params> Fused<'_, P> {
    /// Updates from fewer micro-steps than asked for, at an epoch's end; nothing if there are none.
    ///
    /// # Errors
    /// As [`Fused::step`].
    pub fn flush(&mut self) -> candle_core::Result<()> {
        let flushed = match &self.tensors {
            // Every micro-step is an update there.
            Tensors::Borrowed { .. } => {
                self.check().and_then(|()| Ok(self.session.begin_step()?))
            }
            Tensors::Kept | Tensors::OnRanks { .. } => self.flush_kept(),
        };
        self.note(flushed)
    }

    /// The gradients that fit their variables, once nothing speaks against a step.
    fn take(&self, grads: &GradStore) -> Result<Gradients, AdapterError> {
        self.check()?;
        let taken = Gradients::take(&self.vars, &self.addresses, grads, self.plan());
        taken.map_err(AdapterError::from_candle)
    }

    /// Refuses what the variables or this process's place among others speak against.
    fn check(&self) -> Result<(), AdapterError> {
        let check_alone = || {
            require_alone()?;
            slices::check_alone(&self.options, &self.vars, self.state().rules())
        };
        match &self.tensors {
            Tensors::Borrowed { needs_ranks, .. } => match needs_ranks {
                Some(refused) => require_alone()
                    .map_err(AdapterError::from)
                    .and_then(|()| Err(refused.clone().into())),
                None => check_alone(),
            },
            // A variable moved since the optimizer was built would be read where it is no more.
            Tensors::Kept => {
                memory::check_host(&self.vars)?;
                check_alone()
            }
            Tensors::OnRanks { slices } => {
                memory::check_host(&self.vars)?;
                slices::check_known(slices, &self.vars)
            }
        }
    }

    fn step_borrowed(&mut self, gradients: &Gradients) -> Result<(), AdapterError> {
        let Tensors::Borrowed { memory, .. } = &self.tensors else { return Ok(()) };
        self.session.set_rule(0, self.params.rule())?;
        for (index, grad) in gradients.of_var.iter().enumerate() {
            if grad.is_none() {
                self.session.state_mut().set_without_gradient_at(index);
            }
        }
        self.session.count_copied(gradients.copied);
        memory.step(&mut self.session, &self.vars, gradients)?;
        Ok(())
    }

    fn step_kept(&mut self, gradients: &Gradients) -> Result<(), AdapterError> {
        self.begin_step()?;
        // The last layer's first, as a backward pass finds them: so buckets become full in order.
        let named = self.vars.iter().zip(&gradients.of_var).rev();
        for ((name, _), grad) in named {
            let Some(grad) = grad else { continue };
            let (storage, layout) = grad.storage_and_layout();
            let bytes = bytes_of(&storage, layout).map_err(AdapterError::from_candle)?;
            self.session.push_grad_bytes(name, bytes)?;
        }
        self.session.count_copied(gradients.copied);
        let ended = self.session.step()?;
        self.take_up(ended)
    }

    fn flush_kept(&mut self) -> Result<(), AdapterError> {
        self.check()?;
        self.begin_step()?;
        let ended = self.session.flush()?;
        self.take_up(ended)
    }

    /// Hears of a save that has failed, takes the settings of the moment, and meets other ranks.
    fn begin_step(&mut self) -> Result<(), AdapterError> {
        self.session.set_rule(0, self.params.rule())?;
        Ok(self.session.begin_step()?)
    }

    /// Hands what an update has made to the variables.
    fn take_up(&mut self, ended: MicroStepReport) -> Result<(), AdapterError> {
        let Some(update) = ended.update else {
            return Ok(());
        };
        if update.skipped && !ended.averaged {
            return Ok(());
        }
        self.set_variables()
    }

    /// Writes the variables from the optimizer's own memory, in place.
    pub(crate) fn set_variables(&mut self) -> Result<(), AdapterError> {
        if self.plan().zero() == ZeroStage::Three {
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
}

/// candle's trait, for programs that train by any optimizer, on one rank or on many.
impl<P: Params> Optimizer for Fused<'_, P> {
    type Config = P;

    fn new(vars: Vec<Var>, config: P) -> candle_core::Result<Self> {
        Fused::new(vars, config)
    }

    /// Computes the gradients of `loss` and ends a micro-step with them: at the last one of an
    /// update the variables change. Multiply the loss with [`Fused::loss_scale`] before, if it is
    /// scaled.
    ///
    /// # Errors
    /// As [`Fused::step`].
    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        let grads = loss.backward()?;
        let adapts = self.plan().averaging();
        let adapts = adapts.is_some_and(|rule| rule.interval == Interval::Adaptive);
        // A loss on a device is waited for, so nobody pays for what nobody hears.
        if adapts || self.session.is_heard() {
            let scaled = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            self.set_loss(scaled / self.loss_scale());
        }
        self.step(&grads)
    }

    /// Ends a micro-step with these gradients; at the last one of an update the variables change,
    /// in place.
    ///
    /// One process updates the variables where they are, and a variable without a gradient stays as
    /// it is. On ranks each gradient is copied or added in one pass from where candle has it, and
    /// reduced over ranks. A rank without data gives an empty store. A variable whose gradient is
    /// missing on some ranks has zero there; missing on all, it stays as it is.
    ///
    /// # Errors
    /// An [`AdapterError`] naming the variable whose gradient does not fit, a hyper-parameter out
    /// of range, a save behind that has failed: nothing has been written then. In a process of a
    /// launcher that has joined none of the others [`AdapterError::TakenForWhole`]. A call between
    /// ranks that failed, and the optimizer refuses further steps.
    /// # Cost
    /// The memory traffic of the rule's kernel, 28 bytes per f32 element for AdamW; one lock of
    /// candle's at a time on each thread.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        let stepped = self.take(grads).and_then(|gradients| match &self.tensors {
            Tensors::Borrowed { .. } => self.step_borrowed(&gradients),
            Tensors::Kept | Tensors::OnRanks { .. } => self.step_kept(&gradients),
        });
        self.note(stepped)
    }

    /// The base learning rate; [`Fused::scheduled_rate`] is what the next step takes.
    fn learning_rate(&self) -> f64 {
        self.params.lr()
    }

    /// Sets the base learning rate from the next step on; all ranks set the same.
    fn set_learning_rate(&mut self, lr: f64) {
        self.params.set_lr(lr);
    }
}

//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::{Tensor, step_tensor};
use fusestep_launch::{
    Format, HostCall, HostList, MAX_LISTS, MultiTensorKernel, Outcome, Precision, SetValues,
    UpdateRule,
};
use fusestep_simd::{Level, Team};
use fusestep_tensor::Trust;

use crate::device::Compute;
use crate::{Lamb, LambError, LambKernel};

/// The tensors of one parameter, and its own hyper-parameters; all slices have the same numel, 0
/// allowed.
#[derive(Debug)]
pub struct LambTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// m, updated in place; zeros before step 1.
    pub moment1: &'a mut [T],
    /// v, updated in place; zeros before step 1.
    pub moment2: &'a mut [T],
    /// Factor on the learning rate; usually 1.
    pub lr_scale: f64,
    /// λ of this tensor; `None` for that of [`Lamb`].
    pub weight_decay: Option<f64>,
    /// Whether the rate is scaled by the trust ratio; `None` leaves it to [`Lamb::excluded`].
    pub trust: Option<Trust>,
}

impl<'a, T> LambTensors<'a, T> {
    /// Tensors with the optimizer's own hyper-parameters.
    pub fn new(
        param: &'a mut [T],
        grad: &'a [T],
        moment1: &'a mut [T],
        moment2: &'a mut [T],
    ) -> Self {
        Self {
            param,
            grad,
            moment1,
            moment2,
            lr_scale: 1.0,
            weight_decay: None,
            trust: None,
        }
    }
}

impl Lamb {
    /// Applies one step to every tensor, in the calling thread; returns the positions of tensors
    /// that were left as they are because a norm or the rate is not finite.
    ///
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// r = m/(1 − β₁ᵗ) / (√v/√(1 − β₂ᵗ) + ε) + λ·p
    /// p ← p − lr·φ·r        φ = ‖p‖/‖r‖ if trusted and neither is 0, else 1
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `step` (t) counts from 1. `lr` and λ are per step.
    /// # Errors
    /// [`LambError::Rule`], [`LambError::StepZero`], [`LambError::NumelMismatch`],
    /// [`LambError::OwnHyper`]; everything is checked before anything is written.
    /// # Cost
    /// 28 bytes of memory traffic per f32 element, 44 where a tensor exceeds the cache.
    /// # Source
    /// You et al. 2020, Algorithm 2, arXiv:1904.00962, with φ the identity.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [LambTensors<'_, T>],
    ) -> Result<Vec<usize>, LambError> {
        self.step_on(None, step, tensors)
    }

    /// [`Lamb::step`] on all threads of `team`, with the same bits.
    ///
    /// # Errors
    /// As [`Lamb::step`].
    pub fn step_with<T: Compute>(
        &self,
        team: &Team,
        step: u64,
        tensors: &mut [LambTensors<'_, T>],
    ) -> Result<Vec<usize>, LambError> {
        self.step_on(Some(team), step, tensors)
    }

    fn step_on<T: Compute>(
        &self,
        team: Option<&Team>,
        step: u64,
        tensors: &mut [LambTensors<'_, T>],
    ) -> Result<Vec<usize>, LambError> {
        self.validate()?;
        if step == 0 {
            return Err(LambError::StepZero);
        }
        for (index, tensor) in tensors.iter().enumerate() {
            check(index, tensor)?;
        }
        let format = Format::new(self.name(), T::DTYPE, Precision::default())?;
        let kernel = LambKernel::<T>::new(*self, format);
        let layout = kernel.argument_layout();
        let (mut scalars, mut set) = ([0; 128], [0; 64]);
        kernel.write_scalars(&mut scalars[..layout.scalar_bytes]);
        let mut skipped = Vec::new();
        for (index, tensor) in tensors.iter_mut().enumerate() {
            let values = SetValues {
                lr: self.lr,
                lr_scale: tensor.lr_scale,
                weight_decay: tensor.weight_decay,
                trust: tensor.trust,
                step,
            };
            kernel.write_set(values, &mut set[..layout.set_bytes]);
            let call = HostCall {
                level: Level::detect(),
                scalars: &scalars,
                grad_factor: 1.0,
                sets: &set,
                changes: None,
            };
            if step_tensor(tensor.on(&kernel, call), team) == Outcome::Skip {
                skipped.push(index);
            }
        }
        Ok(skipped)
    }
}

impl<T: Compute> LambTensors<'_, T> {
    fn on<'a>(&'a mut self, kernel: &'a LambKernel<T>, call: HostCall<'a>) -> Tensor<'a> {
        let numel = self.param.len();
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        lists[0] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.param));
        lists[1] = HostList::Read(bytemuck::cast_slice(self.grad));
        lists[2] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.moment1));
        lists[3] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.moment2));
        Tensor {
            kernel,
            call,
            class: 0,
            numel,
            parameter: 0,
            first_element: 0,
            lists,
            // The caller may write its parameters between two calls.
            cached: None,
            grad_sum: None,
            sums: None,
            update_sums: None,
        }
    }
}

fn check<T>(tensor: usize, tensors: &LambTensors<'_, T>) -> Result<(), LambError> {
    let expected = tensors.param.len();
    for (list, found) in [
        ("grad", tensors.grad.len()),
        ("moment1", tensors.moment1.len()),
        ("moment2", tensors.moment2.len()),
    ] {
        if found != expected {
            return Err(LambError::NumelMismatch {
                list,
                tensor,
                expected,
                found,
            });
        }
    }
    for (what, found) in [
        ("lr_scale", Some(tensors.lr_scale)),
        ("weight_decay", tensors.weight_decay),
    ] {
        if let Some(found) = found.filter(|value| !(value.is_finite() && *value >= 0.0)) {
            return Err(LambError::OwnHyper {
                what,
                tensor,
                found,
            });
        }
    }
    Ok(())
}

//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::{Tensor, step_tensor};
use fusestep_launch::{
    Format, HostCall, HostList, MAX_LISTS, MultiTensorKernel, Outcome, Precision, SetValues,
    UpdateRule,
};
use fusestep_simd::{Level, Team};
use fusestep_tensor::Trust;

use crate::device::Compute;
use crate::{Lars, LarsError, LarsKernel};

/// The tensors of one parameter, and its own hyper-parameters; all slices have the same numel, 0
/// allowed.
#[derive(Debug)]
pub struct LarsTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// u, updated in place; zeros before the first step.
    pub velocity: &'a mut [T],
    /// Factor on the learning rate; usually 1.
    pub lr_scale: f64,
    /// λ of this tensor; `None` for that of [`Lars`].
    pub weight_decay: Option<f64>,
    /// Whether the rate is scaled by the trust ratio; `None` leaves it to [`Lars::excluded`].
    pub trust: Option<Trust>,
}

impl<'a, T> LarsTensors<'a, T> {
    /// Tensors with the optimizer's own hyper-parameters.
    pub fn new(param: &'a mut [T], grad: &'a [T], velocity: &'a mut [T]) -> Self {
        Self {
            param,
            grad,
            velocity,
            lr_scale: 1.0,
            weight_decay: None,
            trust: None,
        }
    }
}

impl Lars {
    /// Applies one step to every tensor, in the calling thread; returns the positions of tensors
    /// that were left as they are because a norm or the rate is not finite.
    ///
    /// ```text
    /// P = ‖p‖        G = rescale·‖g‖
    /// local = lr·η·P / (G + λ·P + ε) if trusted, P > 0 and G > 0, else lr
    /// u ← μ·u + local·(rescale·g + λ·p)        p ← p − u
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `lr` and λ are per step.
    /// # Errors
    /// [`LarsError::Rule`], [`LarsError::NumelMismatch`], [`LarsError::OwnHyper`]; everything is
    /// checked before anything is written.
    /// # Cost
    /// 20 bytes of memory traffic per f32 element, 28 where a tensor exceeds the cache.
    /// # Source
    /// You, Gitman & Ginsburg 2017, arXiv:1708.03888; lr is inside of the velocity.
    pub fn step<T: Compute>(
        &self,
        tensors: &mut [LarsTensors<'_, T>],
    ) -> Result<Vec<usize>, LarsError> {
        self.step_on(None, tensors)
    }

    /// [`Lars::step`] on all threads of `team`, with the same bits.
    ///
    /// # Errors
    /// As [`Lars::step`].
    pub fn step_with<T: Compute>(
        &self,
        team: &Team,
        tensors: &mut [LarsTensors<'_, T>],
    ) -> Result<Vec<usize>, LarsError> {
        self.step_on(Some(team), tensors)
    }

    fn step_on<T: Compute>(
        &self,
        team: Option<&Team>,
        tensors: &mut [LarsTensors<'_, T>],
    ) -> Result<Vec<usize>, LarsError> {
        self.validate()?;
        for (index, tensor) in tensors.iter().enumerate() {
            check(index, tensor)?;
        }
        let format = Format::new(self.name(), T::DTYPE, Precision::default())?;
        let kernel = LarsKernel::<T>::new(*self, format);
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
                step: 1,
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

impl<T: Compute> LarsTensors<'_, T> {
    fn on<'a>(&'a mut self, kernel: &'a LarsKernel<T>, call: HostCall<'a>) -> Tensor<'a> {
        let numel = self.param.len();
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        lists[0] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.param));
        lists[1] = HostList::Read(bytemuck::cast_slice(self.grad));
        lists[2] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.velocity));
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

fn check<T>(tensor: usize, tensors: &LarsTensors<'_, T>) -> Result<(), LarsError> {
    let expected = tensors.param.len();
    for (list, found) in [
        ("grad", tensors.grad.len()),
        ("velocity", tensors.velocity.len()),
    ] {
        if found != expected {
            return Err(LarsError::NumelMismatch {
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
            return Err(LarsError::OwnHyper {
                what,
                tensor,
                found,
            });
        }
    }
    Ok(())
}

//! The crate alone: safe slices, no plan, no backend.

use fusestep_launch::{
    Format, HostCall, HostList, HostRun, HostSpans, MAX_LISTS, MultiTensorKernel, Precision,
    SetValues, UpdateRule,
};
use fusestep_simd::{Level, Split, Team};

use crate::device::Compute;
use crate::{Adam, AdamError, AdamKernel, SecondMoment};

/// The tensors of one parameter; all slices have the same numel, 0 allowed.
#[derive(Debug)]
pub struct AdamTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// m, updated in place; zeros before step 1.
    pub moment1: &'a mut [T],
    /// v, updated in place; zeros before step 1.
    pub moment2: &'a mut [T],
    /// Largest v so far, updated in place; zeros before step 1, and present exactly with
    /// [`SecondMoment::Largest`].
    pub max_moment2: Option<&'a mut [T]>,
}

impl Adam {
    /// Applies one step to every tensor, in the calling thread.
    ///
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// p ← p·(1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `step` (t) counts from 1. `lr` and λ are per step.
    /// # Errors
    /// [`AdamError::Rule`], [`AdamError::StepZero`], [`AdamError::NumelMismatch`] naming the list,
    /// the tensor and both counts, [`AdamError::MaxMoment2`]; everything is checked before
    /// anything is written.
    /// # Cost
    /// 28 bytes of memory traffic per f32 element.
    /// # Source
    /// Loshchilov & Hutter 2019, Algorithm 2, arXiv:1711.05101; λ is multiplied by lr, as PyTorch
    /// does and the paper does not.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [AdamTensors<'_, T>],
    ) -> Result<(), AdamError> {
        self.prepare(step, tensors)?.run(tensors, None);
        Ok(())
    }

    /// [`Adam::step`] on all threads of `team`, with the same bits.
    ///
    /// # Errors
    /// As [`Adam::step`].
    pub fn step_with<T: Compute>(
        &self,
        team: &Team,
        step: u64,
        tensors: &mut [AdamTensors<'_, T>],
    ) -> Result<(), AdamError> {
        self.prepare(step, tensors)?.run(tensors, Some(team));
        Ok(())
    }

    fn prepare<T: Compute>(
        &self,
        step: u64,
        tensors: &[AdamTensors<'_, T>],
    ) -> Result<Prepared<T>, AdamError> {
        self.validate()?;
        if step == 0 {
            return Err(AdamError::StepZero);
        }
        for (index, tensor) in tensors.iter().enumerate() {
            self.check(index, tensor)?;
        }
        let format = Format::new(self.name(), T::DTYPE, Precision::default())?;
        let kernel = AdamKernel::new(*self, format);
        let layout = kernel.argument_layout();
        let (mut scalars, mut set) = ([0; 64], [0; 64]);
        kernel.write_scalars(&mut scalars[..layout.scalar_bytes]);
        let values = SetValues {
            lr: self.lr,
            lr_scale: 1.0,
            weight_decay: None,
            trust: None,
            step,
        };
        kernel.write_set(values, &mut set[..layout.set_bytes]);
        Ok(Prepared {
            kernel,
            scalars,
            set,
            level: Level::detect(),
        })
    }

    fn check<T>(&self, index: usize, tensor: &AdamTensors<'_, T>) -> Result<(), AdamError> {
        let expected = tensor.param.len();
        match (self.second_moment, &tensor.max_moment2) {
            (SecondMoment::Largest, None) => {
                return Err(AdamError::MaxMoment2 {
                    tensor: index,
                    expected: "a slice, because the second moment is `Largest`",
                    found: "none",
                });
            }
            (SecondMoment::Running, Some(_)) => {
                return Err(AdamError::MaxMoment2 {
                    tensor: index,
                    expected: "none, because the second moment is `Running`",
                    found: "a slice",
                });
            }
            _ => {}
        }
        let max_numel = tensor.max_moment2.as_ref().map_or(expected, |w| w.len());
        for (list, found) in [
            ("grad", tensor.grad.len()),
            ("moment1", tensor.moment1.len()),
            ("moment2", tensor.moment2.len()),
            ("max_moment2", max_numel),
        ] {
            if found != expected {
                return Err(AdamError::NumelMismatch {
                    list,
                    tensor: index,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}

/// A checked step: what is left is arithmetic.
struct Prepared<T> {
    kernel: AdamKernel<T>,
    scalars: [u8; 64],
    set: [u8; 64],
    level: Level,
}

impl<T: Compute> Prepared<T> {
    fn run(&self, tensors: &mut [AdamTensors<'_, T>], team: Option<&Team>) {
        let work = Work {
            step: self,
            many: tensors.iter_mut().map(AdamTensors::reborrow).collect(),
        };
        match team {
            Some(team) => team.run(work),
            None => work.run(),
        }
    }
}

impl<T> AdamTensors<'_, T> {
    fn reborrow(&mut self) -> AdamTensors<'_, T> {
        AdamTensors {
            param: self.param,
            grad: self.grad,
            moment1: self.moment1,
            moment2: self.moment2,
            max_moment2: self.max_moment2.as_deref_mut(),
        }
    }
}

impl<'a, T: Compute> AdamTensors<'a, T> {
    fn split_at(self, middle: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(middle);
        let (grad, grad_rest) = self.grad.split_at(middle);
        let (moment1, moment1_rest) = self.moment1.split_at_mut(middle);
        let (moment2, moment2_rest) = self.moment2.split_at_mut(middle);
        let (max_moment2, max_rest) = self.max_moment2.map(|w| w.split_at_mut(middle)).unzip();
        (
            AdamTensors {
                param,
                grad,
                moment1,
                moment2,
                max_moment2,
            },
            AdamTensors {
                param: param_rest,
                grad: grad_rest,
                moment1: moment1_rest,
                moment2: moment2_rest,
                max_moment2: max_rest,
            },
        )
    }

    fn into_lists(self) -> [HostList<'a>; MAX_LISTS] {
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        lists[0] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.param));
        lists[1] = HostList::Read(bytemuck::cast_slice(self.grad));
        lists[2] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.moment1));
        lists[3] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.moment2));
        if let Some(w) = self.max_moment2 {
            lists[4] = HostList::ReadWrite(bytemuck::cast_slice_mut(w));
        }
        lists
    }
}

struct Work<'a, T> {
    step: &'a Prepared<T>,
    many: Vec<AdamTensors<'a, T>>,
}

impl<T: Compute> Split for Work<'_, T> {
    fn elements(&self) -> u64 {
        self.many
            .iter()
            .map(|tensor| tensor.param.len() as u64)
            .sum()
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut left, mut right, mut wanted) = (Vec::new(), Vec::new(), elements as usize);
        for tensor in self.many {
            let numel = tensor.param.len();
            if numel <= wanted {
                left.push(tensor);
            } else if wanted == 0 {
                right.push(tensor);
            } else {
                let (head, tail) = tensor.split_at(wanted);
                left.push(head);
                right.push(tail);
            }
            wanted -= numel.min(wanted);
        }
        let step = self.step;
        (Work { step, many: left }, Work { step, many: right })
    }

    fn run(self) {
        let call = HostCall {
            level: self.step.level,
            grad_factor: 1.0,
            scalars: &self.step.scalars,
            sets: &self.step.set,
            changes: None,
        };
        for tensors in self.many {
            let spans = HostSpans::one(tensors.param.len(), 0);
            let run = HostRun::new(call, tensors.into_lists(), spans);
            self.step.kernel.run_host(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Objective, WeightDecay, reference};
    use std::num::NonZeroUsize;

    fn gradient(i: usize, step: u64) -> f64 {
        (((i as u64 + 3) * (step + 7) * 2_654_435_761) % 2001) as f64 * 1e-5 - 0.01
    }

    fn run<T: Compute>(adam: &Adam, numel: usize, steps: u64, team: Option<&Team>) -> Vec<T> {
        let mut p: Vec<T> = (0..numel)
            .map(|i| T::round(gradient(i, 0) * 10.0))
            .collect();
        let mut state = vec![vec![T::round(0.0); numel]; 3];
        for step in 1..=steps {
            let g: Vec<T> = (0..numel).map(|i| T::round(gradient(i, step))).collect();
            let [m, v, w] = &mut state[..] else {
                unreachable!()
            };
            let tensors = &mut [AdamTensors {
                param: &mut p,
                grad: &g,
                moment1: m,
                moment2: v,
                max_moment2: (adam.second_moment == SecondMoment::Largest)
                    .then_some(w.as_mut_slice()),
            }];
            match team {
                Some(team) => adam.step_with(team, step, tensors).unwrap(),
                None => adam.step(step, tensors).unwrap(),
            }
        }
        p
    }

    fn configurations() -> Vec<Adam> {
        let mut all = Vec::new();
        for weight_decay in [
            WeightDecay::Decoupled(0.01),
            WeightDecay::L2(0.1),
            WeightDecay::L2(0.0),
        ] {
            for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
                for objective in [Objective::Minimize, Objective::Maximize] {
                    all.push(Adam {
                        weight_decay,
                        second_moment,
                        objective,
                        ..Adam::default()
                    });
                }
            }
        }
        all
    }

    #[test]
    fn f64_agrees_with_the_reference_over_many_steps() {
        for adam in configurations() {
            for numel in [1, 15, 16, 17, 33] {
                let found = run::<f64>(&adam, numel, 100, None);
                for (i, found) in found.iter().enumerate() {
                    let mut element = reference::Element {
                        param: gradient(i, 0) * 10.0,
                        ..Default::default()
                    };
                    for step in 1..=100 {
                        element = reference::update(&adam, step, element, gradient(i, step));
                    }
                    assert!(
                        (found - element.param).abs() <= 1e-12,
                        "{adam:?} element {i}"
                    );
                }
            }
        }
    }

    #[test]
    fn any_team_gives_the_same_bits() {
        let team = Team::new(NonZeroUsize::new(3).unwrap()).unwrap();
        for adam in configurations() {
            let alone = run::<f32>(&adam, 100_003, 3, None);
            let together = run::<f32>(&adam, 100_003, 3, Some(&team));
            assert!(alone == together, "{adam:?}");
        }
    }

    #[test]
    fn nothing_is_written_when_a_later_tensor_is_wrong() {
        let (mut p, mut m, mut v) = ([1.0f32; 4], [0.0; 4], [0.0; 4]);
        let (mut q, mut n, mut w) = ([1.0f32; 4], [0.0; 4], [0.0; 4]);
        let error = Adam::default()
            .step(
                1,
                &mut [
                    AdamTensors {
                        param: &mut p,
                        grad: &[1.0; 4],
                        moment1: &mut m,
                        moment2: &mut v,
                        max_moment2: None,
                    },
                    AdamTensors {
                        param: &mut q,
                        grad: &[1.0; 3],
                        moment1: &mut n,
                        moment2: &mut w,
                        max_moment2: None,
                    },
                ],
            )
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "grad of tensor 1: expected 4 elements, found 3"
        );
        assert_eq!((p, m, v), ([1.0; 4], [0.0; 4], [0.0; 4]));
    }
}

//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::{Compute, SliceTensor, step_slices};
use fusestep_launch::UpdateRule;
use fusestep_simd::Pool;

use crate::{Adam, SecondMoment, StepError};

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
    /// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::NumelMismatch`] naming the list,
    /// the tensor and both counts, [`StepError::List`]; everything is checked before
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
    ) -> Result<(), StepError> {
        self.step_on(None, step, tensors)
    }

    /// [`Adam::step`] on all threads of `pool`, with the same bits.
    ///
    /// # Errors
    /// As [`Adam::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [AdamTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.step_on(Some(pool), step, tensors)
    }

    fn step_on<T: Compute>(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [AdamTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.validate()?;
        let (mut running, mut largest) = (Vec::new(), Vec::new());
        for (index, tensor) in tensors.iter_mut().enumerate() {
            let (param, grad) = (&mut *tensor.param, tensor.grad);
            let (m, v) = (&mut *tensor.moment1, &mut *tensor.moment2);
            let refuse = |expected, found| StepError::List {
                list: "max_moment2",
                tensor: index,
                expected,
                found,
            };
            match (&mut tensor.max_moment2, self.second_moment) {
                (Some(w), SecondMoment::Largest) => largest.push(SliceTensor {
                    param,
                    grad,
                    state: [m, v, &mut **w],
                }),
                (None, SecondMoment::Running) => running.push(SliceTensor {
                    param,
                    grad,
                    state: [m, v],
                }),
                (None, SecondMoment::Largest) => {
                    let expected = "a slice, because the second moment is `Largest`";
                    return Err(refuse(expected, "none"));
                }
                (Some(_), SecondMoment::Running) => {
                    let expected = "none, because the second moment is `Running`";
                    return Err(refuse(expected, "a slice"));
                }
            }
        }
        match self.second_moment {
            SecondMoment::Running => step_slices(self, step, pool, running),
            SecondMoment::Largest => step_slices(self, step, pool, largest),
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

    fn run<T: Compute>(adam: &Adam, numel: usize, steps: u64, pool: Option<&Pool>) -> Vec<T> {
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
            match pool {
                Some(pool) => adam.step_with(pool, step, tensors).unwrap(),
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
        let pool = Pool::new(NonZeroUsize::new(3).unwrap());
        for adam in configurations() {
            let alone = run::<f32>(&adam, 100_003, 3, None);
            let together = run::<f32>(&adam, 100_003, 3, Some(&pool));
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

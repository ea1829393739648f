//! A kernel alone on plain slices: no plan, no backend.

use fusestep_launch::{
    GroupValues, HostCall, HostList, HostRun, HostSpans, MAX_LISTS, MultiTensorKernel, Outcome,
    Precision, RuleError, UpdateRule,
};
use fusestep_simd::{Level, Pool, Split};
use fusestep_tensor::{DType, Trust};

use crate::{Compute, Tensor, step_tensor};

/// The slices of one parameter, with `N` state tensors in the order of the kernel's lists; all have
/// the same numel, 0 allowed.
#[derive(Debug)]
pub struct SliceTensor<'a, T, const N: usize> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// The optimizer's own tensors, updated in place.
    pub state: [&'a mut [T]; N],
}

/// Hyper-parameters of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnHyper {
    /// Factor on the learning rate; usually 1.
    pub lr_scale: f64,
    /// λ of this tensor; `None` for the rule's.
    pub weight_decay: Option<f64>,
    /// Whether a rule with norms scales the tensor's rate; `None` leaves it to the rule.
    pub trust: Option<Trust>,
}

impl Default for OwnHyper {
    fn default() -> Self {
        Self { lr_scale: 1.0, weight_decay: None, trust: None }
    }
}

impl OwnHyper {
    /// Whether the values of tensor `tensor` are finite and at least 0.
    pub(crate) fn check(&self, tensor: usize) -> Result<(), StepError> {
        let values = [("lr_scale", Some(self.lr_scale)), ("weight_decay", self.weight_decay)];
        for (what, value) in values {
            if let Some(found) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
                return Err(StepError::OwnHyper { what, tensor, found });
            }
        }
        Ok(())
    }
}

/// Error of a step on slices that was refused. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// A hyper-parameter is out of range, or there is no kernel for the dtype.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// A list's tensor has another element count than its parameter.
    #[error("{list} of tensor {tensor}: expected {expected} elements, found {found}")]
    NumelMismatch {
        /// The list.
        list: &'static str,
        /// Position of the tensor in the lists.
        tensor: usize,
        /// The parameter's element count.
        expected: usize,
        /// The list's element count.
        found: usize,
    },
    /// A list of units has not one for each 32 elements of its tensor.
    #[error(
        "units of {list} of tensor {tensor}: expected {expected}, one per 32 elements, found {found}"
    )]
    Units {
        /// The coded list.
        list: &'static str,
        /// Position of the tensor in the lists.
        tensor: usize,
        /// The number of groups of 32 elements.
        expected: usize,
        /// The number of units.
        found: usize,
    },
    /// A list is there that the settings do not use, or the other way round.
    #[error("{list} of tensor {tensor}: expected {expected}, found {found}")]
    List {
        /// The list.
        list: &'static str,
        /// Position of the tensor in the lists.
        tensor: usize,
        /// The content that the settings ask for, in words.
        expected: &'static str,
        /// The content given, in words.
        found: &'static str,
    },
    /// Steps count from 1.
    #[error("step: expected at least 1, found 0; steps count from 1")]
    StepZero,
    /// A factor on gradients is infinite or no number.
    #[error("factor on gradients: expected a finite number, found {found}")]
    GradFactor {
        /// The factor given.
        found: f64,
    },
    /// A tensor's own hyper-parameter is out of range.
    #[error("{what} of tensor {tensor}: expected a finite value of at least 0, found {found}")]
    OwnHyper {
        /// The hyper-parameter.
        what: &'static str,
        /// Position of the tensor in the lists.
        tensor: usize,
        /// The value given.
        found: f64,
    },
}

/// Applies one step of `rule` to every tensor, on all threads of `pool` or, without one, in the
/// calling thread.
///
/// # Units
/// `step` (t) counts from 1.
/// # Errors
/// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::NumelMismatch`]; everything is
/// checked before anything is written.
/// # Panics
/// If the rule's kernel does not have `N` state lists: the crate of the rule knows them.
pub fn step_slices<T: Compute, const N: usize>(
    rule: &dyn UpdateRule,
    step: u64,
    pool: Option<&Pool>,
    tensors: Vec<SliceTensor<'_, T, N>>,
) -> Result<(), StepError> {
    let prepared = Prepared::new::<T>(rule, step)?;
    prepared.check(tensors.iter())?;
    let step_scalars = prepared.step_scalars(OwnHyper::default());
    let work =
        Work { kernel: prepared.kernel.as_ref(), call: prepared.call(&step_scalars), tensors };
    match pool {
        Some(pool) => pool.run(work),
        None => work.run(),
    }
    Ok(())
}

/// [`step_slices`] for a rule that needs norms of whole tensors, and for tensors with
/// hyper-parameters of their own; returns the positions of tensors that were left as they are
/// because a norm or the rate is not finite.
///
/// # Errors
/// As [`step_slices`], and [`StepError::OwnHyper`].
/// # Panics
/// As [`step_slices`].
pub fn step_normed_slices<T: Compute, const N: usize>(
    rule: &dyn UpdateRule,
    step: u64,
    pool: Option<&Pool>,
    tensors: Vec<(SliceTensor<'_, T, N>, OwnHyper)>,
) -> Result<Vec<usize>, StepError> {
    let prepared = Prepared::new::<T>(rule, step)?;
    prepared.check(tensors.iter().map(|(tensor, _)| tensor))?;
    for (tensor, (_, own)) in tensors.iter().enumerate() {
        own.check(tensor)?;
    }
    let mut skipped = Vec::new();
    for (index, (tensor, own)) in tensors.into_iter().enumerate() {
        let step_scalars = prepared.step_scalars(own);
        let numel = tensor.param.len();
        let tensor = prepared.tensor(&step_scalars, numel, tensor.into_lists());
        if step_tensor(tensor, pool) == Outcome::Skip {
            skipped.push(index);
        }
    }
    Ok(skipped)
}

/// A rule's kernel for one step on slices.
pub(crate) struct Prepared {
    kernel: Box<dyn MultiTensorKernel>,
    scalars: Vec<u8>,
    lr: f64,
    step: u64,
    level: Level,
}

impl Prepared {
    fn new<T: Compute>(rule: &dyn UpdateRule, step: u64) -> Result<Self, StepError> {
        Self::of(rule, step, T::DTYPE, Precision::default())
    }

    /// The kernel for parameters of a type that are kept with a precision.
    pub(crate) fn of(
        rule: &dyn UpdateRule,
        step: u64,
        dtype: DType,
        precision: Precision,
    ) -> Result<Self, StepError> {
        let kernel = rule.kernel(dtype, precision)?;
        if step == 0 {
            return Err(StepError::StepZero);
        }
        let mut scalars = vec![0; kernel.argument_layout().scalar_bytes];
        kernel.write_scalars(&mut scalars);
        Ok(Self { kernel, scalars, lr: rule.lr(), step, level: Level::detect() })
    }

    /// Whether every list of every tensor is as long as its parameter.
    fn check<'a, T: 'a, const N: usize>(
        &self,
        tensors: impl Iterator<Item = &'a SliceTensor<'a, T, N>>,
    ) -> Result<(), StepError> {
        let lists = self.kernel.lists();
        assert_eq!(lists.len(), N + 2, "the rule's crate brings every list of its kernel");
        for (index, tensor) in tensors.enumerate() {
            let expected = tensor.param.len();
            let state = tensor.state.iter().map(|list| list.len());
            let found = std::iter::once(tensor.grad.len()).chain(state);
            for (list, found) in lists[1..].iter().zip(found) {
                if found != expected {
                    return Err(StepError::NumelMismatch {
                        list: list.role.name(),
                        tensor: index,
                        expected,
                        found,
                    });
                }
            }
        }
        Ok(())
    }

    /// The step scalars of a tensor.
    pub(crate) fn step_scalars(&self, own: OwnHyper) -> Vec<u8> {
        let mut step_scalars = vec![0; self.kernel.argument_layout().step_scalar_bytes];
        let values = GroupValues {
            lr: self.lr,
            lr_scale: own.lr_scale,
            weight_decay: own.weight_decay,
            trust: own.trust,
            step: self.step,
        };
        self.kernel.write_step_scalars(values, &mut step_scalars);
        step_scalars
    }

    /// A tensor of these lists.
    pub(crate) fn tensor<'a>(
        &'a self,
        step_scalars: &'a [u8],
        numel: usize,
        lists: [HostList<'a>; MAX_LISTS],
    ) -> Tensor<'a> {
        Tensor {
            kernel: self.kernel.as_ref(),
            call: self.call(step_scalars),
            group: 0,
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

    fn call<'a>(&'a self, step_scalars: &'a [u8]) -> HostCall<'a> {
        HostCall {
            level: self.level,
            grad_factor: 1.0,
            scalars: &self.scalars,
            changes: None,
            squares: None,
            step_scalars,
        }
    }
}

impl<'a, T: Compute, const N: usize> SliceTensor<'a, T, N> {
    fn split_at(self, middle: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(middle);
        let (grad, grad_rest) = self.grad.split_at(middle);
        let mut rest: [&mut [T]; N] = std::array::from_fn(|_| Default::default());
        let mut behind = rest.iter_mut();
        let state = self.state.map(|list| {
            let (list, list_rest) = list.split_at_mut(middle);
            if let Some(place) = behind.next() {
                *place = list_rest;
            }
            list
        });
        (Self { param, grad, state }, Self { param: param_rest, grad: grad_rest, state: rest })
    }

    fn into_lists(self) -> [HostList<'a>; MAX_LISTS] {
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        lists[0] = HostList::ReadWrite(bytemuck::cast_slice_mut(self.param));
        lists[1] = HostList::Read(bytemuck::cast_slice(self.grad));
        for (list, values) in lists[2..].iter_mut().zip(self.state) {
            *list = HostList::ReadWrite(bytemuck::cast_slice_mut(values));
        }
        lists
    }
}

struct Work<'a, T, const N: usize> {
    kernel: &'a dyn MultiTensorKernel,
    call: HostCall<'a>,
    tensors: Vec<SliceTensor<'a, T, N>>,
}

impl<T: Compute, const N: usize> Split for Work<'_, T, N> {
    fn elements(&self) -> u64 {
        let numels = self.tensors.iter().map(|tensor| tensor.param.len() as u64);
        numels.sum()
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut left, mut right, mut wanted) = (Vec::new(), Vec::new(), elements as usize);
        for tensor in self.tensors {
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
        let (kernel, call) = (self.kernel, self.call);
        let part = |tensors| Work { kernel, call, tensors };
        (part(left), part(right))
    }

    fn run(self) {
        for tensor in self.tensors {
            let spans = HostSpans::one(tensor.param.len(), 0);
            let mut lists = tensor.into_lists();
            self.kernel.run_host(HostRun::new(self.call, &mut lists, spans));
        }
    }
}

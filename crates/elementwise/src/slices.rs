//! A kernel alone on plain slices: no plan, no backend.

use fusestep_launch::{
    HostCall, HostList, HostRun, HostSpans, MAX_LISTS, MultiTensorKernel, Precision, RuleError,
    SetValues, UpdateRule,
};
use fusestep_simd::{Level, Split, Team};

use crate::Compute;

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

/// Why a step on slices was refused; nothing has been written when it is returned.
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
    /// A list is there that the settings do not use, or the other way round.
    #[error("{list} of tensor {tensor}: expected {expected}, found {found}")]
    List {
        /// The list.
        list: &'static str,
        /// Position of the tensor in the lists.
        tensor: usize,
        /// What the settings ask for.
        expected: &'static str,
        /// What was given.
        found: &'static str,
    },
    /// Steps count from 1.
    #[error("step: expected at least 1, found 0; steps count from 1")]
    StepZero,
}

/// Applies one step of `rule` to every tensor, on all threads of `team` or, without one, in the
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
    team: Option<&Team>,
    tensors: Vec<SliceTensor<'_, T, N>>,
) -> Result<(), StepError> {
    let kernel = rule.kernel(T::DTYPE, Precision::default())?;
    if step == 0 {
        return Err(StepError::StepZero);
    }
    let lists = kernel.lists();
    assert_eq!(
        lists.len(),
        N + 2,
        "the rule's crate brings every list of its kernel"
    );
    for (index, tensor) in tensors.iter().enumerate() {
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
    let layout = kernel.argument_layout();
    let (mut scalars, mut set) = (vec![0; layout.scalar_bytes], vec![0; layout.set_bytes]);
    kernel.write_scalars(&mut scalars);
    let values = SetValues {
        lr: rule.lr(),
        lr_scale: 1.0,
        weight_decay: None,
        trust: None,
        step,
    };
    kernel.write_set(values, &mut set);
    let work = Work {
        kernel: kernel.as_ref(),
        call: HostCall {
            level: Level::detect(),
            grad_factor: 1.0,
            scalars: &scalars,
            changes: None,
            sets: &set,
        },
        tensors,
    };
    match team {
        Some(team) => team.run(work),
        None => work.run(),
    }
    Ok(())
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
        (
            Self { param, grad, state },
            Self {
                param: param_rest,
                grad: grad_rest,
                state: rest,
            },
        )
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
        let part = |tensors| Work {
            kernel,
            call,
            tensors,
        };
        (part(left), part(right))
    }

    fn run(self) {
        for tensor in self.tensors {
            let spans = HostSpans::one(tensor.param.len(), 0);
            let run = HostRun::new(self.call, tensor.into_lists(), spans);
            self.kernel.run_host(run);
        }
    }
}

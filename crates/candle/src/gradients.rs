//! Gradients prepared for a step: checked, and copied only if they must be.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Storage, Tensor, Var};
use fusestep_planner::Plan;

use crate::AdapterError;
use crate::lend::{bytes, dtype_of};

/// One gradient for each variable, contiguous and in memory of its own; `None` where there is none.
pub(crate) struct Gradients {
    pub(crate) of_var: Vec<Option<Tensor>>,
    /// Number of gradients that had to be copied.
    pub(crate) copied: u64,
}

/// Memory addresses of the variables, to recognise a gradient that lies in one of them.
#[derive(Debug)]
pub(crate) struct Addresses(HashSet<usize>);

impl Addresses {
    pub(crate) fn of(vars: &[(String, Var)]) -> Self {
        let addresses = vars.iter().filter_map(|(_, var)| address(var.as_tensor()));
        Self(addresses.collect())
    }
}

impl Gradients {
    /// Takes the variables' gradients from `store` and checks all of them before anything is
    /// written. A plan with gradients in f32 takes those of 16-bit variables in f32 or as the
    /// variables are.
    pub(crate) fn take(
        vars: &[(String, Var)],
        addresses: &Addresses,
        store: &GradStore,
        plan: &Plan,
    ) -> candle_core::Result<Self> {
        let mut of_var = Vec::with_capacity(vars.len());
        let mut copied = 0;
        for (index, (name, var)) in vars.iter().enumerate() {
            let Some(grad) = store.get(var) else {
                of_var.push(None);
                continue;
            };
            let same_device = grad.device().same_device(var.device());
            let planned = plan.grad_dtype(index);
            let fits = grad.dtype() == var.dtype() || dtype_of(grad.dtype()) == Some(planned);
            let is_of_16_bits = matches!(var.dtype(), DType::F16 | DType::BF16);
            if is_of_16_bits && !fits && grad.dtype() == DType::F32 {
                let (name, expected) = (name.clone(), var.dtype());
                return Err(AdapterError::WideGradient { name, expected }.into());
            }
            if grad.shape() != var.shape() || !fits || !same_device {
                return Err(AdapterError::Gradient {
                    name: name.clone(),
                    expected: var.shape().clone(),
                    expected_dtype: var.dtype(),
                    found: grad.shape().clone(),
                    found_dtype: grad.dtype(),
                }
                .into());
            }
            // A gradient in a variable's own memory would be read while that variable is being
            // written.
            let in_a_variable = address(grad).is_some_and(|at| addresses.0.contains(&at));
            let is_narrow = dtype_of(grad.dtype()) != Some(planned);
            of_var.push(Some(if is_narrow && plan.tensors().are_borrowed() {
                copied += 1;
                grad.to_dtype(DType::F32)?.contiguous()?
            } else if in_a_variable || !grad.is_contiguous() {
                copied += 1;
                grad.copy()?.contiguous()?
            } else {
                grad.clone()
            }));
        }
        Ok(Self { of_var, copied })
    }
}

/// Address at which a tensor's storage begins.
fn address(tensor: &Tensor) -> Option<usize> {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => {
            let bytes = bytes(storage).filter(|bytes| !bytes.is_empty())?;
            Some(bytes.as_ptr().addr())
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => crate::cuda::address(storage),
        _ => None,
    }
}

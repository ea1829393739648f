//! Memory of variables, and the backend that updates them there.

use std::num::NonZeroUsize;

use candle_core::{Device, Var};
use fusestep_cpu::CpuBackend;
use fusestep_launch::Backend;
use fusestep_planner::{Plan, State, StepReport};
use fusestep_simd::Pool;

#[cfg(feature = "cuda")]
use crate::cuda::OnCuda;
use crate::gradients::Gradients;
use crate::lend::BorrowedFromCandle;
use crate::{AdapterError, Options};

/// The backend of the device that all variables lie on.
#[derive(Debug)]
pub(crate) enum Memory {
    Cpu(CpuBackend),
    #[cfg(feature = "cuda")]
    Cuda(OnCuda),
}

impl Memory {
    /// The memory of the first variable; [`Memory::check`] looks at the others.
    pub(crate) fn of(vars: &[(String, Var)], options: &Options) -> Result<Self, AdapterError> {
        match vars.first().map(|(_, var)| var.device()) {
            #[cfg(feature = "cuda")]
            Some(Device::Cuda(device)) => Ok(Self::Cuda(OnCuda::of(device, options)?)),
            _ => Ok(Self::Cpu(match options.threads {
                None if options.figures.is_none() => CpuBackend::with_all_threads(),
                _ => CpuBackend::new(at_least_1(threads(options))),
            })),
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Self::Cpu(backend) => backend,
            #[cfg(feature = "cuda")]
            Self::Cuda(on) => on.backend(),
        }
    }

    /// Refuses a variable that lies elsewhere.
    pub(crate) fn check(&self, name: &str, device: &Device) -> Result<(), AdapterError> {
        let (is_here, expected) = match self {
            Self::Cpu(_) => (device.is_cpu(), "the cpu"),
            #[cfg(feature = "cuda")]
            Self::Cuda(on) => (on.has(device), "the CUDA device of the first variable"),
        };
        if is_here {
            return Ok(());
        }
        Err(elsewhere(name, expected, device))
    }

    /// One step on variables and gradients where they lie.
    pub(crate) fn step(
        &self,
        plan: &Plan,
        state: &mut State,
        vars: &[(String, Var)],
        gradients: &Gradients,
    ) -> candle_core::Result<StepReport> {
        let grads = &gradients.of_var;
        match self {
            Self::Cpu(backend) => {
                let mut lender = BorrowedFromCandle { backend, vars, grads };
                let report = plan.run_borrowed(state, &mut lender);
                Ok(report.map_err(AdapterError::from)?)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(on) => on.step(plan, state, vars, grads),
        }
    }
}

/// Threads of this process: those asked for, else the fewest that memory is as fast with, as far as
/// figures say so, else all of rayon's pool.
pub(crate) fn threads(options: &Options) -> usize {
    options.threads.unwrap_or_else(|| {
        let all = Pool::current().threads();
        let enough = options.figures.as_ref().and_then(|figures| figures.threads(all));
        enough.unwrap_or(all)
    })
}

/// A number of threads; ranges of settings are checked where a plan is made.
pub(crate) fn at_least_1(threads: usize) -> NonZeroUsize {
    NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN)
}

/// Refuses variables that ranks cannot share out: they work in host memory.
pub(crate) fn check_host(vars: &[(String, Var)]) -> Result<(), AdapterError> {
    match vars.iter().find(|(_, var)| !var.device().is_cpu()) {
        None => Ok(()),
        Some((name, var)) => Err(elsewhere(name, "the cpu", var.device())),
    }
}

fn elsewhere(name: &str, expected: &'static str, device: &Device) -> AdapterError {
    AdapterError::Device {
        name: name.to_owned(),
        expected,
        found: format!("{:?}", device.location()),
    }
}

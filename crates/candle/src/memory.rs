//! Memory of variables, and the backend that updates them there.

use std::num::NonZeroUsize;
use std::sync::Arc;

use candle_core::{Device, Var};
use fusestep::{Session, SharedBackend};
use fusestep_cpu::CpuBackend;
use fusestep_planner::StepReport;
use fusestep_simd::Pool;

#[cfg(feature = "cuda")]
use crate::cuda::OnCuda;
use crate::gradients::Gradients;
use crate::lend::BorrowedFromCandle;
use crate::{AdapterError, Options};

/// The backend of the device that all variables lie on.
#[derive(Debug)]
pub(crate) enum Memory {
    Cpu(Arc<CpuBackend>),
    #[cfg(feature = "cuda")]
    Cuda(OnCuda),
}

impl Memory {
    /// The memory of the first variable; [`Memory::check`] looks at the others.
    pub(crate) fn of(vars: &[(String, Var)], options: &Options) -> Result<Self, AdapterError> {
        match vars.first().map(|(_, var)| var.device()) {
            #[cfg(feature = "cuda")]
            Some(Device::Cuda(device)) => Ok(Self::Cuda(OnCuda::of(device, options)?)),
            _ => Ok(Self::Cpu(Arc::new(match options.threads {
                None if options.figures.is_none() => CpuBackend::with_all_threads(),
                _ => CpuBackend::new(at_least_1(threads(options))),
            }))),
        }
    }

    /// The backend, which a session of these variables works on, too.
    pub(crate) fn backend(&self) -> SharedBackend {
        match self {
            Self::Cpu(backend) => Arc::clone(backend) as SharedBackend,
            #[cfg(feature = "cuda")]
            Self::Cuda(on) => on.backend(),
        }
    }

    /// Whether it is the host's.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self, Self::Cpu(_))
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
        session: &mut Session<'_>,
        vars: &[(String, Var)],
        gradients: &Gradients,
    ) -> Result<StepReport, AdapterError> {
        let grads = &gradients.of_var;
        match self {
            Self::Cpu(backend) => {
                let mut lender = BorrowedFromCandle { backend, vars, grads };
                Ok(session.step_borrowed(&mut lender)?)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(on) => on.step(session, vars, grads),
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

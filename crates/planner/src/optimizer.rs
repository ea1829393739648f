//! Which update rule a plan applies.

use fusestep_fused_adam::{Adam, AdamError, WeightDecay};
use fusestep_launch::MultiTensorKernel;
use fusestep_tensor::ParamDesc;
use serde::Serialize;

use crate::PlanError;

/// The update rule and its hyper-parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam or AdamW; see [`Adam`].
    Adam(Adam),
}

impl Optimizer {
    /// `adamw` with decoupled weight decay, else `adam`.
    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::Adam(adam) => match adam.weight_decay {
                WeightDecay::Decoupled(_) => "adamw",
                WeightDecay::L2(_) => "adam",
            },
        }
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            Optimizer::Adam(adam) => adam.lr,
        }
    }

    /// The same rule at another learning rate.
    pub(crate) fn with_lr(self, lr: f64) -> Self {
        match self {
            Optimizer::Adam(adam) => Optimizer::Adam(Adam { lr, ..adam }),
        }
    }

    /// Checks every hyper-parameter.
    ///
    /// # Errors
    /// The optimizer's own error, naming the first hyper-parameter out of range.
    pub fn validate(&self) -> Result<(), PlanError> {
        match self {
            Optimizer::Adam(adam) => Ok(adam.validate()?),
        }
    }

    /// The kernel for one dtype; hyper-parameters are already validated.
    pub(crate) fn kernel(
        &self,
        param: &ParamDesc,
    ) -> Result<Box<dyn MultiTensorKernel>, PlanError> {
        let made = match self {
            Optimizer::Adam(adam) => adam.kernel(param.dtype),
        };
        made.map_err(|error| match error {
            AdamError::DType { found } => PlanError::DType {
                name: param.name.clone(),
                optimizer: self.name(),
                found,
            },
            other => PlanError::Adam(other),
        })
    }

    /// What the plan prints of the hyper-parameters.
    pub(crate) fn summary(&self) -> OptimizerSummary {
        match self {
            Optimizer::Adam(adam) => OptimizerSummary {
                name: self.name(),
                lr: adam.lr,
                beta1: adam.beta1,
                beta2: adam.beta2,
                eps: adam.eps,
                weight_decay: adam.weight_decay.lambda(),
            },
        }
    }
}

/// Hyper-parameters as they are printed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct OptimizerSummary {
    pub(crate) name: &'static str,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
}

impl std::fmt::Display for OptimizerSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} lr={} beta1={} beta2={} eps={:e} weight_decay={}",
            self.name, self.lr, self.beta1, self.beta2, self.eps, self.weight_decay
        )
    }
}

//! Which update rule a plan applies.

use std::fmt;

use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{MultiTensorKernel, RuleError, UpdateRule};
use fusestep_tensor::ParamDesc;

use crate::PlanError;

/// Below this a hyper-parameter is printed with an exponent.
const SMALL: f64 = 1e-4;

/// The update rule and its hyper-parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam or AdamW; see [`Adam`].
    Adam(Adam),
    /// LARS momentum; see [`Lars`].
    Lars(Lars),
    /// LAMB; see [`Lamb`].
    Lamb(Lamb),
}

impl Optimizer {
    /// The rule as planner and command line see it.
    pub fn rule(&self) -> &dyn UpdateRule {
        match self {
            Optimizer::Adam(adam) => adam,
            Optimizer::Lars(lars) => lars,
            Optimizer::Lamb(lamb) => lamb,
        }
    }

    /// The same rule at another learning rate.
    pub(crate) fn with_lr(self, lr: f64) -> Self {
        match self {
            Optimizer::Adam(adam) => Optimizer::Adam(Adam { lr, ..adam }),
            Optimizer::Lars(lars) => Optimizer::Lars(Lars { lr, ..lars }),
            Optimizer::Lamb(lamb) => Optimizer::Lamb(Lamb { lr, ..lamb }),
        }
    }

    /// The rule's name on the command line: `adamw`.
    pub fn name(&self) -> &'static str {
        self.rule().name()
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.rule().lr()
    }

    /// Checks every hyper-parameter.
    ///
    /// # Errors
    /// [`PlanError::Rule`], naming the first hyper-parameter out of range.
    pub fn validate(&self) -> Result<(), PlanError> {
        Ok(self.rule().validate()?)
    }

    /// The kernel for one parameter; hyper-parameters are already validated.
    pub(crate) fn kernel(
        &self,
        param: &ParamDesc,
    ) -> Result<Box<dyn MultiTensorKernel>, PlanError> {
        self.rule()
            .kernel(param.dtype)
            .map_err(|error| match error {
                RuleError::DType {
                    rule,
                    expected,
                    found,
                } => PlanError::DType {
                    name: param.name.clone(),
                    optimizer: rule,
                    expected,
                    found,
                },
                other => PlanError::Rule(other),
            })
    }
}

/// The name and every hyper-parameter: `adamw lr=0.001 beta1=0.9 …`.
impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        for (what, value) in self.rule().hyper_parameters() {
            if value != 0.0 && value.abs() < SMALL {
                write!(f, " {what}={value:e}")?;
            } else {
                write!(f, " {what}={value}")?;
            }
        }
        Ok(())
    }
}

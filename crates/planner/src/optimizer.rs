//! Which update rule a plan applies.

use std::fmt;

use fusestep_adagrad::Adagrad;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{MultiTensorKernel, Objective, RuleError, UpdateRule};
use fusestep_lion::Lion;
use fusestep_tensor::ParamDesc;

use crate::{PlanError, Precisions};

/// Below this a hyper-parameter is printed with an exponent.
const SMALL: f64 = 1e-4;

/// The update rule and its hyper-parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam or AdamW; see [`Adam`].
    Adam(Adam),
    /// SGD, with or without momentum; see [`Sgd`].
    Sgd(Sgd),
    /// Lion; see [`Lion`].
    Lion(Lion),
    /// Adagrad; see [`Adagrad`].
    Adagrad(Adagrad),
    /// LARS momentum; see [`Lars`].
    Lars(Lars),
    /// LAMB; see [`Lamb`].
    Lamb(Lamb),
}

impl From<Adam> for Optimizer {
    fn from(rule: Adam) -> Self {
        Optimizer::Adam(rule)
    }
}

impl From<Sgd> for Optimizer {
    fn from(rule: Sgd) -> Self {
        Optimizer::Sgd(rule)
    }
}

impl From<Lion> for Optimizer {
    fn from(rule: Lion) -> Self {
        Optimizer::Lion(rule)
    }
}

impl From<Adagrad> for Optimizer {
    fn from(rule: Adagrad) -> Self {
        Optimizer::Adagrad(rule)
    }
}

impl From<Lars> for Optimizer {
    fn from(rule: Lars) -> Self {
        Optimizer::Lars(rule)
    }
}

impl From<Lamb> for Optimizer {
    fn from(rule: Lamb) -> Self {
        Optimizer::Lamb(rule)
    }
}

impl Optimizer {
    /// The rule as planner and command line see it.
    pub fn rule(&self) -> &dyn UpdateRule {
        match self {
            Optimizer::Adam(rule) => rule,
            Optimizer::Sgd(rule) => rule,
            Optimizer::Lion(rule) => rule,
            Optimizer::Adagrad(rule) => rule,
            Optimizer::Lars(rule) => rule,
            Optimizer::Lamb(rule) => rule,
        }
    }

    /// This rule at another learning rate.
    pub fn with_lr(self, lr: f64) -> Self {
        match self {
            Optimizer::Adam(rule) => Adam { lr, ..rule }.into(),
            Optimizer::Sgd(rule) => Sgd { lr, ..rule }.into(),
            Optimizer::Lion(rule) => Lion { lr, ..rule }.into(),
            Optimizer::Adagrad(rule) => Adagrad { lr, ..rule }.into(),
            Optimizer::Lars(rule) => Lars { lr, ..rule }.into(),
            Optimizer::Lamb(rule) => Lamb { lr, ..rule }.into(),
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

    /// Whether steps go against the gradient or along it, if the rule offers both.
    pub fn objective(&self) -> Option<Objective> {
        match self {
            Optimizer::Adam(rule) => Some(rule.objective),
            Optimizer::Sgd(rule) => Some(rule.objective),
            Optimizer::Lion(rule) => Some(rule.objective),
            Optimizer::Adagrad(rule) => Some(rule.objective),
            Optimizer::Lars(_) | Optimizer::Lamb(_) => None,
        }
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
        precisions: &Precisions,
    ) -> Result<Box<dyn MultiTensorKernel>, PlanError> {
        self.rule()
            .kernel(param.dtype, precisions.of(param.dtype))
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
                RuleError::Precision {
                    rule,
                    what,
                    dtype,
                    expected,
                    found,
                } => PlanError::Precision {
                    name: param.name.clone(),
                    optimizer: rule,
                    what,
                    dtype,
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

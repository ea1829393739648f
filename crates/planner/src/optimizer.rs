//! Which update rule a plan applies, and how exactly parameters are kept.

use std::fmt;

use fusestep_launch::{MultiTensorKernel, Objective, Precision, UpdateRule};
use fusestep_tensor::{DType, ParamDesc};

use crate::{PlanError, Result};

/// Below this a hyper-parameter is printed with an exponent.
const SMALL: f64 = 1e-4;

/// The update rules that plans apply, each by its documentation, its type and its crate.
macro_rules! optimizers {
    ($($(#[$doc:meta])* $rule:ident of $crate_name:ident;)*) => {
        /// The update rule and its hyper-parameters.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum Optimizer {
            $($(#[$doc])* $rule($crate_name::$rule),)*
        }

        $(impl From<$crate_name::$rule> for Optimizer {
            fn from(rule: $crate_name::$rule) -> Self {
                Optimizer::$rule(rule)
            }
        })*

        impl Optimizer {
            /// Every update rule with its defaults.
            pub fn all() -> Vec<Self> {
                vec![$($crate_name::$rule::default().into(),)*]
            }

            /// The rule as planner and command line see it.
            pub fn rule(&self) -> &dyn UpdateRule {
                match self {
                    $(Optimizer::$rule(rule) => rule,)*
                }
            }

            /// This rule at another learning rate.
            pub fn with_lr(self, lr: f64) -> Self {
                match self {
                    $(Optimizer::$rule(rule) => $crate_name::$rule { lr, ..rule }.into(),)*
                }
            }
        }
    };
}

optimizers! {
    /// Adam or AdamW; see [`fusestep_fused_adam::Adam`].
    Adam of fusestep_fused_adam;
    /// SGD, with or without momentum; see [`fusestep_fused_sgd::Sgd`].
    Sgd of fusestep_fused_sgd;
    /// Lion; see [`fusestep_lion::Lion`].
    Lion of fusestep_lion;
    /// Adagrad; see [`fusestep_adagrad::Adagrad`].
    Adagrad of fusestep_adagrad;
    /// RMSprop, centered or not; see [`fusestep_rmsprop::RmsProp`].
    RmsProp of fusestep_rmsprop;
    /// Schedule-Free AdamW; see [`fusestep_schedule_free::ScheduleFree`].
    ScheduleFree of fusestep_schedule_free;
    /// LARS momentum; see [`fusestep_lars_momentum::Lars`].
    Lars of fusestep_lars_momentum;
    /// LAMB; see [`fusestep_lamb::Lamb`].
    Lamb of fusestep_lamb;
}

impl Optimizer {
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
        self.rule().objective()
    }

    /// Checks every hyper-parameter.
    ///
    /// # Errors
    /// [`PlanError::Rule`], naming the first hyper-parameter out of range.
    pub fn validate(&self) -> Result<()> {
        Ok(self.rule().validate()?)
    }

    /// The kernel for one parameter; hyper-parameters are already validated.
    pub(crate) fn kernel(
        &self,
        param: &ParamDesc,
        precisions: &Precisions,
    ) -> Result<Box<dyn MultiTensorKernel>> {
        let kernel = self.rule().kernel(param.dtype, precisions.of(param.dtype));
        kernel.map_err(|error| PlanError::Kernel { name: param.name.clone(), error })
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

/// The precision of parameters, by their dtype.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Precisions {
    all: Precision,
    /// Dtypes with a precision of their own.
    exceptions: Vec<(DType, Precision)>,
}

impl Precisions {
    pub(crate) fn all(precision: Precision) -> Self {
        Self { all: precision, exceptions: Vec::new() }
    }

    /// These settings, but for one dtype.
    pub(crate) fn set(&mut self, dtype: DType, precision: Precision) {
        self.exceptions.retain(|exception| exception.0 != dtype);
        self.exceptions.push((dtype, precision));
    }

    pub(crate) fn of(&self, dtype: DType) -> Precision {
        let exception = self.exceptions.iter().find(|exception| exception.0 == dtype);
        exception.map_or(self.all, |exception| exception.1)
    }
}

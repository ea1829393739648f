//! What an optimizer is to planner and command line.

use std::fmt;

use fusestep_tensor::{DType, ParamDesc, short_number};

use crate::{MultiTensorKernel, Precision};

/// An update rule with its hyper-parameters: the value that a user configures, from which kernels
/// are made.
pub trait UpdateRule: fmt::Debug + Send + Sync {
    /// The name on the command line and in plans: `adamw`.
    fn name(&self) -> &'static str;

    /// The learning rate.
    fn lr(&self) -> f64;

    /// All hyper-parameters, the learning rate included, as plans print them.
    fn hyper_parameters(&self) -> Vec<(&'static str, f64)>;

    /// Whether steps go against the gradient or along it, if the rule offers both.
    fn objective(&self) -> Option<Objective> {
        None
    }

    /// The factor w of x = p + w·(z − p), if a model is evaluated with such an average x of the
    /// parameter p and the list [`fusestep_tensor::Role::Base`], z.
    fn averaging(&self) -> Option<f64> {
        None
    }

    /// Settings under which the rule's state means something else, and their values, beside the
    /// name and the objective. What is merely tuned (rates, decays, ε) is none of them.
    fn settings_of_state(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// Checks every hyper-parameter.
    ///
    /// # Errors
    /// [`RuleError::Hyper`] naming the first one out of range.
    fn validate(&self) -> Result<(), RuleError>;

    /// The kernel for parameters and gradients of this dtype, kept with this precision.
    ///
    /// # Errors
    /// [`RuleError::Hyper`] as in [`UpdateRule::validate`]; [`RuleError::DType`] for a dtype there
    /// is no kernel for; [`RuleError::Precision`] for a precision that parameters of this dtype
    /// cannot have.
    fn kernel(
        &self,
        dtype: DType,
        precision: Precision,
    ) -> Result<Box<dyn MultiTensorKernel>, RuleError>;
}

/// How weight decay enters the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightDecay {
    /// λ·p is added to the gradient.
    L2(f64),
    /// p is multiplied by 1 − lr·λ before the step, as AdamW does.
    Decoupled(f64),
}

impl WeightDecay {
    /// The factor λ.
    pub fn lambda(self) -> f64 {
        match self {
            WeightDecay::L2(lambda) | WeightDecay::Decoupled(lambda) => lambda,
        }
    }

    /// `l2` or `decoupled`.
    pub const fn name(self) -> &'static str {
        match self {
            WeightDecay::L2(_) => "l2",
            WeightDecay::Decoupled(_) => "decoupled",
        }
    }

    /// 1 if decay is decoupled, else 0, as a device reads it.
    pub fn decoupled_scalar(self) -> f64 {
        f64::from(matches!(self, WeightDecay::Decoupled(_)))
    }

    /// This kind with another λ.
    pub fn with_lambda(self, lambda: f64) -> Self {
        match self {
            WeightDecay::L2(_) => WeightDecay::L2(lambda),
            WeightDecay::Decoupled(_) => WeightDecay::Decoupled(lambda),
        }
    }
}

/// Whether the objective falls or rises along the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Objective {
    /// Steps against the gradient.
    #[default]
    Minimize,
    /// Steps along the gradient.
    Maximize,
}

impl Objective {
    /// `minimize` or `maximize`.
    pub const fn name(self) -> &'static str {
        match self {
            Objective::Minimize => "minimize",
            Objective::Maximize => "maximize",
        }
    }
}

/// The values that a hyper-parameter may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// Finite and at least 0.
    NotNegative,
    /// In [0, 1).
    BelowOne,
    /// Finite and above 0.
    Positive,
}

impl Domain {
    fn contains(self, value: f64) -> bool {
        match self {
            Domain::NotNegative => value.is_finite() && value >= 0.0,
            Domain::BelowOne => (0.0..1.0).contains(&value),
            Domain::Positive => value.is_finite() && value > 0.0,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Domain::NotNegative => "a finite value of at least 0",
            Domain::BelowOne => "a value in [0, 1)",
            Domain::Positive => "a finite value above 0",
        }
    }
}

/// Checks hyper-parameters in the given order.
///
/// # Errors
/// [`RuleError::Hyper`] naming the first one out of range.
pub fn check_hyper(values: &[(&'static str, f64, Domain)]) -> Result<(), RuleError> {
    for &(what, found, domain) in values {
        if !domain.contains(found) {
            return Err(RuleError::Hyper { what, expected: domain.text(), found });
        }
    }
    Ok(())
}

/// Refuses hyper-parameters that an update of this dtype would take as infinite: all dtypes but f64
/// are updated in f32.
///
/// # Errors
/// [`RuleError::Hyper`] naming the first of them.
pub fn check_width(rule: &dyn UpdateRule, dtype: DType) -> Result<(), RuleError> {
    let beyond = |&(_, value): &(_, f64)| value.is_finite() && !(value as f32).is_finite();
    match rule.hyper_parameters().into_iter().find(beyond) {
        Some((what, found)) if dtype != DType::F64 => {
            Err(RuleError::Hyper { what, expected: ParamDesc::MOST_IN_F32, found })
        }
        _ => Ok(()),
    }
}

/// Why an update rule was refused; nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// A hyper-parameter is out of range.
    #[error("{what}: expected {expected}, found {found}", found = short_number(*found))]
    Hyper {
        /// The hyper-parameter.
        what: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What was given.
        found: f64,
    },
    /// There is no kernel for this dtype.
    #[error("{rule}: expected parameters of {expected}, found {found}; cast the parameter")]
    DType {
        /// The rule.
        rule: &'static str,
        /// The dtypes it has kernels for.
        expected: &'static str,
        /// The dtype asked for.
        found: DType,
    },
    /// Parameters of this dtype cannot be kept so.
    #[error("{rule}: {what} of {dtype} parameters: expected {expected}, found {found}")]
    Precision {
        /// The rule.
        rule: &'static str,
        /// What was asked for: master weights, state or rounding.
        what: &'static str,
        /// The parameters' dtype.
        dtype: DType,
        /// What there is for this dtype.
        expected: &'static str,
        /// What was asked for.
        found: &'static str,
    },
}

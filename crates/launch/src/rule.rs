//! Update rules, as planner and command line know them.

use std::fmt;

use fusestep_tensor::{DType, ParamDesc};

use crate::{MultiTensorKernel, Precision, RuleError};

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

    /// The factor w of x = p + w·(z − p), if a model is evaluated with such an average x. p is the
    /// parameter, z the list [`fusestep_tensor::Role::Base`].
    fn averaging(&self) -> Option<f64> {
        None
    }

    /// Settings, besides name and objective, that decide what the rule's state means, and their
    /// values. Rates, decays and ε are merely tuned and are not among them.
    fn settings_of_state(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// All other settings that decide the bits of a step, and their values. The learning rate and
    /// factors on the gradient are not among them, because runs change them as they go.
    fn settings(&self) -> Vec<(&'static str, String)> {
        tuned(self.hyper_parameters())
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

/// The hyper-parameters that [`UpdateRule::settings`] names, as text: all but the learning rate and
/// `rescale`.
pub fn tuned(hyper_parameters: Vec<(&'static str, f64)>) -> Vec<(&'static str, String)> {
    let all = hyper_parameters.into_iter();
    let tuned = all.filter(|(what, _)| !matches!(*what, "lr" | "rescale"));
    tuned.map(|(what, value)| (what, value.to_string())).collect()
}

/// The way in which weight decay enters the step.
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

    /// The factor λ, to be set.
    pub fn lambda_mut(&mut self) -> &mut f64 {
        match self {
            WeightDecay::L2(lambda) | WeightDecay::Decoupled(lambda) => lambda,
        }
    }

    /// Name of this kind of weight decay: `l2` or `decoupled`.
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
    /// Name of the objective: `minimize` or `maximize`.
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
    /// In (0, 1).
    BetweenZeroAndOne,
    /// Finite and above 0.
    Positive,
}

impl Domain {
    fn contains(self, value: f64) -> bool {
        match self {
            Domain::NotNegative => value.is_finite() && value >= 0.0,
            Domain::BelowOne => (0.0..1.0).contains(&value),
            Domain::BetweenZeroAndOne => value > 0.0 && value < 1.0,
            Domain::Positive => value.is_finite() && value > 0.0,
        }
    }

    /// The values in words.
    pub fn text(self) -> &'static str {
        match self {
            Domain::NotNegative => "a finite value of at least 0",
            Domain::BelowOne => "a value in [0, 1)",
            Domain::BetweenZeroAndOne => "a value in (0, 1)",
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

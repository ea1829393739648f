//! Update rules of a plan, and the precision in which parameters are kept.

use std::fmt;

use fusestep_fused_adam::Adam;
use fusestep_launch::{
    GradDType, Master, MultiTensorKernel, Objective, Precision, Setting, Settings, StateDType,
    UpdateRule, WeightDecay,
};
use fusestep_tensor::{DType, ParamDesc};

use crate::error::{PlanError, Result};

/// Value below which a hyper-parameter is printed with an exponent.
const SMALL: f64 = 1e-4;

/// The update rules that plans apply, each by its sentence, its type and its crate.
macro_rules! optimizers {
    ($(#[doc = $says:literal] $(#[cfg($feature:meta)])? $rule:ident of $crate_name:ident;)*) => {
        /// The update rule and its hyper-parameters.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum Optimizer {
            $(#[doc = $says] $(#[cfg($feature)])? $rule($crate_name::$rule),)*
        }

        $($(#[cfg($feature)])? impl From<$crate_name::$rule> for Optimizer {
            fn from(rule: $crate_name::$rule) -> Self {
                Optimizer::$rule(rule)
            }
        })*

        impl Optimizer {
            /// All update rules, with their defaults.
            pub fn all() -> Vec<Self> {
                vec![$($(#[cfg($feature)])? $crate_name::$rule::default().into(),)*]
            }

            /// The rule as planner and command line see it.
            pub fn rule(&self) -> &dyn UpdateRule {
                match self {
                    $($(#[cfg($feature)])? Optimizer::$rule(rule) => rule,)*
                }
            }

            /// Returns the rule with another learning rate.
            pub fn with_lr(self, lr: f64) -> Self {
                match self {
                    $(
                        $(#[cfg($feature)])?
                        Optimizer::$rule(rule) => $crate_name::$rule { lr, ..rule }.into(),
                    )*
                }
            }

            /// Visits every setting of the rule, in the order of its fields.
            pub fn each(&mut self, visit: &mut dyn FnMut(Setting<'_>)) {
                match self {
                    $($(#[cfg($feature)])? Optimizer::$rule(rule) => rule.each(visit),)*
                }
            }

            /// One sentence on the rule.
            fn says(&self) -> &'static str {
                match self {
                    $($(#[cfg($feature)])? Optimizer::$rule(_) => $says.trim_ascii(),)*
                }
            }
        }
    };
}

optimizers! {
    /// Adam, with decoupled weight decay or L2 regularisation.
    Adam of fusestep_fused_adam;
    /// Stochastic gradient descent, with a velocity or without.
    #[cfg(feature = "sgd")]
    Sgd of fusestep_fused_sgd;
    /// The sign of a moving mean, with decoupled weight decay.
    #[cfg(feature = "lion")]
    Lion of fusestep_lion;
    /// Steps scaled by the sum of squared gradients.
    #[cfg(feature = "adagrad")]
    Adagrad of fusestep_adagrad;
    /// Steps scaled by a moving mean of squared gradients.
    #[cfg(feature = "rmsprop")]
    RmsProp of fusestep_rmsprop;
    /// AdamW whose average takes the place of a schedule.
    #[cfg(feature = "schedule-free")]
    ScheduleFree of fusestep_schedule_free;
    /// Momentum with a rate for each layer: LARS.
    #[cfg(feature = "lars")]
    Lars of fusestep_lars_momentum;
    /// Adam with a rate for each layer: LAMB.
    #[cfg(feature = "lamb")]
    Lamb of fusestep_lamb;
    /// Adam scaled by the largest gradient in place of the second moment.
    #[cfg(feature = "adamax")]
    Adamax of fusestep_adamax;
    /// Adam that steps along the next momentum: Nesterov's.
    #[cfg(feature = "nadam")]
    NAdam of fusestep_nadam;
}

/// A rule under a name of the command line, with the settings that the name stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedRule {
    /// The rule, whose name it is.
    pub rule: Optimizer,
    /// One sentence on it.
    pub says: &'static str,
}

impl NamedRule {
    /// Every name: those of all rules, and of Adam and SGD two each.
    pub fn all() -> Vec<Self> {
        let of = |rule, says| Self { rule, says };
        let names = Optimizer::all().into_iter().flat_map(|rule| match rule {
            Optimizer::Adam(adam) => {
                let l2 = Adam { weight_decay: WeightDecay::L2(0.0), ..adam };
                vec![
                    of(rule, "Adam with decoupled weight decay"),
                    of(l2.into(), "Adam with L2 regularisation"),
                ]
            }
            #[cfg(feature = "sgd")]
            Optimizer::Sgd(_) => vec![
                of(rule, "Stochastic gradient descent, which keeps no state"),
                of(fusestep_fused_sgd::Sgd::with_momentum().into(), "SGD with a velocity"),
            ],
            #[allow(unreachable_patterns)] // Where Adam is the only rule.
            _ => vec![of(rule, rule.says().trim_end_matches('.'))],
        });
        names.collect()
    }
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

    /// Whether the rule scales the step of each parameter by a ratio of norms, as LARS and LAMB do.
    pub fn has_trust(&self) -> bool {
        let kernel = self.rule().kernel(DType::F32, Precision::default());
        kernel.is_ok_and(|kernel| kernel.normed().is_some())
    }

    /// Whether the rule keeps state beside parameters and gradients.
    pub fn keeps_state(&self) -> bool {
        let kernel = self.rule().kernel(DType::F32, Precision::default());
        kernel.is_ok_and(|kernel| kernel.lists().iter().any(|list| list.role.is_state()))
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
        let kernel = self.rule().kernel(param.dtype, precisions.of_param(param));
        kernel.map_err(|error| PlanError::Kernel { name: param.name.clone(), error })
    }
}

impl Optimizer {
    /// Refuses a precision that the rule has not for a parameter of this dtype, however small.
    pub(crate) fn check_precision(&self, param: &ParamDesc, precisions: &Precisions) -> Result<()> {
        let kernel = self.rule().kernel(param.dtype, precisions.of(param.dtype));
        let name = || param.name.clone();
        kernel.map(|_| ()).map_err(|error| PlanError::Kernel { name: name(), error })
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

/// Elements from which on a tensor's state may lie in int8: smaller tensors would grow by padding,
/// and save nothing that counts.
pub const LEAST_INT8_ELEMENTS: u64 = 4096;

/// The precision of a parameter whose state stays in f32 beside others in int8: remainders of 8
/// bits, which only int8 has, are 16 bits there.
pub fn in_f32(precision: Precision) -> Precision {
    let master = match precision.master {
        Master::Remainder8 => Master::Remainder,
        other => other,
    };
    Precision { state: StateDType::Compute, master, ..precision }
}

/// Whether a parameter's state stays in f32 where others' is kept in int8: it is small, or one of
/// these parts is in its name.
pub fn keeps_f32(param: &ParamDesc, parts_of_names: &[String]) -> bool {
    why_f32(param, parts_of_names).is_some()
}

fn why_f32<'a>(param: &ParamDesc, parts_of_names: &'a [String]) -> Option<KeptF32<'a>> {
    if param.numel() < LEAST_INT8_ELEMENTS {
        return Some(KeptF32::Small);
    }
    let named = parts_of_names.iter().find(|part| param.name.contains(part.as_str()));
    named.map(|part| KeptF32::Named(part))
}

/// The precision of parameters, by their dtype.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct Precisions {
    all: Precision,
    /// Dtypes with a precision of their own.
    exceptions: Vec<(DType, Precision)>,
    /// Parts of the names of parameters whose state stays in f32 beside others in int8.
    keep_f32: Vec<String>,
}

/// Fields by name. Names that stay in f32 are left out where there are none, so that plans from
/// before there was a choice have the same hash.
impl fmt::Debug for Precisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { all, exceptions, keep_f32 } = self;
        let mut fields = f.debug_struct("Precisions");
        fields.field("all", all).field("exceptions", exceptions);
        if !keep_f32.is_empty() {
            fields.field("keep_f32", keep_f32);
        }
        fields.finish()
    }
}

/// Reason for which a parameter's state stays in f32 beside others in int8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptF32<'a> {
    /// It has fewer than [`LEAST_INT8_ELEMENTS`].
    Small,
    /// This part of its name was asked for.
    Named(&'a str),
}

impl Precisions {
    pub(crate) fn all(precision: Precision) -> Self {
        Self { all: precision, ..Self::default() }
    }

    /// Names parts of the names of parameters whose state stays in f32.
    pub(crate) fn keep_f32(&mut self, parts_of_names: Vec<String>) {
        self.keep_f32 = parts_of_names;
    }

    /// Parts of names that were asked for.
    pub(crate) fn kept_names(&self) -> &[String] {
        &self.keep_f32
    }

    /// Reason for state in f32; `None` where it is not, or nobody's is in int8.
    pub(crate) fn why_f32(&self, param: &ParamDesc) -> Option<KeptF32<'_>> {
        match self.of(param.dtype).state {
            StateDType::Int8 => why_f32(param, &self.keep_f32),
            _ => None,
        }
    }

    /// The precision of a parameter.
    pub(crate) fn of_param(&self, param: &ParamDesc) -> Precision {
        let precision = self.of(param.dtype);
        match self.why_f32(param) {
            Some(_) => in_f32(precision),
            None => precision,
        }
    }

    /// Sets the precision of one dtype.
    pub(crate) fn set(&mut self, dtype: DType, precision: Precision) {
        self.exceptions.retain(|exception| exception.0 != dtype);
        self.exceptions.push((dtype, precision));
    }

    /// Keeps gradients of 16-bit parameters in f32.
    pub(crate) fn widen_gradients(&mut self) {
        for dtype in [DType::F16, DType::BF16] {
            let precision = self.of(dtype);
            self.set(dtype, Precision { grad: GradDType::Compute, ..precision });
        }
    }

    pub(crate) fn of(&self, dtype: DType) -> Precision {
        let exception = self.exceptions.iter().find(|exception| exception.0 == dtype);
        exception.map_or(self.all, |exception| exception.1)
    }
}

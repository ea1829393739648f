//! Why an update rule was refused.

use fusestep_tensor::{DType, short_number};

/// Error of an update rule that was refused. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// A hyper-parameter is out of range.
    #[error("{what}: expected {expected}, found {found}", found = short_number(*found))]
    Hyper {
        /// The hyper-parameter.
        what: &'static str,
        /// The values that it may take.
        expected: &'static str,
        /// The value given.
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
    #[error(
        "{rule}: {what} of {dtype} parameters: expected {expected}, found {found} (setting \
         `{}`)",
        setting_of(what)
    )]
    Precision {
        /// The rule.
        rule: &'static str,
        /// The setting: master weights, state or rounding.
        what: &'static str,
        /// The parameters' dtype.
        dtype: DType,
        /// The values that this dtype may have.
        expected: &'static str,
        /// The value asked for.
        found: &'static str,
    },
}

impl RuleError {
    /// Name of the setting that was refused, as tables of settings have it; `None` where it is the
    /// parameter's own dtype.
    pub fn setting(&self) -> Option<&'static str> {
        match self {
            Self::Hyper { what, .. } => Some(what),
            Self::DType { .. } => None,
            Self::Precision { what, .. } => Some(setting_of(what)),
        }
    }
}

/// The setting of a part of a precision.
fn setting_of(what: &'static str) -> &'static str {
    match what {
        "master weights" => "master_weights",
        "state" => "state_dtype",
        "gradients" => "reduce_dtype",
        other => other,
    }
}

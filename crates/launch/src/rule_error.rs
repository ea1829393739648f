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
    #[error("{rule}: {what} of {dtype} parameters: expected {expected}, found {found}")]
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

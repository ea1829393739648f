//! Settings of some parameters, or of those of one dtype.

use fusestep_launch::Precision;
use fusestep_planner::Optimizer;
use fusestep_tensor::DType;

/// Parameters with a rule of their own, which no group before this one has.
///
/// Groups of equal rules are one to the plan, and one that has the optimizer's own rule follows the
/// optimizer's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnRule {
    /// The parameters.
    pub of: Names,
    /// Their rule.
    pub rule: Optimizer,
}

/// How parameters are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// By their whole names, each of which a parameter has to have.
    Whole(Vec<String>),
    /// By parts of their names, each of which a name has to contain.
    Containing(Vec<String>),
}

impl OwnRule {
    /// The parameters of these names.
    pub fn of<N: Into<String>>(
        names: impl IntoIterator<Item = N>,
        rule: impl Into<Optimizer>,
    ) -> Self {
        let names = names.into_iter().map(Into::into).collect();
        Self { of: Names::Whole(names), rule: rule.into() }
    }

    /// The parameters whose names contain one of these.
    pub fn containing<N: Into<String>>(
        parts: impl IntoIterator<Item = N>,
        rule: impl Into<Optimizer>,
    ) -> Self {
        let parts = parts.into_iter().map(Into::into).collect();
        Self { of: Names::Containing(parts), rule: rule.into() }
    }
}

/// A value of the parameters whose names contain a pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct OfParams<T> {
    /// Part of their names.
    pub pattern: String,
    /// Their value.
    pub value: T,
}

/// The precision of parameters of one dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrecisionOf {
    /// Their dtype.
    pub dtype: DType,
    /// How exactly they and their state are kept.
    pub precision: Precision,
}

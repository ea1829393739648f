//! Roles of tensors in the update rule.

use std::fmt;

/// The role of a tensor in the update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Role {
    /// The parameter, which is trained (p).
    Param,
    /// The derivative of the loss with respect to the parameter (g).
    Grad,
    /// Running mean of the gradient (m).
    Moment1,
    /// Running mean of the squared gradient (v).
    Moment2,
    /// Largest `moment2` seen so far; only AMSGrad keeps it.
    MaxMoment2,
    /// Decaying sum of the gradients (u), or of the gradients as RMSprop divides them (b).
    Velocity,
    /// Decaying maximum of the gradient's magnitude (u): Adamax.
    MaxGrad,
    /// Sum of the squared gradients (Adagrad).
    Sum,
    /// Parameter that steps lead to without averaging (z): Schedule-Free.
    Base,
    /// f32 copy of a 16-bit parameter, on which the update is computed.
    Master,
    /// The 16 bits that a bf16 parameter lacks of its f32 master.
    Remainder,
}

impl Role {
    /// The glossary name, which is also the suffix in state files: `<name>@moment1`.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Param => "param",
            Role::Grad => "grad",
            Role::Moment1 => "moment1",
            Role::Moment2 => "moment2",
            Role::MaxMoment2 => "max_moment2",
            Role::Velocity => "velocity",
            Role::MaxGrad => "max_grad",
            Role::Sum => "sum",
            Role::Base => "base",
            Role::Master => "master",
            Role::Remainder => "remainder",
        }
    }

    /// Whether the tensor belongs to the optimizer's state, not to the model.
    pub const fn is_state(self) -> bool {
        !matches!(self, Role::Param | Role::Grad)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

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
    /// Units of a `moment1` in codes.
    Moment1Units,
    /// Units of a `moment2` in codes.
    Moment2Units,
    /// Units of a `max_moment2` in codes.
    MaxMoment2Units,
    /// Units of a `velocity` in codes.
    VelocityUnits,
    /// Units of a `max_grad` in codes.
    MaxGradUnits,
    /// Units of a `sum` in codes.
    SumUnits,
}

/// Elements of a tensor that share a unit, where state is kept in codes of 8 bits: consecutive ones
/// from the tensor's first. The last may be fewer.
pub const UNIT_ELEMENTS: u64 = 1 << UNIT_SHIFT;

/// Binary logarithm of [`UNIT_ELEMENTS`].
const UNIT_SHIFT: u32 = 5;

/// Roles of state that may be kept in codes, each with the role of its units.
const CODED: [(Role, Role); 6] = [
    (Role::Moment1, Role::Moment1Units),
    (Role::Moment2, Role::Moment2Units),
    (Role::MaxMoment2, Role::MaxMoment2Units),
    (Role::Velocity, Role::VelocityUnits),
    (Role::MaxGrad, Role::MaxGradUnits),
    (Role::Sum, Role::SumUnits),
];

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
            Role::Moment1Units => "moment1_units",
            Role::Moment2Units => "moment2_units",
            Role::MaxMoment2Units => "max_moment2_units",
            Role::VelocityUnits => "velocity_units",
            Role::MaxGradUnits => "max_grad_units",
            Role::SumUnits => "sum_units",
        }
    }

    /// The role of this state's units, where it is kept in codes; `None` for what never is.
    pub fn units(self) -> Option<Self> {
        CODED.iter().find(|coded| coded.0 == self).map(|coded| coded.1)
    }

    /// The role of the state whose units these are; `None` for any other role.
    pub fn unit_of(self) -> Option<Self> {
        CODED.iter().find(|coded| coded.1 == self).map(|coded| coded.0)
    }

    /// Entries of a list in this role, for so many elements of a tensor: one for each element, and
    /// of units one for each [`UNIT_ELEMENTS`], the last of which may be fewer.
    ///
    /// ```
    /// # use fusestep_tensor::Role;
    /// assert_eq!(Role::Moment1.entries(33), 33);
    /// assert_eq!(Role::Moment1Units.entries(33), 2);
    /// ```
    pub const fn entries(self, elements: u64) -> u64 {
        (elements >> self.shift()) + (elements & ((1 << self.shift()) - 1) != 0) as u64
    }

    /// Binary logarithm of the elements that share an entry.
    pub const fn shift(self) -> u32 {
        match self {
            Role::Moment1Units
            | Role::Moment2Units
            | Role::MaxMoment2Units
            | Role::VelocityUnits
            | Role::MaxGradUnits
            | Role::SumUnits => UNIT_SHIFT,
            _ => 0,
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

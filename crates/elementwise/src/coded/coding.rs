//! Codings of state lists, their units, and the dither of a step.

use fusestep_simd::{CODED_GROUP, CODED_PAIR, factor_of};
use fusestep_tensor::{Role, UNIT_ELEMENTS};

/// Elements of a tensor with one unit.
pub const GROUP: usize = CODED_GROUP;

/// Elements of two groups, which loops take at a time.
pub(crate) const PAIR: usize = CODED_PAIR;

const _: () = assert!(GROUP as u64 == UNIT_ELEMENTS, "lists are cut at groups");

/// The number of units of a list of `numel` elements.
pub const fn units_of(numel: usize) -> usize {
    numel.div_ceil(GROUP)
}

/// Meaning of the codes of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Values of either sign, such as a first moment or a velocity.
    Signed,
    /// Squares whose roots are coded, such as a second moment.
    Root,
    /// Values that are not negative, such as a running maximum of magnitudes.
    Positive,
}

impl Coding {
    /// The coding of a list of state, which is one for all rules; `None` for lists that have none.
    pub const fn of(role: Role) -> Option<Self> {
        match role {
            Role::Moment1 | Role::Velocity => Some(Coding::Signed),
            Role::Moment2 | Role::MaxMoment2 | Role::Sum => Some(Coding::Root),
            Role::MaxGrad => Some(Coding::Positive),
            _ => None,
        }
    }

    /// The code that the largest value of a group gets, in steps of the smallest.
    pub(crate) const fn most(self) -> f32 {
        match self {
            Coding::Signed => 252.0,
            Coding::Root | Coding::Positive => 255.0,
        }
    }

    /// The unit of a group whose largest value, or root, is `largest`.
    #[inline(always)]
    pub(crate) fn unit(self, largest: f32) -> f32 {
        const SIGNED: f32 = (524_288.0_f64 / 252.0) as f32;
        const POSITIVE: f32 = (1.0_f64 / 255.0) as f32;
        match self {
            Coding::Signed => largest * SIGNED,
            Coding::Root | Coding::Positive => largest * POSITIVE,
        }
    }

    /// The factor of that group.
    #[inline(always)]
    pub(crate) fn factor(self, largest: f32) -> f32 {
        factor_of(self.most(), largest)
    }
}

/// Numbers from −1/2 to 1/2 that are added before a code of [`Coding::Root`] or
/// [`Coding::Positive`] is rounded: one for each place of a group.
///
/// To nearest, a root that is not its group's largest keeps its code until one gradient moves it by
/// half a code at once. So it follows bursts and never falls beside its group. With numbers that go
/// evenly through their range from step to step it is right in the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(align(64))]
pub struct Dither {
    pub(crate) lanes: [f32; GROUP],
}

impl Dither {
    /// No dither: codes are rounded to nearest, as values that are coded once should be.
    pub const NEAREST: Self = Self { lanes: [0.0; GROUP] };

    /// The dither of a step.
    ///
    /// ```text
    /// h = step·0x9E3779B9 + place·0x85EBCA6B mod 2³²        dither = (2·⌊h / 2¹⁷⌋ + 1)·2⁻¹⁶ − 1/2
    /// ```
    /// # Units
    /// `step` counts from 1; its lower 32 bits count.
    pub fn of_step(step: u64) -> Self {
        // Odd multiples of 2⁻¹⁶: 255 + dither is exact, and the largest root never loses a code.
        let lanes = std::array::from_fn(|place| {
            let of_step = (step as u32).wrapping_mul(0x9e37_79b9);
            let h = of_step.wrapping_add((place as u32).wrapping_mul(0x85eb_ca6b));
            (2 * (h >> 17) + 1) as f32 / 65_536.0 - 0.5
        });
        Self { lanes }
    }

    /// The number of each place.
    pub fn lanes(&self) -> &[f32; GROUP] {
        &self.lanes
    }
}

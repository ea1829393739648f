//! The precision of parameters and state: masters, dtypes and rounding.

use std::fmt;

use fusestep_tensor::DType;

/// Further bits of a 16-bit parameter, so that updates smaller than its rounding are not lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Master {
    /// No further bits.
    #[default]
    None,
    /// An f32 copy, which is updated; the parameter is the copy rounded to nearest even.
    F32,
    /// The 16 bits by which the f32 master differs from the bf16 parameter. The two together are
    /// the master, bit for bit.
    Remainder,
    /// The 8 bits below a bf16 parameter, which make it the upper 24 bits of an f32; beside state
    /// in int8 alone.
    Remainder8,
}

/// The dtype of moments and other state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum StateDType {
    /// The type that arithmetic is done in: f64 for f64 parameters, else f32.
    #[default]
    Compute,
    /// bf16.
    Bf16,
    /// Codes of 8 bits, with an f32 unit for each 32 elements of a tensor.
    Int8,
}

/// The rounding of values to bf16. Other dtypes, and parameters with a master, are always rounded
/// to nearest even.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Rounding {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// Up or down at random, so that the expected value is the exact one. The random bits depend on
    /// seed, step, parameter and element alone ([`crate::random_bits`]).
    Stochastic {
        /// Start of the random numbers.
        seed: u64,
    },
}

/// The dtype of gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum GradDType {
    /// The dtype of the parameter.
    #[default]
    Param,
    /// The type that arithmetic is done in: f64 for f64 parameters, else f32.
    Compute,
}

impl GradDType {
    /// Whether gradients have the parameter's dtype.
    pub fn is_param(&self) -> bool {
        *self == GradDType::Param
    }

    /// The storage type of gradients of a parameter of this type.
    pub fn of(self, param: DType) -> DType {
        match self {
            GradDType::Compute if param != DType::F64 => DType::F32,
            _ => param,
        }
    }
}

/// The precision of a parameter, its state and its gradient. By default there is no master, state
/// is in the compute type, values are rounded to nearest, and gradients are kept as the parameter
/// is.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Precision {
    /// The master or remainder of a parameter, if it has one.
    pub master: Master,
    /// The dtype of state.
    pub state: StateDType,
    /// The rounding of values to bf16.
    pub rounding: Rounding,
    /// The dtype of gradients.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "GradDType::is_param"))]
    pub grad: GradDType,
}

/// Fields by name. Gradients are left out at their default, so that a text of a run from before
/// there was a choice is the same today.
impl fmt::Debug for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { master, state, rounding, grad } = self;
        let mut all = f.debug_struct("Precision");
        all.field("master", master).field("state", state).field("rounding", rounding);
        if !grad.is_param() {
            all.field("grad", grad);
        }
        all.finish()
    }
}

impl Master {
    /// The name on the command line: `none`, `f32`, `remainder` or `remainder8`.
    pub const fn name(self) -> &'static str {
        match self {
            Master::None => "none",
            Master::F32 => "f32",
            Master::Remainder => "remainder",
            Master::Remainder8 => "remainder8",
        }
    }
}

impl StateDType {
    /// The name on the command line: `f32`, `bf16` or `int8`.
    pub const fn name(self) -> &'static str {
        match self {
            StateDType::Compute => "f32",
            StateDType::Bf16 => "bf16",
            StateDType::Int8 => "int8",
        }
    }
}

impl Precision {
    /// The precision that a text of [`Precision`]'s `Display` is of; `None` for any other text.
    ///
    /// ```
    /// # use fusestep_launch::{Precision, StateDType};
    /// let coded = Precision { state: StateDType::Int8, ..Precision::default() };
    /// assert_eq!(Precision::from_text(&coded.to_string()), Some(coded));
    /// assert_eq!(Precision::from_text("state int8"), None);
    /// ```
    pub fn from_text(text: &str) -> Option<Self> {
        let seeds = text.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok());
        let stochastic = seeds.map(|seed| Rounding::Stochastic { seed });
        let roundings: Vec<Rounding> = stochastic.chain([Rounding::Nearest]).collect();
        let masters = [Master::None, Master::F32, Master::Remainder, Master::Remainder8];
        let states = [StateDType::Compute, StateDType::Bf16, StateDType::Int8];
        let all = masters.into_iter().flat_map(|master| {
            let roundings = &roundings;
            states.into_iter().flat_map(move |state| {
                roundings.iter().flat_map(move |&rounding| {
                    let with = move |grad| Self { master, state, rounding, grad };
                    [GradDType::Param, GradDType::Compute].map(with)
                })
            })
        });
        all.into_iter().find(|precision| precision.to_string() == text)
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            StateDType::Compute => "as computed",
            StateDType::Bf16 => "bf16",
            StateDType::Int8 => "int8",
        };
        write!(f, "master weights {}, state {state}, ", self.master.name())?;
        match self.rounding {
            Rounding::Nearest => f.write_str("rounded to nearest")?,
            Rounding::Stochastic { seed } => write!(f, "rounded at random with seed {seed}")?,
        }
        match self.grad {
            GradDType::Param => Ok(()),
            GradDType::Compute => f.write_str(", gradients as computed"),
        }
    }
}

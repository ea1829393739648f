//! Traits of the types that arithmetic is done in and that tensors are kept in, and of code that is
//! compiled for them. The traits refer to each other, so they lie in one module.

use std::ops::{Add, Div, Mul, Neg, Sub};

use bytemuck::Pod;
use fusestep_launch::{Format, HostRun};
use fusestep_tensor::DType;

use crate::rounding::Rounding;

/// A type that arithmetic is done in; every operation is correctly rounded.
pub trait Compute:
    Pod
    + Send
    + Sync
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// The storage type that holds it exactly.
    const DTYPE: DType;
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Rounds once, to nearest even.
    fn round(value: f64) -> Self;
    /// This value in f64.
    fn exact(self) -> f64;
    /// The correctly rounded square root.
    fn sqrt(self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// The larger of the two, and NaN if either is NaN.
    fn maximum(self, other: Self) -> Self;
    /// Runs the code that is compiled for `format`; see [`crate::run_format`].
    fn visit<V: FormatVisitor<Self>>(format: Format, visitor: V) -> V::Output;
    /// Runs an update of values over lists of `format`: not generic, so that it is compiled once
    /// for all rules.
    #[doc(hidden)]
    fn convert(format: Format, converted: Converted<'_, '_>);
}

/// A type that tensors are kept in and that arithmetic in `C` reads exactly and writes with one
/// rounding.
pub trait Storage<C: Compute>: Pod + Send + Sync {
    /// The element type.
    const DTYPE: DType;
    /// Whether it is `C` itself.
    const IS_VALUE: bool = false;
    /// The value, unchanged.
    fn widen(self) -> C;
    /// The nearest value, ties to even.
    fn narrow(value: C) -> Self;
    /// Whether two neighbours are read and written as one word of 32 bits.
    const PAIRED: bool = false;
    /// The values of the lower and of the upper half; only where [`Self::PAIRED`].
    #[inline(always)]
    fn widen_pair(_word: u32) -> [C; 2] {
        [C::ZERO; 2]
    }
    /// The word of two values, each as by [`Self::narrow`]; only where [`Self::PAIRED`]. Neither is
    /// NaN if they are `NUMBERS`.
    #[inline(always)]
    fn narrow_pair<const NUMBERS: bool>(_values: [C; 2]) -> u32 {
        0
    }
    /// The word of two values, each as by [`Self::narrow_at_random`]; only where [`Self::PAIRED`].
    #[inline(always)]
    fn narrow_pair_at_random(_values: [C; 2], _random_bits: [u32; 2]) -> u32 {
        0
    }
    /// A neighbouring value, chosen by the lower 16 bits of `random_bits`; the nearest one for a
    /// type that is not rounded at random.
    #[inline(always)]
    fn narrow_at_random(value: C, _random_bits: u32) -> Self {
        Self::narrow(value)
    }
}

/// The storage of a parameter, as an update reads and writes it.
pub trait ParamStorage<C: Compute> {
    /// The storage type of parameter and gradient.
    type Param: Storage<C>;
    /// The element of the list that completes the parameter: a master weight, a remainder, or `()`
    /// if there is no such list.
    type Master: Pod + Send + Sync;
    /// Whether the value depends on the parameter itself.
    const READS_PARAM: bool = true;
    /// Whether the parameter alone is the value.
    const IS_VALUE: bool = false;

    /// The value that the update starts from.
    fn widen(param: Self::Param, master: Self::Master) -> C;
    /// The value that the update ended with.
    fn narrow(value: C) -> (Self::Param, Self::Master);
    /// The value that the update ended with, rounded by `random_bits` if there is no master or
    /// remainder.
    #[inline(always)]
    fn narrow_at_random(value: C, _random_bits: u32) -> (Self::Param, Self::Master) {
        Self::narrow(value)
    }
}

/// Code that is compiled for every way to keep tensors.
pub trait FormatVisitor<C: Compute> {
    /// The result of the code.
    type Output;
    /// Runs for parameters kept as `K`, state as `S`, and rounding as `R`.
    fn visit<K: ParamStorage<C>, S: Storage<C>, R: Rounding>(self) -> Self::Output;
}

/// An update of lists of values, and lists of another format that the update is to run over.
pub struct Converted<'a, 'b> {
    /// Number of roles of state.
    pub(crate) roles: usize,
    /// Bytes of step scalars, without the keys of random rounding.
    pub(crate) step_scalar_bytes: usize,
    /// The update, for lists of values without masters or remainders.
    pub(crate) update: &'b dyn Fn(HostRun<'_, '_>),
    /// The lists, and the places of the tensors in them.
    pub(crate) run: HostRun<'a, 'b>,
    /// Whether gradients are of the type that is computed in, whatever parameters are.
    pub(crate) has_wide_gradients: bool,
}

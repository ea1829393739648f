//! State in 8 bits: lists of codes with a unit for each group of 32 elements, an update that reads
//! and writes them in one pass, and conversions from and to f32.
//!
//! An element of a coded list is a byte. Consecutive [`GROUP`] elements of a tensor, counted from
//! its first, are a group and share one f32, their unit; the last group may be shorter. A tensor is
//! cut at multiples of [`GROUP`] only, since a cut elsewhere changes units and so bits.
//!
//! ```text
//! Signed      value = ±D·2⁻¹⁹·unit, where D(c) = max(c, 2c − 64, 4c − 256) of the lower 7 bits c
//! Root        value = (code·unit)²       code from 1 to 255, so no root is 0 beside a larger one
//! Positive    value = code·unit          code from 1 to 255
//! ```
//! [`reference`](mod@reference) has the definition of reading and writing. A group with a value
//! that is not finite gets a unit that is not finite, and reads as NaN and infinities.
//!
//! ```
//! use fusestep_elementwise::coded::{CodedState, Coding, Dither, decode, encode, units_of};
//!
//! let squares: Vec<f32> = (1..=40).map(|i| (i * i) as f32 * 1e-6).collect();
//! let (mut codes, mut units) = (vec![0; 40], vec![0.0; units_of(40)]);
//! let list = CodedState { codes: &mut codes, units: &mut units };
//! encode(Coding::Root, &squares, list, &Dither::NEAREST)?;
//! let mut found = vec![0.0; 40];
//! decode(Coding::Root, &codes, &units, &mut found)?;
//! assert!((found[39] / squares[39] - 1.0).abs() < 1e-6);
//! assert_eq!(codes[39], 255);
//! # Ok::<(), fusestep_elementwise::coded::CodedError>(())
//! ```

mod coding;
mod convert;
mod groups;
mod host;
mod normed;
pub mod reference;
mod run;
mod slices;
mod storage;
mod sums;
mod tensor;
#[cfg(test)]
mod tests;

pub use coding::{Coding, Dither, GROUP, units_of};
pub(crate) use host::run_coded;
pub(crate) use sums::{coded_chunk_sums, coded_param_sum};

pub use convert::{CodedError, decode, encode};
pub use normed::{NormedCodedTensor, step_coded_normed_slices};
pub use slices::step_coded_slices;
pub use tensor::{CodedState, CodedTensor, ParamSlices};

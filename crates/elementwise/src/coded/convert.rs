//! Coded lists from and to lists of f32.

use fusestep_simd::{Codec, CodedWork, Level};

use super::coding::{Coding, Dither, GROUP, PAIR, units_of};
use super::run::encode_pair;
use super::tensor::CodedState;

/// Error of a conversion that was refused. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{list}: expected {expected} elements, found {found}")]
pub struct CodedError {
    /// The list.
    pub list: &'static str,
    /// The element count that goes with the values.
    pub expected: usize,
    /// The list's element count.
    pub found: usize,
}

fn check(list: &'static str, expected: usize, found: usize) -> Result<(), CodedError> {
    if expected == found { Ok(()) } else { Err(CodedError { list, expected, found }) }
}

/// Reads codes: element e of `values` from code e and unit e / 32.
///
/// # Shapes
/// As many values as codes, and [`units_of`] that many units.
/// # Errors
/// [`CodedError`] naming the list and both counts. Any code and any unit is read.
pub fn decode(
    coding: Coding,
    codes: &[u8],
    units: &[f32],
    values: &mut [f32],
) -> Result<(), CodedError> {
    check("codes", values.len(), codes.len())?;
    check("units", units_of(values.len()), units.len())?;
    Level::detect().run(
        #[inline(always)]
        || decode_groups(coding, codes, units, values),
    );
    Ok(())
}

/// [`decode`] of lists whose lengths go together, as part of a loop that is compiled for a level.
#[inline(always)]
pub(super) fn decode_groups(coding: Coding, codes: &[u8], units: &[f32], values: &mut [f32]) {
    let groups = values.chunks_mut(GROUP).zip(codes.chunks(GROUP)).zip(units);
    for ((values, codes), &unit) in groups {
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = match coding {
                Coding::Signed => fusestep_simd::decode_signed(code) * unit,
                Coding::Root => {
                    let root = fusestep_simd::decode_positive(code) * unit;
                    root * root
                }
                Coding::Positive => fusestep_simd::decode_positive(code) * unit,
            };
        }
    }
}

/// Writes codes and units of values. Reading them again and writing what was read moves a unit by a
/// rounding at most.
///
/// # Shapes
/// As [`decode`].
/// # Units
/// `dither` is [`Dither::NEAREST`] for values that are coded once.
/// # Errors
/// [`CodedError`] naming the list and both counts. Any value is written: a negative square or a NaN
/// makes its group's unit NaN.
pub fn encode(
    coding: Coding,
    values: &[f32],
    list: CodedState<'_>,
    dither: &Dither,
) -> Result<(), CodedError> {
    check("codes", values.len(), list.codes.len())?;
    check("units", units_of(values.len()), list.units.len())?;
    Level::detect().run_coded(Encode { coding, values, list, dither });
    Ok(())
}

struct Encode<'a> {
    coding: Coding,
    values: &'a [f32],
    list: CodedState<'a>,
    dither: &'a Dither,
}

impl CodedWork for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<C: Codec>(self, codec: C) {
        let Self { coding, values, list, dither } = self;
        let pairs = values.chunks(PAIR).zip(list.codes.chunks_mut(PAIR));
        for ((values, codes), units) in pairs.zip(list.units.chunks_mut(2)) {
            let (mut pair, mut coded) = ([0.0; PAIR], [0; PAIR]);
            pair[..values.len()].copy_from_slice(values);
            if coding == Coding::Root {
                pair = pair.map(f32::sqrt);
            }
            let [first, second, ..] = codec.largest([&pair; 2]);
            for (unit, largest) in units.iter_mut().zip([first, second]) {
                *unit = coding.unit(largest);
            }
            let factors = [first, second].map(|largest| coding.factor(largest));
            encode_pair(codec, coding, &pair, &factors, dither, &mut coded);
            codes.copy_from_slice(&coded[..codes.len()]);
        }
    }
}

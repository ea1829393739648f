//! The definition of reading and writing codes: scalar, one group at a time, every operation
//! rounded once.

use super::coding::{Coding, Dither, GROUP};

/// The value of a code.
///
/// ```text
/// Signed    ±max(c, 2c − 64, 4c − 256)·2⁻¹⁹·unit        c = code mod 128, negative from 128 on
/// Root      (code·unit)²
/// Positive  code·unit
/// ```
pub fn decode(coding: Coding, code: u8, unit: f32) -> f32 {
    match coding {
        Coding::Signed => {
            let c = i32::from(code % 128);
            let d = c.max(2 * c - 64).max(4 * c - 256) as f32 / 524_288.0;
            (if code < 128 { d } else { -d }) * unit
        }
        Coding::Root => {
            let root = f32::from(code) * unit;
            root * root
        }
        Coding::Positive => f32::from(code) * unit,
    }
}

/// The codes and the unit of a group of at most [`GROUP`] values, from its first place on.
///
/// ```text
/// x = √value for Root, else value        M = the largest |x| as an integer, so that NaN is largest
/// Signed    unit = M·(2¹⁹/252)   k = min(252/M, largest f32), of NaN 0      t = |x|·k
///           c = round(min(t, t/2 + 32, t/4 + 64)), with the sign of x unless it is 0
///           128 if t is NaN
/// others    unit = M·(1/255)     k = min(255/M, largest f32), of NaN 0
///           code = round(x·k + dither), held in 1 ..= 255; 1 if that is NaN
/// ```
/// # Panics
/// If there are more than [`GROUP`] values.
pub fn encode(coding: Coding, values: &[f32], dither: &Dither) -> (Vec<u8>, f32) {
    assert!(values.len() <= GROUP, "a group has at most {GROUP} values, found {}", values.len());
    let x: Vec<f32> = match coding {
        Coding::Root => values.iter().map(|value| value.sqrt()).collect(),
        Coding::Signed | Coding::Positive => values.to_vec(),
    };
    let largest = f32::from_bits(x.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0));
    let (most, unit) = match coding {
        Coding::Signed => (252.0, largest * (524_288.0_f64 / 252.0) as f32),
        Coding::Root | Coding::Positive => (255.0, largest * (1.0_f64 / 255.0) as f32),
    };
    let k = if largest.is_nan() { 0.0 } else { (most / largest).min(f32::MAX) };
    let codes = x.iter().zip(dither.lanes()).map(|(&x, &dither)| match coding {
        Coding::Signed => {
            let t = x.abs() * k;
            let c = t.min(t / 2.0 + 32.0).min(t / 4.0 + 64.0).round_ties_even() as u8;
            match c {
                _ if t.is_nan() => 128,
                0 => 0,
                c if x < 0.0 => c + 128,
                c => c,
            }
        }
        Coding::Root | Coding::Positive => {
            let code = (x * k + dither).clamp(1.0, 255.0).round_ties_even();
            if code.is_nan() { 1 } else { code as u8 }
        }
    });
    (codes.collect(), unit)
}

//! Storage types of tensor elements.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::Quoted;

/// The storage type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary16.
    F16,
    /// The upper 16 bits of a binary32.
    BF16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned byte.
    U8,
    /// Unsigned 16-bit integer: the remainder beside a bf16 parameter.
    U16,
}

impl DType {
    /// All dtypes, in their order.
    pub const ALL: [Self; 8] =
        [Self::F32, Self::F64, Self::F16, Self::BF16, Self::I32, Self::I64, Self::U8, Self::U16];

    /// Number of elements that are infinite or NaN, of little-endian bytes; 0 for integers. Bytes
    /// behind the last whole element are not read.
    ///
    /// ```
    /// use fusestep_tensor::DType;
    ///
    /// let [one, nan, infinite] = [1.0f32, f32::NAN, f32::NEG_INFINITY].map(f32::to_le_bytes);
    /// assert_eq!(DType::F32.non_finite(&[one, nan, infinite].concat()), 2);
    /// let [largest, infinite, nan] = [0x7bffu16, 0xfc00, 0x7e01].map(u16::to_le_bytes);
    /// assert_eq!(DType::F16.non_finite(&[largest, infinite, nan].concat()), 2);
    /// assert_eq!(DType::BF16.non_finite(&[largest, infinite, nan].concat()), 0);
    /// assert_eq!(DType::BF16.non_finite(&0x7f80u16.to_le_bytes()), 1);
    /// assert_eq!(DType::U16.non_finite(&infinite), 0);
    /// ```
    ///
    /// # Cost
    /// One pass over the bytes, without a branch for each.
    pub fn non_finite(self, bytes: &[u8]) -> u64 {
        fn with<const N: usize>(bytes: &[u8], is: impl Fn([u8; N]) -> bool) -> u64 {
            let (elements, _) = bytes.as_chunks::<N>();
            elements.iter().map(|element| u64::from(is(*element))).sum()
        }
        // All bits of the exponent are set in what is not finite.
        let of_16_bits = |exponent: u16| {
            with(bytes, move |element| u16::from_le_bytes(element) & exponent == exponent)
        };
        match self {
            DType::F32 => with(bytes, |element| !f32::from_le_bytes(element).is_finite()),
            DType::F64 => with(bytes, |element| !f64::from_le_bytes(element).is_finite()),
            DType::F16 => of_16_bits(0x7c00),
            DType::BF16 => of_16_bits(0x7f80),
            DType::I32 | DType::I64 | DType::U8 | DType::U16 => 0,
        }
    }

    /// Bytes of one element.
    pub const fn len_bytes(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 | DType::U16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// The lower-case name used in plans, errors and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(text)).ok_or_else(
            || {
                format!(
                    "unknown dtype `{}`: expected f32, f64, f16, bf16, i32, i64, u8 or u16",
                    Quoted(text)
                )
            },
        )
    }
}

/// A Rust type that is the element of a tensor.
pub trait Element: bytemuck::Pod + PartialEq + Default + Send + Sync + fmt::Debug {
    /// The storage type that this Rust type is.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for i64 {
    const DTYPE: DType = DType::I64;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
impl Element for u16 {
    const DTYPE: DType = DType::U16;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_them_are_listed_in_their_order() {
        for (index, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, index);
        }
        assert_eq!(DType::ALL.last(), Some(&u16::DTYPE));
    }

    #[test]
    fn names_round_trip_and_lengths_match_the_rust_types() {
        for (dtype, len_bytes) in [
            (f32::DTYPE, size_of::<f32>()),
            (f64::DTYPE, size_of::<f64>()),
            (f16::DTYPE, size_of::<f16>()),
            (bf16::DTYPE, size_of::<bf16>()),
            (i32::DTYPE, size_of::<i32>()),
            (i64::DTYPE, size_of::<i64>()),
            (u8::DTYPE, size_of::<u8>()),
            (u16::DTYPE, size_of::<u16>()),
        ] {
            assert_eq!(dtype.len_bytes(), len_bytes);
            assert_eq!(dtype.name().parse::<DType>(), Ok(dtype));
        }
        assert!("f8".parse::<DType>().unwrap_err().contains("expected f32"));
        let long = "f\n".repeat(500_000).parse::<DType>().unwrap_err();
        assert!(long.len() < 3_000 && !long.contains('\n'), "{long}");
    }
}

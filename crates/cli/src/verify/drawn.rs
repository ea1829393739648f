//! Parameters and gradients drawn at random, each element by its place alone.

use fusestep_coalesce::{CoalesceError, zeroed_bytes};
use fusestep_tensor::{DType, ParamDesc};
use half::{bf16, f16};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng, SeedableRng};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Values of a seed. A gradient follows from its micro-batch's number in the whole run and from its
/// parameter, so every number of ranks has the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drawn {
    pub(super) seed: u64,
}

/// Place of a gradient in a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Number of the micro-batch, from the run's first on.
    pub(super) micro_batch: u64,
    /// Number of the parameter, and the number of all.
    pub(super) param: usize,
    pub(super) params: usize,
}

impl Drawn {
    /// A parameter's first value.
    pub(super) fn first(self, param: &ParamDesc, number: usize) -> Result<Vec<u8>, CoalesceError> {
        let mut bytes = room(param)?;
        self.fill(u64::MAX - number as u64, param.dtype, 1.0, &mut bytes);
        Ok(bytes)
    }

    /// Writes a gradient, times `scale`, a power of two.
    pub(super) fn gradient(self, place: Place, dtype: DType, scale: f64, bytes: &mut [u8]) {
        let Place { micro_batch, param, params } = place;
        self.fill(micro_batch * params as u64 + param as u64, dtype, scale, bytes);
    }

    fn fill(self, stream: u64, dtype: DType, scale: f64, bytes: &mut [u8]) {
        let narrow = |bits: u64| value((bits >> 32) as u32) * scale as f32;
        let mut rng = self.rng(stream);
        match dtype {
            DType::F16 => each(&mut rng, bytes, |bits| f16::from_f32(narrow(bits)).to_le_bytes()),
            DType::BF16 => each(&mut rng, bytes, |bits| bf16::from_f32(narrow(bits)).to_le_bytes()),
            DType::F64 => each(&mut rng, bytes, |bits| (wide_value(bits) * scale).to_le_bytes()),
            _ => each(&mut rng, bytes, |bits| narrow(bits).to_le_bytes()),
        }
    }

    /// Numbers of one stream. The hash keeps streams apart whose numbers follow each other.
    fn rng(self, stream: u64) -> Xoshiro256PlusPlus {
        Xoshiro256PlusPlus::seed_from_u64(xxh3_64_with_seed(&stream.to_le_bytes(), self.seed))
    }
}

/// Zeros of a parameter's length.
pub(super) fn room(param: &ParamDesc) -> Result<Vec<u8>, CoalesceError> {
    zeroed_bytes(param.numel() as usize * param.dtype.len_bytes())
}

/// Writes elements of `N` bytes, each from random bits. A loop over iterators takes three times as
/// long here, where code is built for its size.
fn each<const N: usize>(
    rng: &mut Xoshiro256PlusPlus,
    bytes: &mut [u8],
    element: impl Fn(u64) -> [u8; N],
) {
    let places = bytes.as_chunks_mut().0;
    let mut at = 0;
    while at < places.len() {
        places[at] = element(rng.next_u64());
        at += 1;
    }
}

/// A value between −1 and 1 of any of 16 magnitudes, so that every order of a sum rounds otherwise.
fn value(bits: u32) -> f32 {
    let fraction = (bits >> 8) as f32 * (1.0 / (1 << 23) as f32) - 1.0;
    fraction * f32::from_bits((127 - (bits & 15)) << 23)
}

/// A value as [`value`], with as many digits as f64 has.
fn wide_value(bits: u64) -> f64 {
    let fraction = (bits >> 11) as f64 * (1.0 / (1u64 << 52) as f64) - 1.0;
    fraction * f64::from_bits((1_023 - (bits & 15)) << 52)
}

#[cfg(test)]
mod tests {
    use fusestep_tensor::Shape;

    use super::*;

    #[test]
    fn every_gradient_is_another_and_is_drawn_again_the_same() {
        let param = ParamDesc::new("w", Shape::new([33]).unwrap(), DType::F32);
        let drawn = Drawn { seed: 1 };
        let gradient = |drawn: Drawn, micro_batch, param_number| {
            let mut bytes = room(&param).unwrap();
            let place = Place { micro_batch, param: param_number, params: 2 };
            drawn.gradient(place, DType::F32, 1.0, &mut bytes);
            bytes
        };
        let all = [
            gradient(drawn, 0, 0),
            gradient(drawn, 0, 1),
            gradient(drawn, 1, 0),
            gradient(Drawn { seed: 2 }, 0, 0),
            drawn.first(&param, 0).unwrap(),
        ];
        for (at, bytes) in all.iter().enumerate() {
            assert!(!all[..at].contains(bytes), "{at}");
        }
        assert_eq!(gradient(drawn, 1, 0), all[2]);
    }

    /// Bits of the sum of values in their order, and from the last to the first.
    fn sums(values: &[f64], add: fn(f64, f64) -> f64) -> [u64; 2] {
        let there = values.iter().fold(0.0, |sum, value| add(sum, *value));
        let back = values.iter().rev().fold(0.0, |sum, value| add(sum, *value));
        [there, back].map(f64::to_bits)
    }

    #[test]
    fn sums_in_another_order_have_other_bits_in_every_type() {
        let of_f32 = |sum: f64, value: f64| f64::from(sum as f32 + value as f32);
        for (dtype, add) in [(DType::F32, of_f32 as fn(_, _) -> _), (DType::F64, |a, b| a + b)] {
            let param = ParamDesc::new("w", Shape::new([100, 12]).unwrap(), dtype);
            let mut bytes = room(&param).unwrap();
            let place = Place { micro_batch: 0, param: 0, params: 1 };
            Drawn { seed: 1 }.gradient(place, dtype, 1.0, &mut bytes);
            let values: Vec<f64> = match dtype {
                DType::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
                _ => {
                    let narrow = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
                    narrow.map(f64::from).collect()
                }
            };
            assert!(values.iter().all(|value| value.abs() <= 1.0), "{dtype}");
            let differ = values.chunks(12).filter(|values| {
                let [there, back] = sums(values, add);
                there != back
            });
            // Sums of 12 values meet by chance now and then.
            let differ = differ.count();
            assert!(differ > 50, "{dtype}: {differ} of 100 sums");
        }
    }
}

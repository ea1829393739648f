//! Elements of every dtype, and their reduction one element at a time.

use std::ops::Add;

use fusestep_collective::ReduceOp;
use fusestep_tensor::Element;
use half::{bf16, f16};

/// An element with a scalar reduction to compare with.
pub(crate) trait Number: Element {
    /// Largest error of a reduction of up to 8 ranks against f64, relative to the sum (or product)
    /// of magnitudes.
    const TOLERANCE: f64;
    /// Whether it has an average.
    const FLOATING: bool;
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
    /// In rank order, written as plainly as can be.
    fn reduced(op: ReduceOp, ranks: &[Self]) -> Self;

    /// What `rank` contributes at `index`; deterministic, and inexact where the type allows.
    fn sample(rank: usize, index: usize) -> Self {
        let mixed = (index as u64 * 8 + rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let unit = mixed as f64 / (1u64 << 24) as f64;
        if Self::FLOATING { Self::of(unit * 4.0 - 2.0) } else { Self::of((unit * 250.0).floor()) }
    }
}

macro_rules! float {
    ($float:ty, $wide:ty, $tolerance:expr) => {
        impl Number for $float {
            const TOLERANCE: f64 = $tolerance;
            const FLOATING: bool = true;
            fn of(value: f64) -> Self {
                <$float>::from_f64_(value)
            }
            fn value(self) -> f64 {
                f64::from(self)
            }
            fn reduced(op: ReduceOp, ranks: &[Self]) -> Self {
                if let ReduceOp::Tree(divisor) = op {
                    let wide: Vec<$wide> = ranks.iter().map(|&x| <$wide>::from(x)).collect();
                    return <$float>::from_wide_(tree(&wide) / divisor.value() as $wide);
                }
                let mut result = <$wide>::from(ranks[0]);
                for &other in &ranks[1..] {
                    let other = <$wide>::from(other);
                    result = match op {
                        ReduceOp::Sum | ReduceOp::Average => result + other,
                        ReduceOp::Prod => result * other,
                        ReduceOp::Max if other.is_nan() || other > result => other,
                        ReduceOp::Min if other.is_nan() || other < result => other,
                        ReduceOp::Max | ReduceOp::Min | ReduceOp::Tree(_) => result,
                    };
                }
                if op == ReduceOp::Average {
                    result /= ranks.len() as $wide;
                }
                <$float>::from_wide_(result)
            }
        }
    };
}

/// `T(0, n)`, by its definition.
fn tree<W: Copy + Add<Output = W>>(ranks: &[W]) -> W {
    if let [one] = ranks {
        return *one;
    }
    let middle = ranks.len().next_power_of_two() / 2;
    tree(&ranks[..middle]) + tree(&ranks[middle..])
}

trait Rounded {
    type Wide;
    fn from_f64_(value: f64) -> Self;
    fn from_wide_(value: Self::Wide) -> Self;
}

macro_rules! rounded {
    ($float:ty, $wide:ty, $of:expr, $narrow:expr) => {
        impl Rounded for $float {
            type Wide = $wide;
            fn from_f64_(value: f64) -> Self {
                $of(value)
            }
            fn from_wide_(value: $wide) -> Self {
                $narrow(value)
            }
        }
    };
}

rounded!(f32, f32, |x: f64| x as f32, |x: f32| x);
rounded!(f64, f64, |x: f64| x, |x: f64| x);
rounded!(f16, f32, f16::from_f64, f16::from_f32);
rounded!(bf16, f32, bf16::from_f64, bf16::from_f32);
float!(f32, f32, 8.0 * 6.0e-8);
float!(f64, f64, 8.0 * 1.2e-16);
float!(f16, f32, 4.9e-4);
float!(bf16, f32, 4.0e-3);

macro_rules! integer {
    ($($integer:ty),*) => {$(
        impl Number for $integer {
            const TOLERANCE: f64 = 0.0;
            const FLOATING: bool = false;
            fn of(value: f64) -> Self {
                value as $integer
            }
            fn value(self) -> f64 {
                self as f64
            }
            fn reduced(op: ReduceOp, ranks: &[Self]) -> Self {
                let others = ranks[1..].iter();
                others.fold(ranks[0], |result, &other| match op {
                    ReduceOp::Sum => result.wrapping_add(other),
                    ReduceOp::Prod => result.wrapping_mul(other),
                    ReduceOp::Max => result.max(other),
                    ReduceOp::Min => result.min(other),
                    ReduceOp::Average | ReduceOp::Tree(_) => panic!("integers have no average here"),
                })
            }
        }
    )*};
}

integer!(i32, i64, u16, u8);

/// The reductions that a type has.
pub(crate) fn ops<T: Number>() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().filter(|op| T::FLOATING || !op.is_of_floats())
}

/// The reduction of all ranks' samples: the plain loop, itself compared with f64.
pub(crate) fn reduced<T: Number>(op: ReduceOp, ranks: usize, numel: usize) -> Vec<T> {
    let one = |index: usize| {
        let inputs: Vec<T> = (0..ranks).map(|rank| T::sample(rank, index)).collect();
        let result = T::reduced(op, &inputs);
        if T::FLOATING {
            let values = inputs.iter().map(|x| x.value());
            let (exact, scale) = match op {
                ReduceOp::Sum => (values.clone().sum::<f64>(), values.map(f64::abs).sum::<f64>()),
                ReduceOp::Average => {
                    (values.clone().sum::<f64>() / ranks as f64, values.map(f64::abs).sum::<f64>())
                }
                ReduceOp::Tree(divisor) => (
                    values.clone().sum::<f64>() / divisor.value(),
                    values.map(f64::abs).sum::<f64>(),
                ),
                ReduceOp::Prod => (values.clone().product(), values.map(f64::abs).product::<f64>()),
                ReduceOp::Max => (values.fold(f64::NEG_INFINITY, f64::max), 0.0),
                ReduceOp::Min => (values.fold(f64::INFINITY, f64::min), 0.0),
            };
            // Products of small f16 are subnormal: their error is half of the smallest of them.
            let bound = T::TOLERANCE * scale + 3.0e-8;
            let bound = if scale == 0.0 { 0.0 } else { bound };
            assert!(
                (result.value() - exact).abs() <= bound,
                "{op} {inputs:?}: expected {exact}, found {result:?}"
            );
        }
        result
    };
    (0..numel).map(one).collect()
}

/// A rank's input.
pub(crate) fn input<T: Number>(rank: usize, numel: usize) -> Vec<T> {
    (0..numel).map(|index| T::sample(rank, index)).collect()
}

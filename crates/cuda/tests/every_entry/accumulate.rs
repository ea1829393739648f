//! Sums over micro-steps, against the same operations on the host.

use fusestep_launch::{
    Accumulate, Accumulation, BackendError, Buffer, DeviceBackend, DeviceSums, Memory,
};
use fusestep_tensor::DType;
use half::{bf16, f16};

use crate::common::cuda;

const WEIGHTS: [f64; 3] = [0.3, 1.0, 2.5];

/// Values of each binade of the type, NaN and infinite ones among them.
fn gradient(step: usize, numel: usize) -> Vec<f32> {
    let value = |at: usize| match (at + step) % 11 {
        0 => f32::INFINITY,
        1 => -0.0,
        2 if at == 2 => f32::NAN,
        3 => f32::MIN_POSITIVE / 8.0,
        _ => ((at * 37 + step * 101) % 255) as f32 * 0.013 - 1.5,
    };
    (0..numel).map(value).collect()
}

/// The bytes of the gradients, and those that their weighted mean must have.
struct Expected {
    given: Vec<Vec<u8>>,
    mean: Vec<u8>,
}

macro_rules! expected {
    ($numel:expr, $sum:ty, $narrow:expr, $widen:expr) => {{
        let (mut sums, mut given) = (vec![0.0 as $sum; $numel], Vec::new());
        for (step, weight) in WEIGHTS.into_iter().enumerate() {
            let mut bytes = Vec::new();
            for (sum, value) in sums.iter_mut().zip(gradient(step, $numel)) {
                let kept = $narrow(value as $sum);
                bytes.extend(kept.to_le_bytes());
                let weighed: $sum = $widen(kept) * weight as $sum;
                *sum = if step == 0 { weighed } else { *sum + weighed };
            }
            given.push(bytes);
        }
        let divisor = WEIGHTS.iter().sum::<f64>() as $sum;
        let means = sums.iter().flat_map(|sum| $narrow(sum / divisor).to_le_bytes());
        Expected { given, mean: means.collect() }
    }};
}

fn expected(dtype: DType, numel: usize) -> Expected {
    match dtype {
        DType::F32 => expected!(numel, f32, |x: f32| x, |x: f32| x),
        DType::F64 => expected!(numel, f64, |x: f64| x, |x: f64| x),
        DType::F16 => expected!(numel, f32, f16::from_f32, f16::to_f32),
        _ => expected!(numel, f32, bf16::from_f32, bf16::to_f32),
    }
}

/// The bytes of the mean that the device forms; both lists begin at an element of their buffer.
fn found(
    backend: &dyn DeviceBackend,
    (dtype, numel, first): (DType, usize, usize),
    given: &[Vec<u8>],
) -> Result<Vec<u8>, BackendError> {
    let width = dtype.len_bytes();
    let sum_width = width.max(4);
    let mut sums = backend.allocate((first + numel) * sum_width)?;
    let mut grads = backend.allocate((first + numel) * width)?;
    let run = |what, sums: &mut Box<dyn Buffer>, grads: &mut Box<dyn Buffer>| {
        backend.add_gradients(Accumulate {
            dtype,
            sums: (sums.as_mut(), first * sum_width),
            grads: (grads.as_mut(), first * width),
            numel: numel as u64,
            what,
        })
    };
    for (step, (bytes, weight)) in given.iter().zip(WEIGHTS).enumerate() {
        backend.write(grads.as_mut(), first * width, bytes)?;
        let what = match step {
            0 => Accumulation::First { weight },
            _ => Accumulation::Add { weight },
        };
        run(what, &mut sums, &mut grads)?;
    }
    let divisor = WEIGHTS.iter().sum();
    run(Accumulation::Mean { divisor }, &mut sums, &mut grads)?;
    let mut mean = vec![0; numel * width];
    backend.read(grads.as_ref(), first * width, &mut mean)?;
    Ok(mean)
}

/// NaN of any kind are alike.
fn same(dtype: DType, found: &[u8], expected: &[u8]) -> bool {
    let is_nan = |bytes: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
    };
    let width = dtype.len_bytes();
    let pairs = found.chunks(width).zip(expected.chunks(width));
    let mut pairs = pairs.map(|(a, b)| a == b || is_nan(a) && is_nan(b));
    found.len() == expected.len() && pairs.all(|alike| alike)
}

#[test]
fn sums_over_micro_steps_are_those_of_the_host() {
    let backend = cuda();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (numel, first) in [(0, 0), (1, 0), (37, 0), (37, 1), (9_001, 0)] {
            let expected = expected(dtype, numel);
            let found = found(&backend, (dtype, numel, first), &expected.given).unwrap();
            assert!(
                same(dtype, &found, &expected.mean),
                "{dtype}: {numel} elements from element {first} on"
            );
        }
    }
}

#[test]
fn sums_beyond_a_buffer_and_of_integers_are_refused() {
    let backend = cuda();
    for (dtype, numel) in [(DType::F32, 5), (DType::BF16, 5), (DType::I32, 1)] {
        let mut sums = backend.allocate(16).unwrap();
        let mut grads = backend.allocate(64).unwrap();
        let refused = backend.add_gradients(Accumulate {
            dtype,
            sums: (sums.as_mut(), 0),
            grads: (grads.as_mut(), 0),
            numel,
            what: Accumulation::First { weight: 1.0 },
        });
        assert!(refused.is_err(), "{dtype}");
    }
}

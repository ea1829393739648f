//! Sums over lists of any dtype, and lists that are no elements.

use fusestep_launch::tree_sum;
use fusestep_simd::Level;
use fusestep_tensor::DType;
use half::{bf16, f16};

use super::{Floats, FloatsMut, StateMut, square_sums};
use crate::square_sum;

#[test]
fn the_sum_over_lists_is_that_of_the_tree() {
    let values: Vec<f32> = (0..200_003).map(|i| ((i % 977) as f32 - 400.0) * 1e-3).collect();
    let wide = &values[..];
    let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let half: Vec<f16> = values[..70_000].iter().map(|&x| f16::from_f32(x)).collect();
    let none: &[f32] = &[];
    let level = Level::detect();
    let sums = [
        square_sum::<f32, f32>(level, wide),
        square_sum::<f32, bf16>(level, &narrow),
        square_sum::<f32, f32>(level, none),
        square_sum::<f32, f16>(level, &half),
    ];
    let expected = tree_sum(4, |at| sums[at]);
    let lists = [wide.into(), narrow[..].into(), none.into(), half[..].into()];
    assert_eq!(square_sums(None, &lists), expected);
    assert_eq!((expected.non_finite, square_sums(None, &[]).sum), (0, 0.0));
}

#[test]
fn elements_that_are_not_finite_are_counted() {
    let wide = [1.0f32, f32::NAN, 2.0];
    let narrow = [bf16::INFINITY, bf16::ONE];
    let found = square_sums(None, &[wide[..].into(), narrow[..].into()]);
    assert_eq!(found.non_finite, 2);
}

#[test]
fn bytes_that_are_no_elements_are_no_list() {
    let mut words = [0u32; 4];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    assert_eq!(Floats::of_bytes(DType::F32, bytes).map(|list| list.numel()), Some(4));
    assert_eq!(Floats::of_bytes(DType::F16, bytes).map(|list| list.numel()), Some(8));
    assert!(Floats::of_bytes(DType::F32, &bytes[2..]).is_none());
    assert!(Floats::of_bytes(DType::BF16, &bytes[..3]).is_none());
    assert!(Floats::of_bytes(DType::F64, bytes).is_none());
    assert!(FloatsMut::of_bytes(DType::I32, bytes).is_none());
    assert!(StateMut::of_bytes(DType::F32, &mut bytes[1..5]).is_none());
}

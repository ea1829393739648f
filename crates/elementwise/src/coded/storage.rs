//! Parameters of two groups, as values and back.

use bytemuck::{cast_mut, cast_ref};
use fusestep_launch::{Format, Layout};
use fusestep_simd::{Codec, join_bf16, split_bf16, widen_bf16};
use half::bf16;

use super::coding::PAIR;
use crate::compute::ParamStorage;
use crate::param_storage::{Plain, WithMaster, WithRemainder, WithRemainder8};

/// Code that is compiled for every way to keep parameters beside coded state.
pub(crate) trait CodedVisitor {
    /// The result of the code.
    type Output;

    /// Runs for parameters kept as `K`.
    fn visit<K: GroupStorage>(self) -> Self::Output;
}

/// Runs a visitor for a format with state in codes.
///
/// # Panics
/// If the format has no codes.
pub(crate) fn visit_coded<V: CodedVisitor>(format: Format, visitor: V) -> V::Output {
    match format.layout() {
        Layout::F32State8 => visitor.visit::<Plain<f32>>(),
        Layout::Bf16State8 => visitor.visit::<Plain<bf16>>(),
        Layout::Bf16MasterState8 => visitor.visit::<WithMaster<bf16>>(),
        Layout::Bf16RemainderState8 => visitor.visit::<WithRemainder>(),
        Layout::Bf16Remainder8State8 => visitor.visit::<WithRemainder8>(),
        other => panic!("expected a format with state in codes, found {other:?}"),
    }
}

/// A way to keep parameters beside coded state, two groups at a time.
pub(crate) trait GroupStorage: ParamStorage<f32> {
    /// Values of parameters.
    fn widen_pair<C: Codec>(
        codec: C,
        param: &[Self::Param; PAIR],
        master: &[Self::Master; PAIR],
    ) -> [f32; PAIR];

    /// Parameters of values.
    fn narrow_pair<C: Codec>(
        codec: C,
        values: &[f32; PAIR],
        param: &mut [Self::Param; PAIR],
        master: &mut [Self::Master; PAIR],
    );
}

impl GroupStorage for Plain<f32> {
    #[inline(always)]
    fn widen_pair<C: Codec>(_: C, param: &[f32; PAIR], _: &[(); PAIR]) -> [f32; PAIR] {
        *param
    }

    #[inline(always)]
    fn narrow_pair<C: Codec>(
        _: C,
        values: &[f32; PAIR],
        param: &mut [f32; PAIR],
        _: &mut [(); PAIR],
    ) {
        *param = *values;
    }
}

impl GroupStorage for Plain<bf16> {
    #[inline(always)]
    fn widen_pair<C: Codec>(_: C, param: &[bf16; PAIR], _: &[(); PAIR]) -> [f32; PAIR] {
        std::array::from_fn(|lane| widen_bf16(param[lane].to_bits()))
    }

    #[inline(always)]
    fn narrow_pair<C: Codec>(
        codec: C,
        values: &[f32; PAIR],
        param: &mut [bf16; PAIR],
        _: &mut [(); PAIR],
    ) {
        codec.narrow_bf16(values, cast_mut(param));
    }
}

impl GroupStorage for WithMaster<bf16> {
    #[inline(always)]
    fn widen_pair<C: Codec>(_: C, _: &[bf16; PAIR], master: &[f32; PAIR]) -> [f32; PAIR] {
        *master
    }

    #[inline(always)]
    fn narrow_pair<C: Codec>(
        codec: C,
        values: &[f32; PAIR],
        param: &mut [bf16; PAIR],
        master: &mut [f32; PAIR],
    ) {
        *master = *values;
        codec.narrow_bf16(values, cast_mut(param));
    }
}

impl GroupStorage for WithRemainder {
    #[inline(always)]
    fn widen_pair<C: Codec>(_: C, param: &[bf16; PAIR], remainder: &[u16; PAIR]) -> [f32; PAIR] {
        std::array::from_fn(|lane| join_bf16(param[lane].to_bits(), remainder[lane]))
    }

    #[inline(always)]
    fn narrow_pair<C: Codec>(
        _: C,
        values: &[f32; PAIR],
        param: &mut [bf16; PAIR],
        remainder: &mut [u16; PAIR],
    ) {
        for lane in 0..PAIR {
            let (upper, lower) = split_bf16(values[lane]);
            (param[lane], remainder[lane]) = (bf16::from_bits(upper), lower);
        }
    }
}

impl GroupStorage for WithRemainder8 {
    #[inline(always)]
    fn widen_pair<C: Codec>(codec: C, param: &[bf16; PAIR], remainder: &[i8; PAIR]) -> [f32; PAIR] {
        let mut values = [0.0; PAIR];
        codec.join_bf16_24(cast_ref(param), remainder, &mut values);
        values
    }

    #[inline(always)]
    fn narrow_pair<C: Codec>(
        codec: C,
        values: &[f32; PAIR],
        param: &mut [bf16; PAIR],
        remainder: &mut [i8; PAIR],
    ) {
        codec.split_bf16_24(values, cast_mut(param), remainder);
    }
}

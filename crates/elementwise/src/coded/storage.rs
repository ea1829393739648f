//! Parameters of whole groups, as values and back.

use bytemuck::{cast_mut, cast_ref};
use fusestep_launch::{Format, Layout};
use fusestep_simd::{Codec, join_bf16, split_bf16, widen_bf16};
use half::bf16;

use super::coding::GROUP;
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

/// A way to keep parameters beside coded state, a group at a time.
pub(crate) trait GroupStorage: ParamStorage<f32> {
    /// Values of parameters.
    fn widen_group<C: Codec>(
        codec: C,
        param: &[Self::Param; GROUP],
        master: &[Self::Master; GROUP],
    ) -> [f32; GROUP];

    /// Parameters of values.
    fn narrow_group<C: Codec>(
        codec: C,
        values: &[f32; GROUP],
        param: &mut [Self::Param; GROUP],
        master: &mut [Self::Master; GROUP],
    );
}

impl GroupStorage for Plain<f32> {
    #[inline(always)]
    fn widen_group<C: Codec>(_: C, param: &[f32; GROUP], _: &[(); GROUP]) -> [f32; GROUP] {
        *param
    }

    #[inline(always)]
    fn narrow_group<C: Codec>(
        _: C,
        values: &[f32; GROUP],
        param: &mut [f32; GROUP],
        _: &mut [(); GROUP],
    ) {
        *param = *values;
    }
}

impl GroupStorage for Plain<bf16> {
    #[inline(always)]
    fn widen_group<C: Codec>(_: C, param: &[bf16; GROUP], _: &[(); GROUP]) -> [f32; GROUP] {
        std::array::from_fn(|lane| widen_bf16(param[lane].to_bits()))
    }

    #[inline(always)]
    fn narrow_group<C: Codec>(
        codec: C,
        values: &[f32; GROUP],
        param: &mut [bf16; GROUP],
        _: &mut [(); GROUP],
    ) {
        codec.narrow_bf16(values, cast_mut(param));
    }
}

impl GroupStorage for WithMaster<bf16> {
    #[inline(always)]
    fn widen_group<C: Codec>(_: C, _: &[bf16; GROUP], master: &[f32; GROUP]) -> [f32; GROUP] {
        *master
    }

    #[inline(always)]
    fn narrow_group<C: Codec>(
        codec: C,
        values: &[f32; GROUP],
        param: &mut [bf16; GROUP],
        master: &mut [f32; GROUP],
    ) {
        *master = *values;
        codec.narrow_bf16(values, cast_mut(param));
    }
}

impl GroupStorage for WithRemainder {
    #[inline(always)]
    fn widen_group<C: Codec>(
        _: C,
        param: &[bf16; GROUP],
        remainder: &[u16; GROUP],
    ) -> [f32; GROUP] {
        std::array::from_fn(|lane| join_bf16(param[lane].to_bits(), remainder[lane]))
    }

    #[inline(always)]
    fn narrow_group<C: Codec>(
        _: C,
        values: &[f32; GROUP],
        param: &mut [bf16; GROUP],
        remainder: &mut [u16; GROUP],
    ) {
        for lane in 0..GROUP {
            let (upper, lower) = split_bf16(values[lane]);
            (param[lane], remainder[lane]) = (bf16::from_bits(upper), lower);
        }
    }
}

impl GroupStorage for WithRemainder8 {
    #[inline(always)]
    fn widen_group<C: Codec>(
        codec: C,
        param: &[bf16; GROUP],
        remainder: &[i8; GROUP],
    ) -> [f32; GROUP] {
        let mut values = [0.0; GROUP];
        codec.join_bf16_24(cast_ref(param), remainder, &mut values);
        values
    }

    #[inline(always)]
    fn narrow_group<C: Codec>(
        codec: C,
        values: &[f32; GROUP],
        param: &mut [bf16; GROUP],
        remainder: &mut [i8; GROUP],
    ) {
        codec.split_bf16_24(values, cast_mut(param), remainder);
    }
}

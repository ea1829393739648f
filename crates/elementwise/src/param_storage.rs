//! Storage of a parameter's value: the parameter alone, or with a list of masters or remainders,
//! which keep the bits lost in rounding.

use std::marker::PhantomData;

use bytemuck::Pod;
use fusestep_launch::HostList;
use half::bf16;

use crate::compute::{Compute, ParamStorage, Storage};
use fusestep_simd::{join_bf16, join_bf16_24, split_bf16, split_bf16_24};

/// The parameter alone.
pub(crate) struct Plain<P>(PhantomData<P>);

impl<C: Compute, P: Storage<C>> ParamStorage<C> for Plain<P> {
    type Param = P;
    type Master = ();
    const IS_VALUE: bool = P::IS_VALUE;
    #[inline(always)]
    fn widen(param: P, (): ()) -> C {
        param.widen()
    }
    #[inline(always)]
    fn narrow(value: C) -> (P, ()) {
        (P::narrow(value), ())
    }
    #[inline(always)]
    fn narrow_at_random(value: C, random_bits: u32) -> (P, ()) {
        (P::narrow_at_random(value, random_bits), ())
    }
}

/// A master weight in the compute type; the parameter is only written.
pub(crate) struct WithMaster<P>(PhantomData<P>);

impl<C: Compute, P: Storage<C>> ParamStorage<C> for WithMaster<P> {
    type Param = P;
    type Master = C;
    const READS_PARAM: bool = false;
    #[inline(always)]
    fn widen(_: P, master: C) -> C {
        master
    }
    #[inline(always)]
    fn narrow(value: C) -> (P, C) {
        (P::narrow(value), value)
    }
}

/// A bf16 parameter with the 16 bits that make it an f32.
pub(crate) struct WithRemainder;

impl ParamStorage<f32> for WithRemainder {
    type Param = bf16;
    type Master = u16;
    #[inline(always)]
    fn widen(param: bf16, remainder: u16) -> f32 {
        join_bf16(param.to_bits(), remainder)
    }
    #[inline(always)]
    fn narrow(value: f32) -> (bf16, u16) {
        let (param, remainder) = split_bf16(value);
        (bf16::from_bits(param), remainder)
    }
}

/// A bf16 parameter with the 8 bits below it: 24 bits of an f32.
pub(crate) struct WithRemainder8;

impl ParamStorage<f32> for WithRemainder8 {
    type Param = bf16;
    type Master = i8;
    #[inline(always)]
    fn widen(param: bf16, remainder: i8) -> f32 {
        join_bf16_24(param.to_bits(), remainder)
    }
    #[inline(always)]
    fn narrow(value: f32) -> (bf16, i8) {
        let (param, remainder) = split_bf16_24(value);
        (bf16::from_bits(param), remainder)
    }
}

/// The elements of the list of masters or remainders. If there is no such list, `numel` values
/// without bytes.
pub(crate) fn master<'a, 'b: 'a, T: Pod>(
    lists: &mut std::slice::IterMut<'_, HostList<'b>>,
    numel: usize,
    none: &'a mut Vec<T>,
) -> &'a mut [T] {
    if size_of::<T>() > 0 {
        return HostList::take_mut(lists);
    }
    none.resize(numel, T::zeroed());
    none
}

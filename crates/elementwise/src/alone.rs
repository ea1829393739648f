//! Sums over the parameter or the gradient alone, in the fixed tree of [`crate::norm`].

use bytemuck::Zeroable;
use fusestep_launch::{Format, MAX_LISTS};
use fusestep_simd::Level;

use crate::compute::{Compute, FormatVisitor, ParamStorage, Storage};
use crate::norm::{
    FEW_LANES, LEAF_ELEMENTS as LEAF, NORM_LANES as LANES, chunk_square_sum, fold,
    prefetch_part_of_row, sum_leaf,
};
use crate::rounding::Rounding;

/// The sum of squares over a chunk of a parameter alone, of its master where it has one: the bits
/// of [`crate::chunk_sums`] over it. `lists` are the chunk's bytes in those of [`Format::lists`]
/// with `N` roles of state.
///
/// # Panics
/// As [`crate::run_format`].
/// # Cost
/// One read of the chunk. Lists by themselves are read faster than two side by side: 0.3 ns an f32
/// against 0.4.
pub fn param_chunk_sum<C: Compute, const N: usize>(
    level: Level,
    format: Format,
    lists: [&[u8]; MAX_LISTS],
) -> f64 {
    let (param, master) = (lists[0], lists[2 + N]);
    C::visit(format, Param { level, param, master })
}

/// A chunk of a parameter before its format is known to the compiler.
struct Param<'a> {
    level: Level,
    param: &'a [u8],
    master: &'a [u8],
}

impl<C: Compute> FormatVisitor<C> for Param<'_> {
    type Output = f64;

    fn visit<K: ParamStorage<C>, S: Storage<C>, R: Rounding>(self) -> f64 {
        let param: &[K::Param] = bytemuck::cast_slice(self.param);
        let mut none = Vec::new();
        let master: &[K::Master] = match size_of::<K::Master>() {
            0 => {
                none.resize(param.len(), K::Master::zeroed());
                &none
            }
            _ => bytemuck::cast_slice(self.master),
        };
        param_sum::<C, K>(self.level, param, master)
    }
}

// A function of its own, which formats that differ only in state or rounding share.
#[inline(never)]
pub(crate) fn param_sum<C: Compute, K: ParamStorage<C>>(
    level: Level,
    param: &[K::Param],
    master: &[K::Master],
) -> f64 {
    level.run_in_registers(
        #[inline(always)]
        || leaf_sums::<C, K, LANES>(param, master),
        #[inline(always)]
        || leaf_sums::<C, K, FEW_LANES>(param, master),
    )
}

#[inline(always)]
fn leaf_sums<C: Compute, K: ParamStorage<C>, const SIDE: usize>(
    param: &[K::Param],
    master: &[K::Master],
) -> f64 {
    let mut leaves = [0.0; LANES];
    for (leaf, sum) in leaves[..param.len().div_ceil(LEAF)].iter_mut().enumerate() {
        let first = leaf * LEAF;
        let elements = first..param.len().min(first + LEAF);
        let ahead = |at| {
            if K::READS_PARAM {
                prefetch_part_of_row::<_, SIDE>(param, first + LEAF + at);
            }
            prefetch_part_of_row::<_, SIDE>(master, first + LEAF + at);
        };
        *sum = leaf_sum::<C, K, SIDE>(&param[elements.clone()], &master[elements], ahead);
    }
    fold(leaves)
}

/// The sum of squares over a chunk of a gradient alone, as it is stored: the bits of
/// [`crate::chunk_sums`] over it.
///
/// # Panics
/// As [`crate::run_format`].
/// # Cost
/// One read of the chunk.
pub fn grad_chunk_sum<C: Compute>(level: Level, format: Format, grad: &[u8]) -> f64 {
    C::visit(format.of_gradients(), Gradient { level, grad })
}

/// A chunk of a gradient before its format is known to the compiler.
struct Gradient<'a> {
    level: Level,
    grad: &'a [u8],
}

impl<C: Compute> FormatVisitor<C> for Gradient<'_> {
    type Output = f64;

    fn visit<K: ParamStorage<C>, S: Storage<C>, R: Rounding>(self) -> f64 {
        let grad: &[K::Param] = bytemuck::cast_slice(self.grad);
        chunk_square_sum::<C, K::Param>(self.level, grad).sum
    }
}

/// The sum over a leaf, which may end early.
#[inline(always)]
pub(crate) fn leaf_sum<C: Compute, K: ParamStorage<C>, const SIDE: usize>(
    param: &[K::Param],
    master: &[K::Master],
    ahead: impl Fn(usize),
) -> f64 {
    let (mut params, mut masters);
    let whole = (<&[K::Param; LEAF]>::try_from(param), <&[K::Master; LEAF]>::try_from(master));
    let (param, master) = match whole {
        (Ok(param), Ok(master)) => (param, master),
        // Adding 0 to a sum of squares changes no bit, so a leaf that ends early is one that goes
        // on with zeros.
        _ => {
            (params, masters) = ([K::Param::zeroed(); LEAF], [K::Master::zeroed(); LEAF]);
            params[..param.len()].copy_from_slice(param);
            masters[..master.len()].copy_from_slice(master);
            (&params, &masters)
        }
    };
    sum_leaf::<SIDE>(|at| K::widen(param[at], master[at]).exact(), ahead)
}

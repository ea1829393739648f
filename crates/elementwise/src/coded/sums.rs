//! Sums over whole tensors whose state is in codes, in the fixed tree of [`crate::norm`]: codes are
//! read a leaf at a time, and the rest is the loop of [`crate::tree`].

use bytemuck::{Zeroable, cast_slice};
use fusestep_launch::{Format, MAX_LISTS};
use fusestep_simd::Level;

use super::coding::{Coding, GROUP, units_of};
use super::convert::decode_groups;
use super::storage::{CodedVisitor, GroupStorage, visit_coded};
use crate::alone::param_sum;
use crate::compute::Storage;
use crate::norm::{LEAF_ELEMENTS as LEAF, NORM_LANES as LANES, fold};
use crate::tree::{Chunk, Terms};

const _: () = assert!(LEAF.is_multiple_of(GROUP), "no leaf cuts a group");

/// The sums of squares over one chunk, as [`crate::chunk_sums`] takes them of state in f32: the
/// terms are formed from what the codes read as. `lists` are those of [`Format::lists`] with `N`
/// roles of state.
///
/// # Panics
/// If the format has no codes.
/// # Cost
/// One read of the lists that the terms are formed from.
pub(crate) fn coded_chunk_sums<T, const N: usize, const SUMS: usize>(
    level: Level,
    terms: &T,
    codings: [Coding; N],
    format: Format,
    lists: [&[u8]; MAX_LISTS],
) -> [f64; SUMS]
where
    T: Terms<f32, N, SUMS>,
{
    let has_wide_gradients = format.has_wide_gradients();
    visit_coded(format, Sums::<T, N, SUMS> { level, terms, codings, lists, has_wide_gradients })
}

/// The sum of squares over a chunk of a parameter alone, as [`crate::param_chunk_sum`] takes it.
///
/// # Panics
/// If the format has no codes.
pub(crate) fn coded_param_sum<const N: usize>(
    level: Level,
    format: Format,
    lists: [&[u8]; MAX_LISTS],
) -> f64 {
    visit_coded(format, Param { level, param: lists[0], master: lists[2 + 2 * N] })
}

/// A chunk of a parameter before its format is known to the compiler.
struct Param<'a> {
    level: Level,
    param: &'a [u8],
    master: &'a [u8],
}

impl CodedVisitor for Param<'_> {
    type Output = f64;

    fn visit<K: GroupStorage>(self) -> f64 {
        let param: &[K::Param] = cast_slice(self.param);
        let mut none = Vec::new();
        let master: &[K::Master] = match size_of::<K::Master>() {
            0 => {
                none.resize(param.len(), K::Master::zeroed());
                &none
            }
            _ => cast_slice(self.master),
        };
        param_sum::<f32, K>(self.level, param, master)
    }
}

/// A chunk before its format is known to the compiler.
struct Sums<'a, T, const N: usize, const SUMS: usize> {
    level: Level,
    terms: &'a T,
    codings: [Coding; N],
    lists: [&'a [u8]; MAX_LISTS],
    has_wide_gradients: bool,
}

impl<T, const N: usize, const SUMS: usize> CodedVisitor for Sums<'_, T, N, SUMS>
where
    T: Terms<f32, N, SUMS>,
{
    type Output = [f64; SUMS];

    fn visit<K: GroupStorage>(self) -> [f64; SUMS] {
        if self.has_wide_gradients && !K::IS_VALUE {
            self.over::<K, f32>()
        } else {
            self.over::<K, K::Param>()
        }
    }
}

impl<T, const N: usize, const SUMS: usize> Sums<'_, T, N, SUMS>
where
    T: Terms<f32, N, SUMS>,
{
    fn over<K: GroupStorage, G: Storage<f32>>(self) -> [f64; SUMS] {
        let [param, grad, rest @ ..] = self.lists;
        let mut master: &[K::Master] = &[];
        if size_of::<K::Master>() > 0 {
            master = cast_slice(rest[2 * N]);
        }
        let lists = Lists::<K, G, N> {
            param: cast_slice(param),
            grad: cast_slice(grad),
            codes: std::array::from_fn(|list| rest[list]),
            units: std::array::from_fn(|list| cast_slice(rest[N + list])),
            master,
        };
        lists.sums(self.level, self.terms, self.codings)
    }
}

/// The elements of a chunk in each list.
struct Lists<'a, K: GroupStorage, G, const N: usize> {
    param: &'a [K::Param],
    grad: &'a [G],
    codes: [&'a [u8]; N],
    units: [&'a [f32]; N],
    /// Empty if there is no such list.
    master: &'a [K::Master],
}

impl<K: GroupStorage, G: Storage<f32>, const N: usize> Lists<'_, K, G, N> {
    fn sums<T, const SUMS: usize>(
        &self,
        level: Level,
        terms: &T,
        codings: [Coding; N],
    ) -> [f64; SUMS]
    where
        T: Terms<f32, N, SUMS>,
    {
        level.run(
            #[inline(always)]
            || {
                let numel = self.grad.len();
                let mut leaves = [[0.0; LANES]; SUMS];
                let mut values = [[0.0; LEAF]; SUMS];
                let mut state = [[0.0; LEAF]; N];
                for leaf in 0..numel.div_ceil(LEAF) {
                    let elements = leaf * LEAF..numel.min((leaf + 1) * LEAF);
                    let groups = elements.start / GROUP..units_of(elements.end);
                    let own = elements.len();
                    for list in 0..T::READ.min(N) {
                        let codes = &self.codes[list][elements.clone()];
                        let units = &self.units[list][groups.clone()];
                        decode_groups(codings[list], codes, units, &mut state[list][..own]);
                    }
                    let chunk = Chunk::<f32, K, G, f32, N> {
                        param: &self.param[elements.clone()],
                        grad: &self.grad[elements.clone()],
                        state: state.each_ref().map(|list| &list[..own]),
                        master: self.master.get(elements).unwrap_or_default(),
                        ahead: LEAF,
                    };
                    let of_leaf = chunk.leaf_sums(terms, 0..own, &mut values);
                    for (leaves, sum) in leaves.iter_mut().zip(of_leaf) {
                        leaves[leaf] = sum;
                    }
                }
                leaves.map(fold)
            },
        )
    }
}

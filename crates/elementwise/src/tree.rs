//! Sums over whole tensors for kernels that need them before they update: squares of values formed
//! from several lists, in the fixed tree of [`crate::norm`].

use std::ops::Range;

use bytemuck::Zeroable;
use fusestep_launch::{CHUNK_ELEMENTS, Format, MAX_LISTS};
use fusestep_simd::{Level, fetches_by_itself, prefetch_ahead};

use crate::compute::{Compute, FormatVisitor, ParamStorage, Storage};
use crate::norm::{
    FEW_LANES, LEAF_ELEMENTS as LEAF, NORM_CHUNK_ELEMENTS, NORM_LANES as LANES, fold, sum_leaf,
};
use crate::rounding::Rounding;

/// Elements that are formed side by side.
const BLOCK: usize = 16;

/// The values of a leaf that are to be squared.
pub(crate) type Leaf<C, const SUMS: usize> = [[C; LEAF]; SUMS];

const _: () = assert!(NORM_CHUNK_ELEMENTS == CHUNK_ELEMENTS as usize);

/// The values that are squared and summed: `SUMS` of them, formed from the parameter, the gradient
/// and `N` state tensors of one element.
pub trait Terms<C: Compute, const N: usize, const SUMS: usize>: Sync {
    /// State tensors that the values are formed from, the first ones; the others are not read, and
    /// given as 0.
    const READ: usize;
    /// The values of one element.
    fn terms(&self, p: C, g: C, state: [C; N]) -> [C; SUMS];
}

/// The sums of squares over one chunk. `lists` are the chunk's bytes in those of [`Format::lists`]
/// with `N` roles of state; the parameter is its master where it has one.
///
/// # Shapes
/// At most 65,536 elements, the same number in all lists; fewer only in a tensor's last chunk, for
/// the sums to be those of the tree.
/// # Panics
/// If `C` is not the type that `format` is computed in.
/// # Cost
/// One read of the lists that the terms are formed from.
pub fn chunk_sums<C, T, const N: usize, const SUMS: usize>(
    level: Level,
    terms: &T,
    format: Format,
    lists: [&[u8]; MAX_LISTS],
) -> [f64; SUMS]
where
    C: Compute,
    T: Terms<C, N, SUMS>,
{
    let has_wide_gradients = format.has_wide_gradients();
    let sums = Sums::<T, N, SUMS> { level, terms, lists, has_wide_gradients };
    C::visit(format, sums)
}

/// A chunk before its format is known to the compiler.
struct Sums<'a, T, const N: usize, const SUMS: usize> {
    level: Level,
    terms: &'a T,
    lists: [&'a [u8]; MAX_LISTS],
    has_wide_gradients: bool,
}

impl<C, T, const N: usize, const SUMS: usize> FormatVisitor<C> for Sums<'_, T, N, SUMS>
where
    C: Compute,
    T: Terms<C, N, SUMS>,
{
    type Output = [f64; SUMS];

    fn visit<K: ParamStorage<C>, S: Storage<C>, R: Rounding>(self) -> [f64; SUMS] {
        if self.has_wide_gradients && !K::IS_VALUE {
            self.over::<C, K, C, S>()
        } else {
            self.over::<C, K, K::Param, S>()
        }
    }
}

impl<T, const N: usize, const SUMS: usize> Sums<'_, T, N, SUMS> {
    fn over<C, K, G, S>(self) -> [f64; SUMS]
    where
        C: Compute,
        K: ParamStorage<C>,
        G: Storage<C>,
        S: Storage<C>,
        T: Terms<C, N, SUMS>,
    {
        let [param, grad, rest @ ..] = self.lists;
        let mut master: &[K::Master] = &[];
        if size_of::<K::Master>() > 0 {
            master = bytemuck::cast_slice(rest[N]);
        }
        let chunk = Chunk::<C, K, G, S, N> {
            param: bytemuck::cast_slice(param),
            grad: bytemuck::cast_slice(grad),
            state: std::array::from_fn(|list| bytemuck::cast_slice(rest[list])),
            master,
            // Half a leaf ahead a Zen 5 reads all lists of LAMB a tenth faster.
            ahead: if fetches_by_itself(size_of::<K::Param>()) { LEAF / 2 } else { LEAF },
        };
        chunk.sums(self.level, self.terms)
    }
}

/// The elements of a chunk in each list.
pub(crate) struct Chunk<'a, C: Compute, K: ParamStorage<C>, G, S, const N: usize> {
    pub(crate) param: &'a [K::Param],
    pub(crate) grad: &'a [G],
    pub(crate) state: [&'a [S]; N],
    /// Empty if there is no such list.
    pub(crate) master: &'a [K::Master],
    /// Distance in elements from the elements under way to those that are asked for.
    pub(crate) ahead: usize,
}

impl<C, K, G, S, const N: usize> Chunk<'_, C, K, G, S, N>
where
    C: Compute,
    K: ParamStorage<C>,
    G: Storage<C>,
    S: Storage<C>,
{
    // A function of its own, which visitors of formats that differ only in rounding share.
    #[inline(never)]
    fn sums<T, const SUMS: usize>(&self, level: Level, terms: &T) -> [f64; SUMS]
    where
        T: Terms<C, N, SUMS>,
    {
        level.run(
            #[inline(always)]
            || {
                let numel = self.grad.len();
                let mut leaves = [[0.0; LANES]; SUMS];
                let mut values = [[C::ZERO; LEAF]; SUMS];
                for leaf in 0..numel.div_ceil(LEAF) {
                    let elements = leaf * LEAF..numel.min((leaf + 1) * LEAF);
                    let of_leaf = self.leaf_sums(terms, elements, &mut values);
                    for (leaves, sum) in leaves.iter_mut().zip(of_leaf) {
                        leaves[leaf] = sum;
                    }
                }
                leaves.map(fold)
            },
        )
    }

    /// The sums over one leaf.
    ///
    /// The plain version adds as it walks the elements, to 64 running sums for each term, more than
    /// there are registers. Here the values are formed first, in the order the lists lie in memory,
    /// and kept in `values`, which fits the nearest cache. Then they are summed in an order that
    /// keeps running sums in registers.
    #[inline(always)]
    pub(crate) fn leaf_sums<T, const SUMS: usize>(
        &self,
        terms: &T,
        elements: Range<usize>,
        values: &mut Leaf<C, SUMS>,
    ) -> [f64; SUMS]
    where
        T: Terms<C, N, SUMS>,
    {
        let blocks = elements.len() / BLOCK;
        for block in 0..blocks {
            let at = block * BLOCK;
            let (p, g, state) = self.block(T::READ, elements.start + at);
            let mut formed = [[C::ZERO; BLOCK]; SUMS];
            for lane in 0..BLOCK {
                let state = std::array::from_fn(|list| state[list][lane]);
                let of_lane = terms.terms(p[lane], g[lane], state);
                for (formed, value) in formed.iter_mut().zip(of_lane) {
                    formed[lane] = value;
                }
            }
            for (values, formed) in values.iter_mut().zip(formed) {
                values[at..at + BLOCK].copy_from_slice(&formed);
            }
        }
        for place in blocks * BLOCK..elements.len() {
            let at = elements.start + place;
            let master = self.master.get(at).copied();
            let p = K::widen(self.param[at], master.unwrap_or_else(K::Master::zeroed));
            let state = std::array::from_fn(|list| {
                if list < T::READ { self.state[list][at].widen() } else { C::ZERO }
            });
            let of_place = terms.terms(p, self.grad[at].widen(), state);
            for (values, value) in values.iter_mut().zip(of_place) {
                values[place] = value;
            }
        }
        let mut sums = [0.0; SUMS];
        for (sum, values) in sums.iter_mut().zip(values) {
            // Adding 0 to a sum of squares changes no bit, so a leaf that ends early is one that
            // goes on with zeros.
            values[elements.len()..].fill(C::ZERO);
            *sum = sum_leaf::<FEW_LANES>(|at| values[at].exact(), |_| {});
        }
        sums
    }

    /// Parameter, gradient and the first `read` state tensors of the elements of a block; asks for
    /// those `ahead` of them.
    #[inline(always)]
    fn block(&self, read: usize, first: usize) -> Block<C, N> {
        let mut param = [K::Param::zeroed(); BLOCK];
        if K::READS_PARAM {
            param = load(self.param, first, self.ahead);
        }
        let mut master = [K::Master::zeroed(); BLOCK];
        if size_of::<K::Master>() > 0 {
            master = load(self.master, first, self.ahead);
        }
        let grad = load(self.grad, first, self.ahead);
        // A loop for each list, on arrays of one width, as in the loop of updates.
        let (mut p, mut g) = ([C::ZERO; BLOCK], [C::ZERO; BLOCK]);
        for lane in 0..BLOCK {
            p[lane] = K::widen(param[lane], master[lane]);
        }
        for lane in 0..BLOCK {
            g[lane] = grad[lane].widen();
        }
        let mut states = [[C::ZERO; BLOCK]; N];
        for (state, list) in states.iter_mut().zip(self.state).take(read) {
            let block = load(list, first, self.ahead);
            for lane in 0..BLOCK {
                state[lane] = block[lane].widen();
            }
        }
        (p, g, states)
    }
}

/// The values of a block.
type Block<C, const N: usize> = ([C; BLOCK], [C; BLOCK], [[C; BLOCK]; N]);

/// A block of a list; asks for the one `ahead` elements behind its beginning.
#[inline(always)]
fn load<T: Copy>(list: &[T], first: usize, ahead: usize) -> [T; BLOCK] {
    prefetch_ahead(list, first + ahead);
    if size_of::<T>() == 8 {
        prefetch_ahead(list, first + ahead + BLOCK / 2);
    }
    let block = &list[first..first + BLOCK];
    std::array::from_fn(|lane| block[lane])
}

#[cfg(test)]
mod tests {
    use fusestep_launch::{Master, Precision};
    use fusestep_tensor::DType;
    use half::bf16;

    use super::*;
    use fusestep_simd::split_bf16;

    struct Itself;

    impl<C: Compute> Terms<C, 0, 1> for Itself {
        const READ: usize = 0;
        fn terms(&self, p: C, _: C, _: [C; 0]) -> [C; 1] {
            [p]
        }
    }

    struct SumAndDifference;

    impl<C: Compute> Terms<C, 1, 2> for SumAndDifference {
        const READ: usize = 1;
        fn terms(&self, p: C, _: C, [state]: [C; 1]) -> [C; 2] {
            [p + state, p - state]
        }
    }

    /// The sums over lists by themselves: parameter and state; the gradient is the parameter.
    fn sums<C: Compute, T: Terms<C, N, SUMS>, const N: usize, const SUMS: usize>(
        level: Level,
        terms: &T,
        param: &[C],
        state: &[C],
    ) -> [f64; SUMS] {
        let mut lists: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
        lists[..3].copy_from_slice(&[param, param, state].map(bytemuck::cast_slice));
        let format = Format::new("test", C::DTYPE, Precision::default()).unwrap();
        chunk_sums::<C, T, N, SUMS>(level, terms, format, lists)
    }

    /// The definition, word for word: pads a chunk with zeros and adds.
    fn transcription(values: &[f64]) -> f64 {
        let mut padded = values.to_vec();
        padded.resize(65_536, 0.0);
        let mut leaves = Vec::new();
        for leaf in padded.chunks(1024) {
            let mut lanes = vec![0.0; 64];
            for term in 0..16 {
                for (j, lane) in lanes.iter_mut().enumerate() {
                    let x = leaf[j + 64 * term];
                    *lane += x * x;
                }
            }
            leaves.push(halves(lanes));
        }
        halves(leaves)
    }

    fn halves(mut values: Vec<f64>) -> f64 {
        for h in [32, 16, 8, 4, 2, 1] {
            for j in 0..h {
                values[j] += values[j + h];
            }
        }
        values[0]
    }

    fn values(numel: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let exponent = (state >> 59) as i32 - 16;
            ((state >> 33) as f32 / 2e9 - 0.5) * 2f32.powi(exponent)
        };
        (0..numel).map(next).collect()
    }

    #[test]
    fn the_tree_is_the_naive_transcription_at_every_level_and_length() {
        for numel in
            [0, 1, 15, 16, 17, 63, 64, 65, 511, 513, 1023, 1024, 1025, 4095, 20_000, 65_535, 65_536]
        {
            let (a, b) = (values(numel, 3), values(numel, 4));
            let wide: Vec<f64> = a.iter().map(|&x| f64::from(x)).collect();
            let sum: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(a + b)).collect();
            let difference: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(a - b)).collect();
            for level in Level::available() {
                let [one] = sums(level, &Itself, &a, &[]);
                let [double] = sums(level, &Itself, &wide, &[]);
                let two = sums(level, &SumAndDifference, &a, &b);
                let expected = transcription(&wide);
                assert_eq!((one, double), (expected, expected), "{level}, {numel}");
                assert_eq!(
                    two,
                    [transcription(&sum), transcription(&difference)],
                    "{level}, {numel}"
                );
            }
        }
    }

    #[test]
    fn a_parameter_with_a_master_is_summed_as_its_master() {
        let masters = values(5000, 8);
        let wide: Vec<f64> = masters.iter().map(|&x| f64::from(x)).collect();
        let split: Vec<(u16, u16)> = masters.iter().map(|&x| split_bf16(x)).collect();
        let params: Vec<u16> = split.iter().map(|split| split.0).collect();
        let remainders: Vec<u16> = split.iter().map(|split| split.1).collect();
        let own: Vec<f64> = params.iter().map(|&bits| bf16::from_bits(bits).to_f64()).collect();
        for (master, list, expected) in [
            (Master::None, &[][..], &own),
            (Master::F32, bytemuck::cast_slice(&masters), &wide),
            (Master::Remainder, bytemuck::cast_slice(&remainders), &wide),
        ] {
            let precision = Precision { master, ..Precision::default() };
            let format = Format::new("test", DType::BF16, precision).unwrap();
            let mut lists: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
            (lists[0], lists[1]) = (bytemuck::cast_slice(&params), bytemuck::cast_slice(&params));
            lists[2] = list;
            for level in Level::available() {
                let [found] = chunk_sums::<f32, _, 0, 1>(level, &Itself, format, lists);
                assert_eq!(found, transcription(expected), "{master:?}, {level}");
            }
        }
    }

    #[test]
    fn another_order_gives_other_bits() {
        let wide: Vec<f64> = values(65_536, 5).into_iter().map(f64::from).collect();
        let in_order = wide.iter().fold(0.0, |sum, x| sum + x * x);
        assert_ne!(transcription(&wide), in_order);
    }

    #[test]
    fn one_value_that_is_not_finite_reaches_the_sum() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 1023, 3000] {
                let mut list = values(3001, 6);
                list[at] = bad;
                let [sum] = sums(Level::detect(), &Itself, &list, &[]);
                assert!(!sum.is_finite(), "{bad} at {at}");
            }
        }
    }

    #[test]
    fn the_largest_f32_do_not_overflow() {
        let [sum] = sums(Level::detect(), &Itself, &[f32::MAX; 65_536], &[]);
        assert_eq!(sum.sqrt(), 256.0 * f64::from(f32::MAX));
    }
}

//! The loop over lists that all hold bf16: two neighbours in a 32-bit word.
//!
//! A bf16 is the upper half of an f32. So of a word of two, one widens by a shift and the other by
//! a mask. Both come back with a mask, a shift and an or. Sixteen words make two vectors of f32,
//! one of even places and one of odd places, without a shuffle. A conversion by the element takes
//! two shuffles for each list; to save them is worth a fifth of the time of Adam all in bf16.

use bytemuck::Pod;

use crate::compute::{Compute, ParamStorage, Storage};
use crate::rounding::Rounding;
use crate::run::{LANES, Tensor, Update};

/// One word for each lane.
type Words = [u32; LANES];

/// The parameters and the states in one half of the words.
type Half<C, const N: usize> = ([C; LANES], [[C; LANES]; N]);

impl<C, K, S, R, const N: usize> Tensor<'_, C, K, S, R, N>
where
    C: Compute,
    K: ParamStorage<C>,
    S: Storage<C>,
    R: Rounding,
{
    /// Whether all lists hold elements that are read and written by the pair.
    pub(crate) const PAIRED: bool =
        size_of::<K::Master>() == 0 && K::Param::PAIRED && (N == 0 || S::PAIRED);

    /// Updates elements by the pair from the first on, only where [`Self::PAIRED`]; returns how
    /// many, all but at most 31, which the caller updates.
    #[inline(always)]
    pub(crate) fn update_all_pairs<U: Update<C, N>, const SCALED: bool>(
        &mut self,
        update: U,
        step_scalars: U::StepScalars,
    ) -> usize {
        let (numel, mut first) = (self.param.len(), 0);
        while first + 2 * LANES <= numel {
            self.prefetch(first);
            self.update_pairs::<U, SCALED>(update, step_scalars, first);
            first += 2 * LANES;
        }
        first
    }

    /// Updates the `2 · LANES` elements from `first` on; only where [`Self::PAIRED`]. Gradients are
    /// multiplied by their factor if they are `SCALED`.
    #[inline(always)]
    pub(crate) fn update_pairs<U: Update<C, N>, const SCALED: bool>(
        &mut self,
        update: U,
        step_scalars: U::StepScalars,
        first: usize,
    ) {
        let param = load(self.param, first);
        let grad = load(self.grad, first);
        let state: [Words; N] = std::array::from_fn(|list| load(self.state[list], first));
        let low = self.half::<U, SCALED>(update, step_scalars, param, grad, &state, 0);
        let high = self.half::<U, SCALED>(update, step_scalars, param, grad, &state, 1);
        // One test for all values, instead of a comparison and a choice for each: worth a twentieth
        // of the time of a rule with two states, in a cache. Rules with fewer states get slower,
        // and so does rounding at random.
        let asks = N >= 2 && !R::AT_RANDOM;
        let mut nan = asks && unordered(&low.0, &high.0);
        if asks {
            for list in 0..N {
                nan |= unordered(&low.1[list], &high.1[list]);
            }
        }
        if asks && !nan {
            self.store_pairs::<true>(first, &low, &high);
        } else {
            self.store_pairs::<false>(first, &low, &high);
        }
    }

    /// Narrows and writes new values, of which none is NaN if they are `NUMBERS`.
    #[inline(always)]
    fn store_pairs<const NUMBERS: bool>(
        &mut self,
        first: usize,
        (low, low_states): &Half<C, N>,
        (high, high_states): &Half<C, N>,
    ) {
        // The state first: it is there while the parameter still waits for a division.
        let rounding = self.rounding.at(first);
        for list in 0..N {
            let (low, high) = (&low_states[list], &high_states[list]);
            let words = narrow::<C, S, R, NUMBERS>(low, high, rounding, list + 1);
            store(self.state[list], first, words);
        }
        let words = narrow::<C, K::Param, R, NUMBERS>(low, high, rounding, 0);
        store(self.param, first, words);
    }

    /// The new values of the elements in one half of the words.
    #[inline(always)]
    fn half<U: Update<C, N>, const SCALED: bool>(
        &self,
        update: U,
        step_scalars: U::StepScalars,
        param: Words,
        grad: Words,
        state: &[Words; N],
        half: usize,
    ) -> Half<C, N> {
        let mut values = widen::<C, K::Param>(param, half);
        let mut grads = widen::<C, K::Param>(grad, half);
        if SCALED {
            for grad in &mut grads {
                *grad = *grad * self.grad_factor;
            }
        }
        let mut states = [[C::ZERO; LANES]; N];
        for list in 0..N {
            states[list] = widen::<C, S>(state[list], half);
        }
        for lane in 0..LANES {
            let old: [C; N] = std::array::from_fn(|list| states[list][lane]);
            let new;
            (values[lane], new) = update.element(&step_scalars, values[lane], grads[lane], old);
            for list in 0..N {
                states[list][lane] = new[list];
            }
        }
        (values, states)
    }
}

#[inline(always)]
fn load<T: Pod>(list: &[T], first: usize) -> Words {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(&list[first..first + 2 * LANES]))
}

#[inline(always)]
fn store<T: Pod>(list: &mut [T], first: usize, words: Words) {
    bytemuck::cast_slice_mut(&mut list[first..first + 2 * LANES])
        .copy_from_slice(bytemuck::bytes_of(&words));
}

/// The elements in one half of the words: 0 for the lower, 1 for the upper.
#[inline(always)]
fn widen<C: Compute, P: Storage<C>>(words: Words, half: usize) -> [C; LANES] {
    let mut values = [C::ZERO; LANES];
    for lane in 0..LANES {
        values[lane] = P::widen_pair(first_lower(words[lane]))[half];
    }
    values
}

/// Whether there is a NaN among these; one comparison asks for two.
#[inline(always)]
fn unordered<C: Compute>(x: &[C; LANES], y: &[C; LANES]) -> bool {
    let mut found = false;
    for lane in 0..LANES {
        found |= x[lane].partial_cmp(&y[lane]).is_none();
    }
    found
}

#[inline(always)]
fn narrow<C: Compute, P: Storage<C>, R: Rounding, const NUMBERS: bool>(
    low: &[C; LANES],
    high: &[C; LANES],
    rounding: R,
    list: usize,
) -> Words {
    let mut words = [0; LANES];
    for lane in 0..LANES {
        let pair = [low[lane], high[lane]];
        let word = if R::AT_RANDOM {
            let random_bits = [2 * lane, 2 * lane + 1].map(|at| rounding.random_bits(at, list));
            P::narrow_pair_at_random(pair, random_bits)
        } else {
            P::narrow_pair::<NUMBERS>(pair)
        };
        words[lane] = first_lower(word);
    }
    words
}

/// The word whose lower half is the first of two neighbours in memory, and back.
#[inline(always)]
const fn first_lower(word: u32) -> u32 {
    if cfg!(target_endian = "big") { word.rotate_left(16) } else { word }
}

#[cfg(test)]
mod tests {
    use fusestep_launch::{
        Format, HostCall, HostList, HostRun, HostSpans, MAX_LISTS, Precision, Rounding, StateDType,
    };
    use fusestep_simd::Level;
    use fusestep_tensor::DType;
    use half::bf16;

    use super::*;
    use crate::run_format;

    #[derive(Clone, Copy)]
    struct Mix;

    impl<const N: usize> Update<f32, N> for Mix {
        type StepScalars = ();
        const STEP_SCALAR_BYTES: usize = 0;
        fn step_scalars(&self, _: &[u8]) {}
        fn element(&self, (): &(), p: f32, g: f32, state: [f32; N]) -> (f32, [f32; N]) {
            let sum: f32 = state.iter().sum();
            (p / 3.0 - sum * g, state.map(|s| s * 0.9 + g * 0.1))
        }
    }

    type Lists = [Vec<bf16>; 4];

    fn run_part(
        (rounding, level): (Rounding, Level),
        lists: &mut Lists,
        part: std::ops::Range<usize>,
        (grad_factor, key): (f64, &[u8]),
    ) {
        let mut all: [HostList<'_>; MAX_LISTS] = Default::default();
        for (at, (list, values)) in all.iter_mut().zip(lists.iter_mut()).enumerate() {
            let bytes = bytemuck::cast_slice_mut(&mut values[part.clone()]);
            *list = match at {
                1 => HostList::Read(bytes),
                _ => HostList::ReadWrite(bytes),
            };
        }
        let call = HostCall {
            level,
            scalars: &[],
            grad_factor,
            step_scalars: key,
            changes: None,
            squares: None,
        };
        let spans = HostSpans::part(part.len(), 0, 5, part.start as u64);
        let precision = Precision { state: StateDType::Bf16, rounding, ..Precision::default() };
        let format = Format::new("test", DType::BF16, precision).unwrap();
        run_format::<f32, _, 2>(&Mix, format, HostRun::new(call, &mut all, spans));
    }

    /// All kinds of bf16: NaN, infinities, subnormals and both signs; or only numbers whose updates
    /// are numbers.
    fn lists(numel: usize, numbers: bool) -> Lists {
        let mut seed = 9u32;
        let mut next = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let bits = (seed >> 16) as u16;
            bf16::from_bits(if numbers { bits & 0xdfff } else { bits })
        };
        std::array::from_fn(|_| (0..numel).map(|_| next()).collect())
    }

    fn bits(lists: &Lists) -> Vec<u16> {
        let bits = lists.iter().flatten().map(|x| x.to_bits());
        bits.collect()
    }

    fn pairs_are_elements(rounding: Rounding, key: &[u8]) {
        // By 1 pairs do not multiply, elements do; blocks without NaN are narrowed by a path of
        // their own.
        for (factor, numbers) in [(0.7, false), (1.0, false), (0.7, true), (1.0, true)] {
            for numel in [0, 1, 15, 16, 31, 32, 33, 47, 48, 49, 79, 80, 81, 95, 96, 97, 1000] {
                let mut alone = lists(numel, numbers);
                for at in 0..numel {
                    run_part((rounding, Level::PORTABLE), &mut alone, at..at + 1, (factor, key));
                }
                let nan = alone.iter().flatten().any(|x| x.is_nan());
                assert!(numbers != nan || numel < 100, "{numel}");
                for level in Level::available() {
                    let mut whole = lists(numel, numbers);
                    run_part((rounding, level), &mut whole, 0..numel, (factor, key));
                    assert_eq!(bits(&whole), bits(&alone), "{numel}, {level}, by {factor}");
                }
            }
        }
    }

    #[test]
    fn pairs_have_the_bits_of_their_elements() {
        pairs_are_elements(Rounding::Nearest, &[]);
    }

    #[test]
    fn pairs_draw_what_their_elements_draw() {
        pairs_are_elements(Rounding::Stochastic { seed: 3 }, &77u64.to_ne_bytes());
    }
}

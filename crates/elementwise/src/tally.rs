//! Sums that an update takes along, of the elements before and after it, a part at a time while the
//! nearest cache has both: over how far they move, and over what they have become.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Zeroable;
use fusestep_launch::{CHUNK_UNITS, HostCall, LeafSums, UnitSums};
use fusestep_simd::Level;

use crate::compute::{Compute, ParamStorage};
use crate::norm::{LEAF_ELEMENTS as LEAF, NORM_LANES, fold};

/// The sums that a call leaves of a chunk.
pub(crate) struct Tally<'a, C: Compute, K: ParamStorage<C>> {
    level: Level,
    changes: Option<Sums<'a>>,
    squares: Option<Sums<'a>>,
    old_param: [K::Param; LEAF],
    old_master: [K::Master; LEAF],
}

/// One kind of sums: the places of its leaves, and the lanes of the leaf under way.
struct Sums<'a> {
    leaves: &'a LeafSums,
    lanes: [f64; NORM_LANES],
}

impl<'a> Sums<'a> {
    fn of(leaves: &'a LeafSums) -> Self {
        Self { leaves, lanes: [0.0; NORM_LANES] }
    }
}

impl<'a, C: Compute, K: ParamStorage<C>> Tally<'a, C, K> {
    /// Most elements that may be updated between [`Self::before`] and [`Self::after`]: a leaf of
    /// the tree, so few that the nearest cache holds them before and after.
    pub(crate) const MOST: usize = LEAF;

    /// The sums that the call asks for; `None` if it asks for none.
    ///
    /// This function and the next two are compiled once for each storage of a parameter, not for
    /// each rule.
    #[inline(never)]
    pub(crate) fn of(call: HostCall<'a>) -> Option<Self> {
        let (changes, squares) = (call.changes.map(Sums::of), call.squares.map(Sums::of));
        (changes.is_some() || squares.is_some()).then(|| Self {
            level: call.level,
            changes,
            squares,
            old_param: [K::Param::zeroed(); LEAF],
            old_master: [K::Master::zeroed(); LEAF],
        })
    }

    /// Keeps the values of elements that are about to be updated.
    #[inline(never)]
    pub(crate) fn before(&mut self, param: &[K::Param], master: &[K::Master]) {
        if self.changes.is_some() {
            self.old_param[..param.len()].copy_from_slice(param);
            self.old_master[..master.len()].copy_from_slice(master);
        }
    }

    /// Takes the new values of these elements, which lie from `first` on, a multiple of
    /// [`NORM_LANES`], in a chunk of `numel`.
    #[inline(never)]
    pub(crate) fn after(
        &mut self,
        first: usize,
        numel: usize,
        param: &[K::Param],
        master: &[K::Master],
    ) {
        let (level, new) = (self.level, (param, master));
        if let Some(Sums { lanes, .. }) = &mut self.changes {
            let old = (&self.old_param[..param.len()], &self.old_master[..master.len()]);
            level.run(
                #[inline(always)]
                || add::<C, K, true>(lanes, old, new),
            );
        }
        if let Some(Sums { lanes, .. }) = &mut self.squares {
            level.run(
                #[inline(always)]
                || add::<C, K, false>(lanes, new, new),
            );
        }
        let end = first + param.len();
        if end.is_multiple_of(LEAF) || end == numel {
            for sums in [&mut self.changes, &mut self.squares].into_iter().flatten() {
                let sum = fold(std::mem::replace(&mut sums.lanes, [0.0; NORM_LANES]));
                sums.leaves[first / LEAF].store(sum.to_bits(), Ordering::Relaxed);
            }
        }
    }
}

/// Adds the squares of all changes of a part, or else of its new values, each to its lane of the
/// leaf.
#[inline(always)]
fn add<C: Compute, K: ParamStorage<C>, const CHANGES: bool>(
    lanes: &mut [f64; NORM_LANES],
    old: (&[K::Param], &[K::Master]),
    new: (&[K::Param], &[K::Master]),
) {
    /// Number of sums that stay in registers.
    const COLUMN: usize = 32;
    let square = |param: (K::Param, K::Param), master: (K::Master, K::Master)| {
        let mut value = K::widen(param.1, master.1).exact();
        if CHANGES {
            value -= K::widen(param.0, master.0).exact();
        }
        value * value
    };
    let rows = new.0.len() / NORM_LANES;
    for column in 0..NORM_LANES / COLUMN {
        let own = &mut lanes[column * COLUMN..][..COLUMN];
        let mut sums = [0.0; COLUMN];
        sums.copy_from_slice(own);
        for row in 0..rows {
            let at = row * NORM_LANES + column * COLUMN;
            let (old_param, old_master) = (&old.0[at..][..COLUMN], &old.1[at..][..COLUMN]);
            let (param, master) = (&new.0[at..][..COLUMN], &new.1[at..][..COLUMN]);
            for lane in 0..COLUMN {
                let param = (old_param[lane], param[lane]);
                sums[lane] += square(param, (old_master[lane], master[lane]));
            }
        }
        own.copy_from_slice(&sums);
    }
    for at in rows * NORM_LANES..new.0.len() {
        lanes[at % NORM_LANES] += square((old.0[at], new.0[at]), (old.1[at], new.1[at]));
    }
}

/// The sums over the leaves of a chunk.
fn values_of(leaves: &LeafSums) -> [f64; NORM_LANES] {
    std::array::from_fn(|leaf| f64::from_bits(leaves[leaf].load(Ordering::Relaxed)))
}

/// The sum over a chunk.
pub(crate) fn total(leaves: &LeafSums) -> f64 {
    fold(values_of(leaves))
}

/// Leaves to be filled in; 0 where the chunk has none.
pub(crate) fn no_sums() -> LeafSums {
    std::array::from_fn(|_| AtomicU64::new(0))
}

/// The leaves of a chunk, folded by 32, 16 and 8.
pub(crate) fn units(leaves: &LeafSums) -> UnitSums {
    const UNITS: usize = CHUNK_UNITS as usize;
    let mut sums = values_of(leaves);
    let mut half = NORM_LANES / 2;
    while half >= UNITS {
        let (low, high) = sums.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    std::array::from_fn(|unit| sums[unit])
}

#[cfg(test)]
mod tests {
    use fusestep_launch::{
        Access, Format, HostList, HostRun, HostSpans, Layout, MAX_LISTS, Master, Precision,
        Rounding as Round, StateDType,
    };
    use fusestep_simd::Level;
    use fusestep_tensor::{DType, Role};
    use half::{bf16, f16};

    use super::*;
    use crate::{Terms, Update, chunk_sums, grad_chunk_sum, param_chunk_sum, run_format};

    #[derive(Clone, Copy)]
    struct Mix;

    impl<C: Compute> Update<C, 1> for Mix {
        type StepScalars = ();
        const STEP_SCALAR_BYTES: usize = 0;
        fn step_scalars(&self, _: &[u8]) {}
        fn element(&self, (): &(), p: C, g: C, [u]: [C; 1]) -> (C, [C; 1]) {
            let u = u * C::round(0.9) + g;
            (p - u * C::round(0.01), [u])
        }
    }

    struct Both;

    impl<C: Compute> Terms<C, 1, 2> for Both {
        const READ: usize = 0;
        fn terms(&self, p: C, g: C, _: [C; 1]) -> [C; 2] {
            [p, g]
        }
    }

    fn formats() -> Vec<Format> {
        let mut formats = Vec::new();
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for master in [Master::None, Master::F32, Master::Remainder] {
                for state in [StateDType::Compute, StateDType::Bf16] {
                    for rounding in [Round::Nearest, Round::Stochastic { seed: 7 }] {
                        let precision =
                            Precision { master, state, rounding, ..Precision::default() };
                        formats.extend(Format::new("test", dtype, precision));
                    }
                }
            }
        }
        formats
    }

    /// Bytes of all lists, of values that every type can hold.
    fn lists(format: Format, numel: usize) -> Vec<Vec<u8>> {
        let mut seed = 5u32;
        let mut next = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f64::from(seed >> 8) / f64::from(1 << 23) - 1.0) * f64::from(1u32 << (seed % 7))
        };
        let declared = format.lists(&[Role::Velocity]);
        let of = declared.iter().map(|list| {
            let element = |value: f64| match list.dtype {
                DType::F64 => value.to_le_bytes().to_vec(),
                DType::F32 => (value as f32).to_le_bytes().to_vec(),
                DType::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
                DType::BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
                _ => ((value * 1000.0) as i16).to_le_bytes().to_vec(),
            };
            (0..numel).flat_map(|_| element(next())).collect()
        });
        of.collect()
    }

    fn host_lists<'a>(format: Format, bytes: &'a mut [Vec<u8>]) -> [HostList<'a>; MAX_LISTS] {
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        let declared = format.lists(&[Role::Velocity]);
        for ((list, bytes), declared) in lists.iter_mut().zip(bytes).zip(declared) {
            *list = match declared.access {
                Access::Read => HostList::Read(bytes),
                _ => HostList::ReadWrite(bytes),
            };
        }
        lists
    }

    fn check<C: Compute>(format: Format, numel: usize, level: Level) {
        let case = format!("{format:?}, {numel} elements, {level}");
        let call = HostCall {
            level,
            scalars: &[],
            grad_factor: 0.5,
            step_scalars: &77u64.to_le_bytes(),
            changes: None,
            squares: None,
        };
        let spans = || HostSpans::part(numel, 0, 3, 65_536);
        let (mut plain, mut taken) = (lists(format, numel), lists(format, numel));
        let mut lists = host_lists(format, &mut plain);
        let run = HostRun::new(call, &mut lists, spans());
        run_format::<C, _, 1>(&Mix, format, run);
        let squares = no_sums();
        let taking = HostCall { squares: Some(&squares), ..call };
        let mut lists = host_lists(format, &mut taken);
        let run = HostRun::new(taking, &mut lists, spans());
        run_format::<C, _, 1>(&Mix, format, run);
        let sum = total(&squares);
        assert!(plain == taken, "{case}");
        let mut written: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
        for (list, bytes) in written.iter_mut().zip(&taken) {
            *list = bytes;
        }
        let [param, grad] = chunk_sums::<C, _, 1, 2>(level, &Both, format, written);
        let alone = param_chunk_sum::<C, 1>(level, format, written);
        assert_eq!([sum, alone].map(f64::to_bits), [param.to_bits(); 2], "{case}");
        let alone = grad_chunk_sum::<C>(level, format, written[1]);
        assert_eq!(alone.to_bits(), grad.to_bits(), "{case}");
    }

    #[test]
    fn an_update_leaves_the_sum_that_the_next_step_would_take() {
        let formats = formats();
        assert!(formats.len() > 12, "{formats:?}");
        for format in formats {
            for numel in [1, 15, 17, 1023, 1024, 1025, 5000, 65_535, 65_536] {
                for level in Level::available() {
                    match format.layout() {
                        Layout::F64 => check::<f64>(format, numel, level),
                        _ => check::<f32>(format, numel, level),
                    }
                }
            }
        }
    }
}

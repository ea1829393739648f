//! How far elements move: sums of (new − old)², a part at a time while the nearest cache has both.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Zeroable;
use fusestep_launch::{CHUNK_UNITS, LeafSums, UnitSums};
use fusestep_simd::Level;

use crate::Compute;
use crate::norm::{LEAF_ELEMENTS as LEAF, NORM_LANES, fold};
use crate::param_storage::ParamStorage;

/// The sums that a call leaves over what it changes in a chunk.
pub(crate) struct Changes<'a, C: Compute, K: ParamStorage<C>> {
    leaves: &'a [AtomicU64],
    level: Level,
    old_param: [K::Param; LEAF],
    old_master: [K::Master; LEAF],
    lanes: [f64; NORM_LANES],
}

impl<'a, C: Compute, K: ParamStorage<C>> Changes<'a, C, K> {
    /// Most elements that may be updated between [`Self::before`] and [`Self::after`]: a leaf of
    /// the tree, so few that the nearest cache holds them before and after.
    pub(crate) const MOST: usize = LEAF;

    /// For chunks with a place in `leaves` for each of their leaves.
    pub(crate) fn of(leaves: &'a [AtomicU64], level: Level) -> Self {
        Self {
            leaves,
            level,
            old_param: [K::Param::zeroed(); LEAF],
            old_master: [K::Master::zeroed(); LEAF],
            lanes: [0.0; NORM_LANES],
        }
    }

    /// Keeps what is about to be updated.
    #[inline(always)]
    pub(crate) fn before(&mut self, param: &[K::Param], master: &[K::Master]) {
        self.old_param[..param.len()].copy_from_slice(param);
        self.old_master[..master.len()].copy_from_slice(master);
    }

    /// Takes what has become of it: these are the elements from `first` on, a multiple of
    /// [`NORM_LANES`], of a chunk of `numel`.
    ///
    /// Compiled once for each way to keep a parameter, not for each rule.
    #[inline(never)]
    pub(crate) fn after(
        &mut self,
        (first, numel): (usize, usize),
        param: &[K::Param],
        master: &[K::Master],
    ) {
        let end = first + param.len();
        let (level, lanes) = (self.level, &mut self.lanes);
        let old = (
            &self.old_param[..param.len()],
            &self.old_master[..master.len()],
        );
        level.run(
            #[inline(always)]
            || add::<C, K>(lanes, old, (param, master)),
        );
        if end.is_multiple_of(LEAF) || end == numel {
            let sum = fold(std::mem::replace(&mut self.lanes, [0.0; NORM_LANES]));
            self.leaves[first / LEAF].store(sum.to_bits(), Ordering::Relaxed);
        }
    }
}

/// Adds the squares of all changes of a part, each to its lane of the leaf.
#[inline(always)]
fn add<C: Compute, K: ParamStorage<C>>(
    lanes: &mut [f64; NORM_LANES],
    old: (&[K::Param], &[K::Master]),
    new: (&[K::Param], &[K::Master]),
) {
    /// As many sums as stay in registers.
    const COLUMN: usize = 32;
    let square = |param: (K::Param, K::Param), master: (K::Master, K::Master)| {
        let change = K::widen(param.1, master.1).exact() - K::widen(param.0, master.0).exact();
        change * change
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

/// The leaves of a chunk, folded by 32, 16 and 8.
pub(crate) fn units(leaves: &LeafSums) -> UnitSums {
    const UNITS: usize = CHUNK_UNITS as usize;
    let mut sums: [f64; NORM_LANES] =
        std::array::from_fn(|leaf| f64::from_bits(leaves[leaf].load(Ordering::Relaxed)));
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

//! How far a chunk moves: an update, and the sum of squares over what it changed.
//!
//! The kernel runs as ever, a stripe at a time; before, the stripe's parameters are set aside, and after, what they have become is
//! compared with them. All of that is in the nearest cache, so memory is read and written as often as by the update alone.

use bytemuck::Zeroable;
use fusestep_launch::{
    CHUNK_UNITS, CarriedSum, HostCall, HostList, HostSpans, MAX_LISTS, MultiTensorKernel, UnitSums,
};
use fusestep_tensor::{DType, Role};
use half::{bf16, f16};

use crate::Compute;
use crate::norm::{LEAF_ELEMENTS as LEAF, NORM_LANES as LANES, sum_leaf};
use crate::slot::{Plain, Slot, WithRemainder};

/// Leaves of a stripe. One call of the kernel costs as much as the arithmetic on some hundred elements, and what was set aside has to
/// stay in the nearest cache.
const STRIPE_LEAVES: usize = 4;

const STRIPE: usize = STRIPE_LEAVES * LEAF;

/// An update of whole leaves of one tensor, at most a chunk.
pub(crate) struct Change<'a> {
    pub(crate) kernel: &'a dyn MultiTensorKernel,
    /// Takes the update's place if the sums over what it writes are to be carried along.
    pub(crate) carried: Option<&'a dyn CarriedSum>,
    pub(crate) call: HostCall<'a>,
    pub(crate) class: u32,
    pub(crate) numel: usize,
    pub(crate) parameter: u32,
    /// Elements of the parameter before these.
    pub(crate) first_element: u64,
}

impl Change<'_> {
    /// Runs it; returns Σ (new − old)² over each unit, and leaves in `written` the carried sums of each leaf.
    pub(crate) fn run(
        &self,
        mut lists: [HostList<'_>; MAX_LISTS],
        written: &mut [f64; LANES],
    ) -> UnitSums {
        let declared = self.kernel.lists();
        let position = |role| declared.iter().position(|list| list.role == role);
        let param = position(Role::Param).unwrap_or(0);
        let leaves = match (position(Role::Master), position(Role::Remainder)) {
            (Some(master), _) => self.by_dtype(declared[master].dtype, master, &mut lists, written),
            (None, Some(beside)) => {
                self.leaves::<f32, WithRemainder>((param, beside), &mut lists, written)
            }
            (None, None) => self.by_dtype(declared[param].dtype, param, &mut lists, written),
        };
        units(leaves)
    }

    /// The sums over a list that holds the values as they are.
    fn by_dtype(
        &self,
        dtype: DType,
        list: usize,
        lists: &mut [HostList<'_>; MAX_LISTS],
        written: &mut [f64; LANES],
    ) -> [f64; LANES] {
        let places = (list, list);
        match dtype {
            DType::F64 => self.leaves::<f64, Plain<f64>>(places, lists, written),
            DType::F16 => self.leaves::<f32, Plain<f16>>(places, lists, written),
            DType::BF16 => self.leaves::<f32, Plain<bf16>>(places, lists, written),
            _ => self.leaves::<f32, Plain<f32>>(places, lists, written),
        }
    }

    /// The sums over all leaves; what is missing is 0.
    fn leaves<C: Compute, K: Slot<C>>(
        &self,
        (param, beside): (usize, usize),
        lists: &mut [HostList<'_>; MAX_LISTS],
        written: &mut [f64; LANES],
    ) -> [f64; LANES] {
        let mut leaves = [0.0; LANES];
        let mut old = [C::ZERO; STRIPE];
        for (stripe, sums) in leaves.chunks_mut(STRIPE_LEAVES).enumerate() {
            let first = stripe * STRIPE;
            let numel = STRIPE.min(self.numel.saturating_sub(first));
            if numel == 0 {
                break;
            }
            let mut own = self.stripe(lists, first, numel);
            let values = Values::<C, K>::of(&own, param, beside);
            let old = &mut old[..numel];
            self.call.level.run(
                #[inline(always)]
                || values.widen(old),
            );
            let count = numel.div_ceil(LEAF);
            self.update(
                &mut own,
                first,
                &mut written[stripe * STRIPE_LEAVES..][..count],
            );
            let values = Values::<C, K>::of(&own, param, beside);
            self.call.level.run(
                #[inline(always)]
                || values.change(old, &mut sums[..count]),
            );
        }
        leaves
    }

    /// The lists of a stripe.
    fn stripe<'b>(
        &self,
        lists: &'b mut [HostList<'_>; MAX_LISTS],
        first: usize,
        numel: usize,
    ) -> [HostList<'b>; MAX_LISTS] {
        let mut stripe: [HostList<'b>; MAX_LISTS] = Default::default();
        for ((to, list), declared) in stripe.iter_mut().zip(lists).zip(self.kernel.lists()) {
            let width = declared.dtype.len_bytes();
            *to = list.part(first * width..(first + numel) * width);
        }
        stripe
    }

    fn update(&self, stripe: &mut [HostList<'_>; MAX_LISTS], first: usize, written: &mut [f64]) {
        let mut lists: [HostList<'_>; MAX_LISTS] = Default::default();
        let mut numel = 0;
        for ((to, list), declared) in lists.iter_mut().zip(stripe).zip(self.kernel.lists()) {
            let len_bytes = list.bytes().len();
            numel = len_bytes / declared.dtype.len_bytes();
            *to = list.part(0..len_bytes);
        }
        let first_element = self.first_element + first as u64;
        let spans = HostSpans::part(numel, self.class, self.parameter, first_element);
        match self.carried {
            Some(carried) => carried.run_leaves(self.call, lists, spans, written),
            None => self.kernel.run_host(self.call, lists, spans),
        }
    }
}

/// The parameters of a stripe, as they are kept.
struct Values<'a, C: Compute, K: Slot<C>> {
    param: &'a [K::Param],
    /// Empty if there is no such list.
    beside: &'a [K::Beside],
}

impl<'a, C: Compute, K: Slot<C>> Values<'a, C, K> {
    fn of(lists: &'a [HostList<'_>; MAX_LISTS], param: usize, beside: usize) -> Self {
        Self {
            param: bytemuck::cast_slice(lists[param].bytes()),
            beside: match size_of::<K::Beside>() {
                0 => &[],
                _ => bytemuck::cast_slice(lists[beside].bytes()),
            },
        }
    }

    #[inline(always)]
    fn value(&self, at: usize) -> C {
        let beside = match size_of::<K::Beside>() {
            0 => K::Beside::zeroed(),
            _ => self.beside[at],
        };
        K::widen(self.param[at], beside)
    }

    #[inline(always)]
    fn widen(&self, values: &mut [C]) {
        // One length for all, which the loop need not check.
        let own = self.part(0, values.len());
        for (at, value) in values.iter_mut().enumerate() {
            *value = own.value(at);
        }
    }

    #[inline(always)]
    fn part(&self, first: usize, numel: usize) -> Self {
        let elements = first..first + numel;
        Self {
            param: &self.param[elements.clone()],
            beside: match size_of::<K::Beside>() {
                0 => &[],
                _ => &self.beside[elements],
            },
        }
    }

    /// The sum over each leaf.
    #[inline(always)]
    fn change(&self, old: &[C], leaves: &mut [f64]) {
        for (leaf, sum) in leaves.iter_mut().enumerate() {
            let first = leaf * LEAF;
            let numel = LEAF.min(old.len() - first);
            let (own, old) = (self.part(first, numel), &old[first..first + numel]);
            *sum = match old.first_chunk::<LEAF>() {
                Some(old) => sum_leaf(|at| own.value(at).exact() - old[at].exact(), |_| {}),
                None => {
                    // Adding 0 to a sum of squares changes no bit, so a leaf that ends early is one that goes on without change.
                    let mut change = [0.0; LEAF];
                    for (at, change) in change[..numel].iter_mut().enumerate() {
                        *change = own.value(at).exact() - old[at].exact();
                    }
                    sum_leaf(|at| change[at], |_| {})
                }
            };
        }
    }
}

/// The leaves of a chunk, folded by 32, 16 and 8.
fn units(mut leaves: [f64; LANES]) -> UnitSums {
    const UNITS: usize = CHUNK_UNITS as usize;
    let mut half = LANES / 2;
    while half >= UNITS {
        let (low, high) = leaves.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    std::array::from_fn(|unit| leaves[unit])
}

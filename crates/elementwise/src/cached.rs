//! Updates that take the next step's sum over the parameters along.

use std::sync::atomic::{AtomicBool, AtomicU64};

use fusestep_launch::{Format, HostCall, HostList, HostSpan, HostSpans, MAX_LISTS};
use fusestep_simd::prefetch_bytes;

use crate::alone::leaf_sum;
use crate::change::Changes;
use crate::format::FormatVisitor;
use crate::norm::LEAF_ELEMENTS as LEAF;
use crate::param_storage::{ParamStorage, master};
use crate::rounding::Rounding;
use crate::run::Tensor;
use crate::{Compute, Storage, Update};

/// A tensor's sums of squares that its last update has taken along.
#[derive(Clone, Copy, Debug)]
pub struct Cached<'a> {
    /// The sum over each chunk, as the bits of an f64.
    pub chunks: &'a [AtomicU64],
    /// Whether they are the sums over the parameters as they are now.
    pub valid: &'a AtomicBool,
}

/// [`crate::run_format`] for whole leaves of one tensor, its last one perhaps shorter; leaves in
/// `leaves` the sum of squares over the parameters written in each, in the fixed tree of
/// [`crate::square_sum`]: folded, the bits of [`crate::chunk_sums`] over them. Of a parameter with
/// a master it is the master's.
///
/// # Panics
/// As [`crate::run_format`]; if there is no place for each leaf.
/// # Cost
/// That of the update, and arithmetic on what the cache still holds: a leaf is summed as soon as it
/// is updated.
pub fn run_leaves_format<C: Compute, U: Update<C, N>, const N: usize>(
    update: &U,
    format: Format,
    call: HostCall<'_>,
    lists: [HostList<'_>; MAX_LISTS],
    mut spans: HostSpans<'_>,
    leaves: &mut [f64],
) {
    let Some(span) = spans.next() else {
        return;
    };
    let call = Call::<U, N> {
        update,
        call,
        lists,
        span,
        leaves,
    };
    C::visit(format, call);
}

/// Leaves and their update before the format is known to the compiler.
struct Call<'a, U, const N: usize> {
    update: &'a U,
    call: HostCall<'a>,
    lists: [HostList<'a>; MAX_LISTS],
    span: HostSpan,
    leaves: &'a mut [f64],
}

impl<C: Compute, U: Update<C, N>, const N: usize> FormatVisitor<C> for Call<'_, U, N> {
    type Output = ();

    fn visit<K: ParamStorage<C>, S: Storage<C>, R: Rounding>(self) {
        let Call {
            update,
            call,
            lists,
            span,
            leaves,
        } = self;
        let mut lists = lists.into_iter();
        let mut next = || lists.next().unwrap_or_default();
        let param = next().elements_mut::<K::Param>();
        let grad = next().elements::<K::Param>();
        let mut state: [&mut [S]; N] = std::array::from_fn(|_| next().elements_mut::<S>());
        let mut none = Vec::new();
        let master = master::<K::Master>(next(), param.len(), &mut none);
        call.level.run(
            #[inline(always)]
            || {
                let (update, ahead_bytes) = (*update, prefetch_bytes());
                let bytes = call.step_scalars_of(span.group, U::STEP_SCALAR_BYTES + R::KEY_BYTES);
                let step_scalars = update.step_scalars(bytes);
                let mut changes = call
                    .changes
                    .map(|leaves| Changes::<C, K>::of(leaves, call.level));
                for (leaf, sum) in leaves[..span.numel.div_ceil(LEAF)].iter_mut().enumerate() {
                    let part = span.part(leaf * LEAF, LEAF);
                    let elements = part.start..part.start + part.numel;
                    if let Some(changes) = &mut changes {
                        changes.before(&param[elements.clone()], &master[elements.clone()]);
                    }
                    let mut rest = state.iter_mut();
                    let mut tensor = Tensor::<C, K, S, R, N> {
                        param: &mut param[elements.clone()],
                        master: &mut master[elements.clone()],
                        grad: &grad[elements.clone()],
                        state: std::array::from_fn(|_| match rest.next() {
                            Some(list) => &mut list[elements.clone()],
                            None => &mut [],
                        }),
                        grad_factor: C::round(call.grad_factor),
                        rounding: R::of(&bytes[U::STEP_SCALAR_BYTES..], &part),
                        ahead_bytes,
                    };
                    tensor.update(update, step_scalars);
                    let (param, master) = (&param[elements.clone()], &master[elements]);
                    if let Some(changes) = &mut changes {
                        changes.after((leaf * LEAF, span.numel), param, master);
                    }
                    *sum = leaf_sum::<C, K>(param, master, |_| {});
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use fusestep_launch::{
        Access, HostRun, Layout, Master, Precision, Rounding as Round, StateDType,
    };
    use fusestep_simd::Level;
    use fusestep_tensor::{DType, Role};
    use half::{bf16, f16};

    use super::*;
    use crate::{Terms, chunk_sums, fold, grad_chunk_sum, param_chunk_sum, run_format};

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
                        let precision = Precision {
                            master,
                            state,
                            rounding,
                        };
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
        };
        let spans = || HostSpans::part(numel, 0, 3, 65_536);
        let (mut plain, mut cached) = (lists(format, numel), lists(format, numel));
        let run = HostRun::new(call, host_lists(format, &mut plain), spans());
        run_format::<C, _, 1>(&Mix, format, run);
        let lists = host_lists(format, &mut cached);
        let mut leaves = [0.0; 64];
        run_leaves_format::<C, _, 1>(&Mix, format, call, lists, spans(), &mut leaves);
        let sum = fold(leaves);
        assert!(plain == cached, "{case}");
        let mut written: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
        for (list, bytes) in written.iter_mut().zip(&cached) {
            *list = bytes;
        }
        let [param, grad] = chunk_sums::<C, _, 1, 2>(level, &Both, format, written);
        let alone = param_chunk_sum::<C, 1>(level, format, written);
        assert_eq!(
            [sum, alone].map(f64::to_bits),
            [param.to_bits(); 2],
            "{case}"
        );
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

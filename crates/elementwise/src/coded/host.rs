//! Updates over coded state of all tensors of a host call.

use bytemuck::{Pod, cast_slice};
use fusestep_launch::{Format, HostList, HostRun, KEY_BYTES, MAX_LISTS};

use super::coding::{Dither, GROUP, units_of};
use super::groups::Grads;
use super::run::{Shared, run_tensor};
use super::storage::{CodedVisitor, GroupStorage, visit_coded};
use super::tensor::CodedState;
use crate::across::Around;
use crate::compute::Compute;
use crate::param_storage::master;
use crate::parts::{outside, part_mut};
use crate::{Update, read_values};

/// Runs an update over all tensors of a call whose state is in codes. Their lists are those of
/// [`Format::lists`] with `N` roles of state.
///
/// # Panics
/// If the format has no codes, or a list is missing or of another type: backends bring the lists
/// that the kernel declared.
pub(crate) fn run_coded<U: Update<f32, N>, const N: usize>(
    update: U,
    format: Format,
    run: HostRun<'_, '_>,
) {
    let has_wide_gradients = format.has_wide_gradients();
    visit_coded(format, OverHost::<U, N> { update, run, has_wide_gradients });
}

/// A call before its format is known to the compiler.
struct OverHost<'a, 'b, U, const N: usize> {
    update: U,
    run: HostRun<'a, 'b>,
    has_wide_gradients: bool,
}

impl<U: Update<f32, N>, const N: usize> CodedVisitor for OverHost<'_, '_, U, N> {
    type Output = ();

    fn visit<K: GroupStorage>(self) {
        // Beside parameters of f32 both are one type.
        if self.has_wide_gradients && !K::IS_VALUE {
            run_over::<K, f32, U, N>(self.update, self.run, |list| Grads::Wide(list));
        } else {
            run_over::<K, K::Param, U, N>(self.update, self.run, |list| Grads::Own(list));
        }
    }
}

/// The update over gradients of `G`, which `grads` names for the loop.
fn run_over<K, G, U, const N: usize>(
    update: U,
    run: HostRun<'_, '_>,
    grads: fn(&[G]) -> Grads<'_, K::Param>,
) where
    K: GroupStorage,
    G: Pod,
    U: Update<f32, N>,
{
    let call = run.call;
    let mut lists = run.lists.iter_mut();
    let param = HostList::take_mut::<K::Param>(&mut lists);
    let mut around = Around::<f32, K, G>::of(call, lists.next(), run.across);
    let mut codes: [&mut [u8]; N] = std::array::from_fn(|_| HostList::take_mut(&mut lists));
    let mut units: [&mut [f32]; N] = std::array::from_fn(|_| HostList::take_mut(&mut lists));
    let mut none = Vec::new();
    let master = master::<K::Master>(&mut lists, param.len(), &mut none);
    let grad_factor = <f32 as Compute>::round(call.grad_factor);
    // Parts of a tensor begin with a group.
    let most = if around.is_alone { usize::MAX } else { around.most / GROUP * GROUP };
    for span in run.spans {
        assert!(span.start.is_multiple_of(GROUP), "nothing cuts a group of {GROUP} elements");
        let bytes = call.step_scalars_of(span.group, U::STEP_SCALAR_BYTES + KEY_BYTES);
        let step_scalars = update.step_scalars(bytes);
        let [number] = read_values::<u64, 1>(&bytes[U::STEP_SCALAR_BYTES..]);
        let dither = Dither::of_step(number);
        let shared = Shared { update, step_scalars, grad_factor, dither: &dither };
        let mut first = 0;
        while first < span.numel {
            let own = span.part(first, most);
            let elements = own.start..own.start + own.numel;
            let param = part_mut(param, &elements);
            let master = part_mut(master, &elements);
            let grad = grads(around.before(elements.clone(), param, master));
            let state = parts(&mut codes, &mut units, &elements);
            run_tensor::<K, U, N>(call.level, shared, param, master, grad, state);
            if !around.is_alone {
                let mut written: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
                for (at, list) in parts(&mut codes, &mut units, &elements).into_iter().enumerate() {
                    (written[at], written[N + at]) = (list.codes, cast_slice(list.units));
                }
                let written = &written[..2 * N];
                around.after(first, span.numel, own.start, param, master, written);
            }
            first += own.numel;
        }
    }
}

/// The state of consecutive elements, of which the first begins a group.
fn parts<'a, const N: usize>(
    codes: &'a mut [&mut [u8]; N],
    units: &'a mut [&mut [f32]; N],
    elements: &std::ops::Range<usize>,
) -> [CodedState<'a>; N] {
    let groups = elements.start / GROUP..units_of(elements.end);
    let mut units = units.iter_mut();
    codes.each_mut().map(|codes| match units.next() {
        Some(units) => {
            CodedState { codes: part_mut(codes, elements), units: part_mut(units, &groups) }
        }
        None => outside(),
    })
}

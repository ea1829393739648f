//! Updates at the portable level, and of gradients wider than their parameters: formats are
//! converted on the way.
//!
//! A loop that is compiled for each rule and each format at every level is most of a build and most
//! of a program. Processors without vectors worth the name are few, so at their level a rule's loop
//! is compiled for values alone. A few hundred elements at a time are widened, updated and narrowed
//! in the nearest cache, by code that all rules share. Widening is exact and narrowing rounds as
//! elsewhere, so the bits do not change.
//!
//! Gradients of another type than their parameters go the same way at every level: few runs have
//! them, and the memory is what they wait for.

use fusestep_launch::{HostCall, HostList, HostRun, HostSpans, MAX_LISTS};

use crate::across::Around;
use crate::compute::{Compute, Converted, FormatVisitor, ParamStorage, Storage};
use crate::param_storage::master;
use crate::rounding::Rounding;

/// Most elements that are converted at a time.
const MOST: usize = 256;

/// Most roles of state.
const ROLES: usize = MAX_LISTS - 2;

/// Values of consecutive elements.
struct Values<C> {
    param: [C; MOST],
    grad: [C; MOST],
    state: [[C; MOST]; ROLES],
}

impl<C: Compute> FormatVisitor<C> for Converted<'_, '_> {
    type Output = ();

    fn visit<K: ParamStorage<C>, S: Storage<C>, R: Rounding>(self) {
        if self.has_wide_gradients {
            self.run_over::<C, K, C, S, R>();
        } else {
            self.run_over::<C, K, K::Param, S, R>();
        }
    }
}

impl Converted<'_, '_> {
    /// Runs the update over parameters kept as `K`, gradients as `G`, state as `S`, and rounding as
    /// `R`.
    fn run_over<C, K, G, S, R>(self)
    where
        C: Compute,
        K: ParamStorage<C>,
        G: Storage<C>,
        S: Storage<C>,
        R: Rounding,
    {
        let Self { roles, step_scalar_bytes, update, run, .. } = self;
        let call = run.call;
        let mut lists = run.lists.iter_mut();
        let param = HostList::take_mut::<K::Param>(&mut lists);
        let mut around = Around::<C, K, G>::of(call, lists.next(), run.across);
        let mut state: [&mut [S]; ROLES] = Default::default();
        let state = &mut state[..roles];
        state.fill_with(|| HostList::take_mut(&mut lists));
        let mut none = Vec::new();
        let master = master::<K::Master>(&mut lists, param.len(), &mut none);
        let mut values = Values {
            param: [C::ZERO; MOST],
            grad: [C::ZERO; MOST],
            state: [[C::ZERO; MOST]; ROLES],
        };
        let most = around.most.min(MOST);
        for span in run.spans {
            let step_scalars = call.step_scalars_of(span.group, step_scalar_bytes + R::KEY_BYTES);
            for first in (0..span.numel).step_by(most) {
                let part = span.part(first, most);
                let elements = part.start..part.start + part.numel;
                let param = &mut param[elements.clone()];
                let master = &mut master[elements.clone()];
                let grad = around.before(elements.clone(), param, master);
                values.widen::<K, G>(param, master, grad);
                for (values, list) in values.state.iter_mut().zip(&*state) {
                    widen(values, &list[elements.clone()]);
                }
                let of_values = HostCall { step_scalars, changes: None, squares: None, ..call };
                let spans = HostSpans::one(part.numel, 0);
                let mut lists = values.lists(part.numel, roles);
                update(HostRun::new(of_values, &mut lists, spans));
                let rounding = R::of(&step_scalars[step_scalar_bytes..], &part);
                for (at, (values, list)) in values.state.iter().zip(state.iter_mut()).enumerate() {
                    narrow::<C, S, R>(values, &mut list[elements.clone()], rounding, at + 1);
                }
                values.narrow::<K, R>(param, master, rounding);
                let mut new: [&[S]; ROLES] = Default::default();
                for (new, list) in new.iter_mut().zip(&*state) {
                    *new = &list[elements.clone()];
                }
                around.after(first, span.numel, part.start, param, master, &new[..roles]);
            }
        }
    }
}

impl<C: Compute> Values<C> {
    fn widen<K: ParamStorage<C>, G: Storage<C>>(
        &mut self,
        param: &[K::Param],
        master: &[K::Master],
        grad: &[G],
    ) {
        for (value, (&param, &master)) in self.param.iter_mut().zip(param.iter().zip(master)) {
            *value = K::widen(param, master);
        }
        widen(&mut self.grad, grad);
    }

    /// The first `numel` of each list of a kernel with so many roles of state.
    fn lists(&mut self, numel: usize, roles: usize) -> [HostList<'_>; MAX_LISTS] {
        let mut lists: [HostList<'_>; MAX_LISTS] = Default::default();
        lists[0] = HostList::ReadWrite(bytemuck::cast_slice_mut(&mut self.param[..numel]));
        lists[1] = HostList::Read(bytemuck::cast_slice(&self.grad[..numel]));
        for (list, values) in lists[2..].iter_mut().zip(&mut self.state[..roles]) {
            *list = HostList::ReadWrite(bytemuck::cast_slice_mut(&mut values[..numel]));
        }
        lists
    }

    fn narrow<K: ParamStorage<C>, R: Rounding>(
        &self,
        param: &mut [K::Param],
        master: &mut [K::Master],
        rounding: R,
    ) {
        for (lane, (param, master)) in param.iter_mut().zip(master).enumerate() {
            (*param, *master) = if R::AT_RANDOM {
                K::narrow_at_random(self.param[lane], rounding.random_bits(lane, 0))
            } else {
                K::narrow(self.param[lane])
            };
        }
    }
}

fn widen<C: Compute, S: Storage<C>>(values: &mut [C], list: &[S]) {
    for (value, element) in values.iter_mut().zip(list) {
        *value = element.widen();
    }
}

/// Keeps values as the elements of a list, whose number tells its random bits from another's.
fn narrow<C: Compute, S: Storage<C>, R: Rounding>(
    values: &[C],
    list: &mut [S],
    rounding: R,
    number: usize,
) {
    for (lane, (element, &value)) in list.iter_mut().zip(values).enumerate() {
        *element = if R::AT_RANDOM {
            S::narrow_at_random(value, rounding.random_bits(lane, number))
        } else {
            S::narrow(value)
        };
    }
}

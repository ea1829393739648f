//! Work around the update of a part of a tensor: gradients come from other ranks, new values go to
//! them, and sums are taken along.
//!
//! None of this work depends on the rule, and most updates have none of it. So it is not part of
//! their loop, which is compiled for every rule and level.

use std::ops::Range;

use bytemuck::Pod;
use fusestep_launch::{ACROSS_BYTES, AcrossRanks, HostCall, HostList};
use fusestep_simd::{fetches_by_itself, prefetch_bytes};

use crate::compute::{Compute, ParamStorage};
use crate::parts::part;
use crate::tally::Tally;

/// The work around the parts of one call.
pub(crate) struct Around<'a, 'b, C: Compute, K: ParamStorage<C>, G = <K as ParamStorage<C>>::Param>
{
    /// Whether there is no such work: no other ranks and no sums.
    pub(crate) is_alone: bool,
    /// Most elements that are updated at a time.
    pub(crate) most: usize,
    /// Distance in bytes from the elements under way to the cache lines that are asked for, in all
    /// lists. It is 0 where the processor does better by itself: asking for a line as it is read
    /// costs next to nothing.
    pub(crate) ahead_bytes: usize,
    grads: Gradients<'a, 'b, G>,
    tally: Option<Tally<'b, C, K>>,
}

/// The gradients of a call.
enum Gradients<'a, 'b, G> {
    /// Gradients in a list.
    Here(&'a [G]),
    /// Gradients of all ranks, to be averaged.
    Ranks(&'b mut (dyn AcrossRanks + 'a)),
}

impl<'a, 'b, C: Compute, K: ParamStorage<C>, G: Pod> Around<'a, 'b, C, K, G> {
    #[inline(never)]
    pub(crate) fn of(
        call: HostCall<'b>,
        list: Option<&mut HostList<'a>>,
        across: Option<&'b mut (dyn AcrossRanks + 'a)>,
    ) -> Self {
        let bytes = size_of::<K::Param>().max(size_of::<G>());
        let is_tallied = call.changes.is_some() || call.squares.is_some();
        // In place: a tally is kilobytes, and most calls have none.
        let mut around = Self {
            is_alone: across.is_none() && !is_tallied,
            most: usize::MAX,
            ahead_bytes: prefetch_bytes(bytes),
            grads: Gradients::Here(&[]),
            tally: None,
        };
        match across {
            None => {
                let list = list.map(std::mem::take).unwrap_or_default();
                around.grads = Gradients::Here(list.elements());
            }
            Some(ranks) => {
                around.grads = Gradients::Ranks(ranks);
                around.most = ACROSS_BYTES / bytes;
                if fetches_by_itself(bytes) {
                    around.ahead_bytes = 0;
                }
            }
        }
        if is_tallied {
            around.tally = Tally::of(call);
            around.most = around.most.min(Tally::<C, K>::MOST);
        }
        around
    }

    /// The gradients of elements that are about to be updated; `param` and `master` are their
    /// values until then.
    #[inline(always)]
    pub(crate) fn before(
        &mut self,
        elements: Range<usize>,
        param: &[K::Param],
        master: &[K::Master],
    ) -> &[G] {
        match self.grads {
            Gradients::Here(list) if self.is_alone => part(list, &elements),
            _ => self.begin(elements, param, master),
        }
    }

    #[inline(never)]
    fn begin(&mut self, elements: Range<usize>, param: &[K::Param], master: &[K::Master]) -> &[G] {
        if let Some(tally) = &mut self.tally {
            tally.before(param, master);
        }
        match &mut self.grads {
            Gradients::Here(list) => part(list, &elements),
            Gradients::Ranks(ranks) => bytemuck::cast_slice(ranks.gradients(elements)),
        }
    }

    /// Takes the new values of elements. `first` and `numel` are as for [`Tally::after`], `start`
    /// is the first element's place in the lists.
    #[inline(never)]
    pub(crate) fn after<S: Pod>(
        &mut self,
        first: usize,
        numel: usize,
        start: usize,
        param: &[K::Param],
        master: &[K::Master],
        state: &[&[S]],
    ) {
        if let Some(tally) = &mut self.tally {
            tally.after(first, numel, param, master);
        }
        if let Gradients::Ranks(ranks) = &mut self.grads {
            ranks.updated(0, start, bytemuck::cast_slice(param));
            for (list, state) in state.iter().enumerate() {
                ranks.updated(2 + list, start, bytemuck::cast_slice(state));
            }
            if size_of::<K::Master>() > 0 {
                ranks.updated(2 + state.len(), start, bytemuck::cast_slice(master));
            }
        }
    }
}

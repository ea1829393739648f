//! An update between ranks: gradients that are with all of them, and new values that all are given.

use std::ops::Range;

use bytemuck::Pod;
use fusestep_launch::{ACROSS_BYTES, AcrossRanks, HostList};
use fusestep_simd::{fetches_by_itself, prefetch_bytes};

/// Where the gradients of a call are.
pub(crate) enum Gradients<'a, 'b, P> {
    /// In a list.
    Here(&'a [P]),
    /// With all ranks.
    Ranks(&'b mut dyn AcrossRanks),
}

impl<'a, 'b, P: Pod> Gradients<'a, 'b, P> {
    pub(crate) fn of(list: HostList<'a>, across: Option<&'b mut dyn AcrossRanks>) -> Self {
        match across {
            Some(ranks) => Self::Ranks(ranks),
            None => Self::Here(list.elements()),
        }
    }

    /// How many elements are to be asked for at a time.
    #[inline(always)]
    pub(crate) fn most(&self) -> usize {
        match self {
            Self::Here(_) => usize::MAX,
            Self::Ranks(_) => ACROSS_BYTES / size_of::<P>(),
        }
    }

    /// How many bytes ahead of their use cache lines of all lists are asked for; 0 where the
    /// processor does better by itself: asking for a line as it is read costs next to nothing.
    #[inline(always)]
    pub(crate) fn ahead_bytes(&self) -> usize {
        match self {
            Self::Ranks(_) if fetches_by_itself(size_of::<P>()) => 0,
            _ => prefetch_bytes(size_of::<P>()),
        }
    }

    #[inline(always)]
    pub(crate) fn elements(&mut self, elements: Range<usize>) -> &[P] {
        match self {
            Self::Here(list) => &list[elements],
            Self::Ranks(ranks) => bytemuck::cast_slice(ranks.gradients(elements)),
        }
    }
}

/// Gives all ranks the new values of the elements from `start` on.
#[inline(always)]
pub(crate) fn give_ranks<P: Pod, M: Pod, S: Pod>(
    ranks: &mut dyn AcrossRanks,
    start: usize,
    (param, master): (&[P], &[M]),
    state: &[&[S]],
) {
    ranks.updated(0, start, bytemuck::cast_slice(param));
    for (list, state) in state.iter().enumerate() {
        ranks.updated(2 + list, start, bytemuck::cast_slice(state));
    }
    if size_of::<M>() > 0 {
        ranks.updated(2 + state.len(), start, bytemuck::cast_slice(master));
    }
}

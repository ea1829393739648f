//! Small tensors of a launch, shared out among the threads: each thread borrows its own, one after
//! the other.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fusestep_launch::{BackendError, HostList, MAX_LISTS, MultiTensorKernel};
use fusestep_simd::Split;

use super::{BorrowedCall, BorrowedPiece, Lend, PARTS_PER_THREAD, take_bytes};
use crate::param_sums::ParamSums;
use crate::tensors::Tensors;
use crate::update_sums::Rows;

/// The small tensors among consecutive tensors of a launch.
pub(super) struct SmallPieces<'a> {
    pub(super) call: &'a BorrowedCall<'a>,
    pub(super) tensors: Tensors<'a>,
    /// Element count from which on tensors are large.
    pub(super) large: u64,
    pub(super) offsets: &'a [u64],
    pub(super) members: &'a [u32],
    /// The kept lists from storage element `first` on.
    pub(super) lists: [HostList<'a>; MAX_LISTS],
    pub(super) first: u64,
    /// Elements of the small tensors.
    pub(super) elements: u64,
    pub(super) lend: Lend<'a>,
    pub(super) error: &'a Mutex<Option<BackendError>>,
    pub(super) sums: Option<&'a ParamSums>,
    /// Rows of sums for the chunks from storage element `first` on.
    pub(super) rows: Option<Rows<'a>>,
}

impl Split for SmallPieces<'_> {
    const PARTS_PER_THREAD: usize = PARTS_PER_THREAD;

    fn elements(&self) -> u64 {
        self.elements
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut rest, mut taken, mut end) = (self.tensors, 0, self.first);
        while taken < elements {
            let Some(whole) = rest.next() else {
                break;
            };
            taken += if whole.is_large(self.large) { 0 } else { whole.numel };
            end = whole.span(self.offsets).end;
        }
        let (left, right) = cut(self.lists, self.call.kernel, self.first..end);
        let (left_rows, right_rows) = match self.rows {
            Some(rows) => {
                let (left, right) = rows.cut(self.offsets, end);
                (Some(left), Some(right))
            }
            None => (None, None),
        };
        let right = SmallPieces {
            tensors: rest,
            lists: right,
            first: end,
            elements: self.elements - taken,
            rows: right_rows,
            ..self
        };
        let left = SmallPieces {
            tensors: self.tensors.before(rest),
            lists: left,
            first: self.first,
            elements: taken,
            rows: left_rows,
            ..right
        };
        (left, right)
    }

    fn run(self) {
        let mut lists = self.lists;
        let mut first = self.first;
        let mut rows = self.rows;
        let are_all_lent = lists.iter().all(|list| matches!(list, HostList::Absent));
        for whole in self.tensors {
            if whole.is_large(self.large) {
                continue;
            }
            let mut kept: [HostList<'_>; MAX_LISTS] = Default::default();
            if !are_all_lent {
                let elements = whole.span(self.offsets);
                let declared = self.call.kernel.lists();
                for ((own, rest), declared) in kept.iter_mut().zip(&mut lists).zip(declared) {
                    let stride = declared.stride();
                    let before = stride.between(first..elements.start);
                    *own = take_bytes(rest, before, stride.between(elements.clone()));
                }
                first = elements.end;
            }
            let borrowed = (self.lend)(BorrowedPiece {
                call: self.call,
                whole,
                parameter: self.members[whole.tensor as usize],
                lists: kept,
                pool: None,
                cached: whole.cached(self.sums),
                update_sums: whole.update_sums(&mut rows),
            });
            if let Err(error) = borrowed {
                let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                return;
            }
        }
    }
}

/// Cuts all lists behind these elements of the storage, with which they begin.
fn cut<'a>(
    mut lists: [HostList<'a>; MAX_LISTS],
    kernel: &dyn MultiTensorKernel,
    elements: Range<u64>,
) -> ([HostList<'a>; MAX_LISTS], [HostList<'a>; MAX_LISTS]) {
    let mut right: [HostList<'a>; MAX_LISTS] = Default::default();
    for ((list, rest), declared) in lists.iter_mut().zip(&mut right).zip(kernel.lists()) {
        let len_bytes = declared.stride().between(elements.clone());
        (*list, *rest) = std::mem::take(list).split_at(len_bytes);
    }
    (lists, right)
}

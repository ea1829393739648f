//! Reduction and update in one pass over the memory of all ranks.
//!
//! ```text
//! g ← average over ranks of their gradients      in rank order, into a cache
//! p, state ← update(p, state, g)                 this rank's own
//! p of every other rank ← p                      past the caches
//! ```
//!
//! Reduction, update and copies as passes of their own move every average three times and every
//! parameter once more. Here a block of some kilobytes goes through all three before the next one.

use std::ops::Range;

use fusestep_collective::{Ranks, ReduceOp, reduce_in_rank_order};
use fusestep_launch::{
    BackendError, Batch, Gate, HostCall, HostList, HostSpans, Launch, MAX_LISTS, MultiTensorKernel,
    Places, Replicas,
};
use fusestep_simd::{Level, Split, copy_streaming};
use fusestep_tensor::{DType, Role};
use smallvec::SmallVec;

use crate::backend::{NAME, gate, host_call, out_of_bounds};
use crate::pieces::CUT_ELEMENTS;
use crate::window::{covered, place, window};

/// Bytes of a block's averages. They go from the reduction to the update through the second-level
/// cache: blocks of 4 KiB stay in the first one and take a tenth longer, since at every change
/// between reduction, update and copy the memory has less to do.
const BLOCK_BYTES: usize = 32 << 10;

/// Replicas of fewer bytes of parameters may stay in the caches, where their ranks find them.
const CACHED_BYTES: usize = 1 << 20;

/// The averages of a block, in memory that begins with a cache line.
#[repr(align(64))]
struct Averages([u64; BLOCK_BYTES / size_of::<u64>()]);

/// Ranks whose slices need no memory of the allocator.
const INLINE_RANKS: usize = 16;

/// The part of a launch whose elements lie in `first..end` of the storage.
pub(crate) struct ReducedPieces<'a> {
    kernel: &'a dyn MultiTensorKernel,
    call: HostCall<'a>,
    batches: &'a [Batch],
    places: Places<'a>,
    /// Each list's elements `first..end`, this rank's parameters among them; the gradients are
    /// absent.
    lists: [HostList<'a>; MAX_LISTS],
    /// Bytes of one element of each list.
    widths: [usize; MAX_LISTS],
    param: usize,
    grad: usize,
    dtype: DType,
    /// Each rank's gradients from `first` on.
    grads: SmallVec<[&'a [u8]; INLINE_RANKS]>,
    /// The other ranks' parameters `first..end`.
    others: SmallVec<[&'a mut [u8]; INLINE_RANKS]>,
    /// Whether they are written past the caches.
    streaming: bool,
    first: u64,
    end: u64,
}

impl<'a> ReducedPieces<'a> {
    /// All of a launch; `None` if the control block stops the step.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a kernel that takes sums over tensors and for sums over what
    /// is changed, neither of which has a place in one pass; [`BackendError::OutOfBounds`] if a list
    /// or a rank's slice does not hold all that the batches cover.
    pub(crate) fn new<'l: 'a, 'r: 'a>(
        launch: Launch<'l>,
        replicas: Replicas<'r, '_>,
        level: Level,
    ) -> Result<Option<Self>, BackendError> {
        check(&launch, &replicas)?;
        let Gate::Open(grad_factor) = gate(&launch)? else {
            return Ok(None);
        };
        let (kernel, call) = (launch.kernel, host_call(level, &launch, grad_factor));
        let (batches, offsets, firsts) = (launch.batches, launch.offsets, launch.firsts);
        let elements = covered(batches, offsets);
        let (param, grad) = (
            position(kernel, Role::Param)?,
            position(kernel, Role::Grad)?,
        );
        let widths = widths(kernel);
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        for (index, buffer) in launch.lists.iter_mut().enumerate() {
            if index != param && index != grad {
                let first = firsts.get(index).copied().unwrap_or(0);
                lists[index] = window(buffer, first, &elements)?;
            }
        }
        let within = |len_bytes, width| place(&elements, replicas.first, width, len_bytes);
        let mut grads = SmallVec::new();
        for &bytes in replicas.grads {
            grads.push(&bytes[within(bytes.len(), widths[grad])?]);
        }
        let mut others = SmallVec::new();
        for (rank, bytes) in replicas.params.iter_mut().enumerate() {
            let own = within(bytes.len(), widths[param])?;
            let own = &mut bytes[own];
            if rank == replicas.rank {
                lists[param] = HostList::ReadWrite(own);
            } else {
                others.push(own);
            }
        }
        let len_bytes = (elements.end - elements.start) as usize * widths[param];
        Ok(Some(Self {
            kernel,
            call,
            batches,
            places: Places {
                offsets,
                members: launch.members,
            },
            lists,
            widths,
            param,
            grad,
            dtype: kernel.lists()[grad].dtype,
            grads,
            others,
            streaming: len_bytes >= CACHED_BYTES,
            first: elements.start,
            end: elements.end,
        }))
    }

    /// One block: what of the batches lies in `elements` of the storage.
    fn block(&mut self, elements: Range<u64>, spans: HostSpans<'_>, averages: &mut Averages) {
        let within = |width: usize| {
            // The lists lie in memory, so their element counts fit a usize.
            let start = (elements.start - self.first) as usize * width;
            start..start + (elements.end - elements.start) as usize * width
        };
        let bytes = within(self.widths[self.grad]);
        let averages: &mut [u8] = bytemuck::cast_slice_mut(&mut averages.0);
        let averages = &mut averages[..bytes.len()];
        let mut ranks = Block {
            grads: &self.grads,
            share_bytes: (self.end - self.first) as usize * self.widths[self.grad],
            first: bytes.start,
            averages,
        };
        let (level, len_bytes) = (self.call.level, bytes.len());
        reduce_in_rank_order(level, self.dtype, ReduceOp::Average, len_bytes, &mut ranks);
        let mut lists: [HostList<'_>; MAX_LISTS] = Default::default();
        for ((part, list), width) in lists.iter_mut().zip(&mut self.lists).zip(self.widths) {
            *part = list.part(match list {
                HostList::Absent => 0..0,
                _ => within(width),
            });
        }
        lists[self.grad] = HostList::Read(averages);
        self.kernel.run_host(self.call, lists, spans.clone());
        let width = self.widths[self.param];
        let own = &self.lists[self.param].bytes()[within(width)];
        let start = within(width).start;
        for span in spans {
            let of_span = span.start * width..(span.start + span.numel) * width;
            let updated = &own[of_span.clone()];
            for other in &mut self.others {
                let other = &mut other[start + of_span.start..start + of_span.end];
                if self.streaming {
                    copy_streaming(level, other, updated);
                } else {
                    other.copy_from_slice(updated);
                }
            }
        }
    }
}

impl Split for ReducedPieces<'_> {
    fn elements(&self) -> u64 {
        self.end - self.first
    }

    fn split(mut self, elements: u64) -> (Self, Self) {
        let at = (self.first + elements).next_multiple_of(CUT_ELEMENTS);
        let at = at.clamp(self.first, self.end);
        let numel = (at - self.first) as usize;
        let mut right_lists: [HostList<'_>; MAX_LISTS] = Default::default();
        for ((list, right), width) in self.lists.iter_mut().zip(&mut right_lists).zip(self.widths) {
            (*list, *right) = std::mem::take(list).split_at(numel * width);
        }
        let at_grad = numel * self.widths[self.grad];
        let right_grads = self.grads.iter().map(|grads| &grads[at_grad..]).collect();
        let at_param = numel * self.widths[self.param];
        let mut right_others = SmallVec::new();
        for other in &mut self.others {
            let (left, right) = std::mem::take(other).split_at_mut(at_param);
            *other = left;
            right_others.push(right);
        }
        let right = Self {
            lists: right_lists,
            grads: right_grads,
            others: right_others,
            first: at,
            ..self
        };
        let left = Self {
            lists: self.lists,
            grads: self.grads,
            others: self.others,
            first: self.first,
            end: at,
            ..right
        };
        (left, right)
    }

    fn run(mut self) {
        let mut averages = Averages([0; _]);
        let block = (BLOCK_BYTES / self.widths[self.grad].max(1)) as u64;
        let mut at = self.first;
        while at < self.end {
            let end = (at + 1).next_multiple_of(block).min(self.end);
            let spans = HostSpans::of(self.batches, self.places, at, end);
            if spans.clone().next().is_some() {
                self.block(at..end, spans, &mut averages);
                at = end;
                continue;
            }
            // Nothing of the batches: what comes next may be far away.
            let mut rest = HostSpans::of(self.batches, self.places, at, self.end);
            let Some(next) = rest.next() else { return };
            at += next.start as u64;
        }
    }
}

/// What is reduced for a block: the same bytes of every rank's gradients.
struct Block<'a> {
    grads: &'a [&'a [u8]],
    /// Bytes of all blocks that this thread reduces one after the other.
    share_bytes: usize,
    /// The block's first byte.
    first: usize,
    averages: &'a mut [u8],
}

impl Ranks for Block<'_> {
    #[inline(always)]
    fn world_size(&self) -> usize {
        self.grads.len()
    }

    #[inline(always)]
    fn share_bytes(&self) -> usize {
        self.share_bytes
    }

    #[inline(always)]
    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8] {
        &self.grads[rank][self.first + bytes.start..self.first + bytes.end]
    }

    #[inline(always)]
    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        self.averages[bytes].copy_from_slice(result);
    }
}

/// Refuses what has no place in one pass, and a rank that is none of the replicas.
fn check(launch: &Launch<'_>, replicas: &Replicas<'_, '_>) -> Result<(), BackendError> {
    let refuse = |reason: String| {
        Err(BackendError::Unavailable {
            backend: NAME,
            reason,
        })
    };
    let entry = launch.kernel.entry();
    if launch.kernel.normed().is_some() {
        return refuse(format!(
            "expected a kernel without sums over tensors to reduce and update in one pass, \
             found `{entry}`; reduce first and update then"
        ));
    }
    if launch.update_sums.is_some() {
        return refuse(format!(
            "`{entry}`: expected no sums over what is changed where reduction and update are one \
             pass; reduce first and update then"
        ));
    }
    let (ranks, found) = (replicas.grads.len(), replicas.params.len());
    if ranks != found || replicas.rank >= ranks {
        return refuse(format!(
            "expected the parameters of {ranks} ranks, found those of {found}, as seen by rank {}",
            replicas.rank
        ));
    }
    if launch.lists.len() < launch.kernel.lists().len() {
        let expected = launch.kernel.lists().len();
        return Err(out_of_bounds(0, expected, launch.lists.len()));
    }
    Ok(())
}

/// Where a kernel has the list of this role.
fn position(kernel: &dyn MultiTensorKernel, role: Role) -> Result<usize, BackendError> {
    let position = kernel.lists().iter().position(|list| list.role == role);
    position.ok_or_else(|| BackendError::Unavailable {
        backend: NAME,
        reason: format!(
            "`{}`: expected a list of {role:?}, found none",
            kernel.entry()
        ),
    })
}

/// Bytes of one element of each list.
fn widths(kernel: &dyn MultiTensorKernel) -> [usize; MAX_LISTS] {
    let mut widths = [0; MAX_LISTS];
    for (width, list) in widths.iter_mut().zip(kernel.lists()) {
        *width = list.dtype.len_bytes();
    }
    widths
}

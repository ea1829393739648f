//! Reduction and update in one pass over the memory of all ranks.
//!
//! ```text
//! g ← average over ranks of their gradients      in rank order, in the nearest cache
//! p, state ← update(p, state, g)                 this rank's own
//! p of every other rank ← p                      past the caches; at ZeRO stage 0 the state, too
//! ```
//!
//! As separate passes, reduction, update and copies would move every average three times and every
//! parameter once more. Here half a kilobyte goes through all three before the next one. The
//! update's own loop asks for averages ([`AcrossRanks`]) and hands over the new values.

use std::ops::Range;

use fusestep_collective::{
    Divisor, FIRST_TREE, Ranks, ReduceOp, TreeOrder, WaitingSums, merges_of_ranks,
    reduce_along_tree, reduce_in_rank_order,
};
use fusestep_launch::{
    ACROSS_BYTES, AcrossRanks, BackendError, Batch, Gate, HostCall, HostList, HostRun, HostSpans,
    Launch, MAX_LISTS, MultiTensorKernel, Places, Replicas, Stride, SumsOfRanks,
};
use fusestep_simd::{Level, Split, StreamingCopies, streaming};
use fusestep_tensor::{DType, Role};
use smallvec::SmallVec;

use crate::call::{gate, host_call};
use crate::errors::NAME;
use crate::pieces::CUT_ELEMENTS;
use crate::window::{covered, place, window};

/// Least bytes of parameters whose replicas are written past the caches; smaller replicas may stay
/// there, where their ranks find them.
const CACHED_BYTES: usize = 1 << 20;

/// The averages of a block, in memory that begins with a cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Averages([u8; ACROSS_BYTES]);

/// Most ranks whose slices fit without memory of the allocator.
const INLINE_RANKS: usize = 16;

/// Most replicas of a list that fit without memory of the allocator.
const INLINE_REPLICAS: usize = 3;

/// Part of a launch with the elements `first..end` of the storage.
pub(crate) struct ReducedPieces<'a> {
    kernel: &'a dyn MultiTensorKernel,
    call: HostCall<'a>,
    batches: &'a [Batch],
    places: Places<'a>,
    /// Elements `first..end` of each list, this rank's parameters among them; the gradients are
    /// absent.
    lists: [HostList<'a>; MAX_LISTS],
    /// The way in which elements lie in each list.
    strides: [Stride; MAX_LISTS],
    grad: usize,
    dtype: DType,
    /// The reduction of gradients, unless there is an order.
    op: ReduceOp,
    /// The order in which gradients are added along a tree of sums, and what their sum is divided
    /// by.
    order: Option<Along>,
    /// Gradients of each rank, or each sum that ranks bring, from `first` on.
    grads: SmallVec<[&'a [u8]; INLINE_RANKS]>,
    /// Replicas of the other ranks for each list, `first..end`.
    others: [SmallVec<[&'a mut [u8]; INLINE_REPLICAS]>; MAX_LISTS],
    /// Whether the replicas are written past the caches.
    is_streaming: bool,
    first: u64,
    end: u64,
}

impl<'a> ReducedPieces<'a> {
    /// All elements of a launch; `None` if the control block stops the step.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a kernel that takes sums over tensors, and for sums over
    /// changes: one pass has no place for either. [`BackendError::OutOfBounds`] if a list or a
    /// rank's slice is shorter than the batches need.
    pub(crate) fn new<'l: 'a, 'r: 'a, 'c: 'a>(
        launch: Launch<'l>,
        replicas: Replicas<'r, '_, 'c>,
        level: Level,
    ) -> Result<Option<Self>, BackendError> {
        check(&launch, &replicas)?;
        let Gate::Open(grad_factor) = gate(&launch)? else {
            return Ok(None);
        };
        let (kernel, call) = (launch.kernel, host_call(level, &launch, grad_factor));
        let (batches, offsets, firsts) = (launch.batches, launch.offsets, launch.firsts);
        let elements = covered(batches, offsets);
        let grad = position(kernel, Role::Grad)?;
        let order = Along::of(&replicas);
        let strides = strides(kernel);
        let within = |len_bytes, stride| place(&elements, replicas.first, stride, len_bytes);
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        let mut others: [SmallVec<_>; MAX_LISTS] = Default::default();
        for replicated in replicas.lists {
            let index = replicated.list;
            for (rank, bytes) in replicated.ranks.iter_mut().enumerate() {
                let part = within(bytes.len(), strides[index])?;
                let part = &mut bytes[part];
                if rank == replicas.rank {
                    lists[index] = HostList::ReadWrite(part);
                } else {
                    others[index].push(part);
                }
            }
        }
        for (index, buffer) in launch.lists.iter_mut().enumerate() {
            if index != grad && matches!(lists[index], HostList::Absent) {
                let first = firsts.get(index).copied().unwrap_or(0);
                lists[index] = window(buffer, first, &elements)?;
            }
        }
        let mut grads = SmallVec::new();
        for &bytes in replicas.grads {
            grads.push(&bytes[within(bytes.len(), strides[grad])?]);
        }
        let len_bytes = strides[0].len_bytes((elements.end - elements.start) as usize);
        Ok(Some(Self {
            kernel,
            call,
            batches,
            places: Places { offsets, members: launch.members },
            lists,
            strides,
            grad,
            dtype: kernel.lists()[grad].dtype,
            op: op_of(replicas.sums),
            order,
            grads,
            others,
            is_streaming: len_bytes >= CACHED_BYTES,
            first: elements.start,
            end: elements.end,
        }))
    }
}

/// The reduction of what ranks bring, one sum each.
fn op_of(sums: SumsOfRanks<'_>) -> ReduceOp {
    match sums {
        SumsOfRanks::Tree(divisor) | SumsOfRanks::Along { divisor, .. } => {
            ReduceOp::Tree(Divisor::of(divisor))
        }
        SumsOfRanks::Average => ReduceOp::Average,
    }
}

/// Sums along a tree.
#[derive(Clone)]
struct Along {
    divisor: Divisor,
    merges: SmallVec<[usize; INLINE_RANKS]>,
}

impl Along {
    fn of(replicas: &Replicas<'_, '_, '_>) -> Option<Self> {
        let (divisor, merges) = match replicas.sums {
            SumsOfRanks::Average => return None,
            // Few ranks are added in registers.
            SumsOfRanks::Tree(_) if replicas.grads.len() < FIRST_TREE => return None,
            SumsOfRanks::Tree(divisor) => (divisor, merges_of_ranks(replicas.grads.len())),
            SumsOfRanks::Along { divisor, merges } => (divisor, merges.iter().copied().collect()),
        };
        Some(Self { divisor: Divisor::of(divisor), merges })
    }

    fn order(&self) -> TreeOrder<'_> {
        TreeOrder { divisor: self.divisor, merges: &self.merges }
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
        let (strides, order) = (self.strides, self.order.take());
        for ((list, right), stride) in self.lists.iter_mut().zip(&mut right_lists).zip(strides) {
            (*list, *right) = std::mem::take(list).split_at(stride.len_bytes(numel));
        }
        let at_grad = strides[self.grad].len_bytes(numel);
        let right_grads = self.grads.iter().map(|grads| &grads[at_grad..]).collect();
        let mut right_others: [SmallVec<_>; MAX_LISTS] = Default::default();
        let rights = right_others.iter_mut().zip(strides);
        for (others, (rights, stride)) in self.others.iter_mut().zip(rights) {
            for other in others {
                let (left, right) = std::mem::take(other).split_at_mut(stride.len_bytes(numel));
                *other = left;
                rights.push(right);
            }
        }
        let right = Self {
            lists: right_lists,
            grads: right_grads,
            others: right_others,
            first: at,
            order: order.clone(),
            ..self
        };
        let left = Self {
            lists: self.lists,
            grads: self.grads,
            others: self.others,
            first: self.first,
            end: at,
            order,
            ..right
        };
        (left, right)
    }

    fn run(mut self) {
        let spans = HostSpans::of(self.batches, self.places, self.first, self.end);
        let (kernel, call) = (self.kernel, self.call);
        streaming(call.level, |copies| {
            let mut across = Across {
                level: call.level,
                dtype: self.dtype,
                op: self.op,
                order: self.order.as_ref().map(Along::order),
                waiting: WaitingSums::default(),
                grads: &self.grads,
                others: &mut self.others,
                strides: self.strides,
                grad: self.grad,
                copies: self.is_streaming.then_some(copies),
                averages: Averages([0; _]),
            };
            let mut lists = self.lists;
            kernel.run_host(HostRun {
                across: Some(&mut across),
                ..HostRun::new(call, &mut lists, spans)
            });
        });
    }
}

/// The other ranks, as the loop of an update reaches them.
#[derive(Debug)]
struct Across<'a, 'b> {
    level: Level,
    dtype: DType,
    op: ReduceOp,
    order: Option<TreeOrder<'a>>,
    waiting: WaitingSums,
    grads: &'a [&'b [u8]],
    others: &'a mut [SmallVec<[&'b mut [u8]; INLINE_REPLICAS]>; MAX_LISTS],
    strides: [Stride; MAX_LISTS],
    grad: usize,
    /// Copies past the caches, if replicas are written so.
    copies: Option<&'a StreamingCopies>,
    averages: Averages,
}

impl AcrossRanks for Across<'_, '_> {
    fn gradients(&mut self, elements: Range<usize>) -> &[u8] {
        let stride = self.strides[self.grad];
        let averages = &mut self.averages.0[..stride.len_bytes(elements.len())];
        let len_bytes = averages.len();
        let mut block =
            Block { grads: self.grads, first: stride.len_bytes(elements.start), averages };
        let (level, dtype) = (self.level, self.dtype);
        match self.order {
            Some(order) => {
                let waiting = &mut self.waiting;
                reduce_along_tree(level, dtype, order, waiting, len_bytes, &mut block);
            }
            None => {
                reduce_in_rank_order(level, dtype, self.op, len_bytes, &mut block);
            }
        }
        block.averages
    }

    fn updated(&mut self, list: usize, start: usize, values: &[u8]) {
        let start = self.strides[list].len_bytes(start);
        for other in &mut self.others[list] {
            let other = &mut other[start..start + values.len()];
            match self.copies {
                Some(copies) => copies.copy(other, values),
                None => other.copy_from_slice(values),
            }
        }
    }
}

/// Inputs of a block's reduction: the same bytes of every rank's gradients.
struct Block<'a> {
    grads: &'a [&'a [u8]],
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
        self.grads.first().map_or(0, |grads| grads.len())
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

/// Refuses launches that cannot be done in one pass, and a rank that is not among the replicas.
fn check(launch: &Launch<'_>, replicas: &Replicas<'_, '_, '_>) -> Result<(), BackendError> {
    let refuse = |reason: String| Err(BackendError::Unavailable { backend: NAME, reason });
    let entry = launch.kernel.entry();
    if launch.kernel.normed().is_some() {
        return refuse(format!(
            "expected a kernel without sums over tensors to reduce and update in one pass, found \
             `{entry}`; reduce first and update then"
        ));
    }
    if launch.update_sums.is_some() {
        return refuse(format!(
            "`{entry}`: expected no sums over what is changed where reduction and update are one \
             pass; reduce first and update then"
        ));
    }
    let ranks = match (replicas.sums, replicas.lists.first()) {
        (SumsOfRanks::Along { merges, .. }, Some(list)) => {
            let sums = replicas.grads.len();
            if merges.len() != sums || !leave_one(merges) {
                return refuse(format!(
                    "expected {sums} numbers of left neighbours, after which one sum is left, \
                     found {merges:?}"
                ));
            }
            list.ranks.len()
        }
        _ => replicas.grads.len(),
    };
    let found = replicas.lists.iter().map(|list| list.ranks.len());
    let found = found.chain([ranks]).find(|&found| found != ranks);
    if found.is_some() || replicas.rank >= ranks {
        return refuse(format!(
            "expected replicas of {ranks} ranks, found those of {}, as seen by rank {}",
            found.unwrap_or(ranks),
            replicas.rank
        ));
    }
    if let Some(list) = replicas.lists.iter().find(|list| list.list >= MAX_LISTS) {
        return refuse(format!(
            "expected replicas of one of {MAX_LISTS} lists, found list {}",
            list.list
        ));
    }
    if launch.lists.len() < launch.kernel.lists().len() {
        return refuse(format!(
            "`{entry}`: expected {} lists of tensors, found {}",
            launch.kernel.lists().len(),
            launch.lists.len()
        ));
    }
    Ok(())
}

/// Whether sums that are added so end as one, and none is added that is not there.
fn leave_one(merges: &[usize]) -> bool {
    let held =
        merges.iter().try_fold(0, |held: usize, merges| Some(held.checked_sub(*merges)? + 1));
    held == Some(1)
}

/// The position of a role's list among the kernel's lists.
fn position(kernel: &dyn MultiTensorKernel, role: Role) -> Result<usize, BackendError> {
    let position = kernel.lists().iter().position(|list| list.role == role);
    position.ok_or_else(|| BackendError::Unavailable {
        backend: NAME,
        reason: format!("`{}`: expected a list of {role:?}, found none", kernel.entry()),
    })
}

/// The way in which elements lie in each list.
fn strides(kernel: &dyn MultiTensorKernel) -> [Stride; MAX_LISTS] {
    let mut strides = [Stride::default(); MAX_LISTS];
    for (stride, list) in strides.iter_mut().zip(kernel.lists()) {
        *stride = list.stride();
    }
    strides
}

//! Launches that go tensor by tensor: those whose parameters and gradients a framework keeps and lends, and those of kernels that
//! take sums over a tensor before they update it.
//!
//! A framework guards each tensor with its own lock. So a thread holds one tensor at a time: a large tensor is lent once and the
//! whole team works on it; small ones are shared out and each thread borrows its own, one after the other. A kernel that takes sums
//! profits from the same order: a small tensor stays in its thread's cache between sums and update, a large one in the shared cache.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use fusestep_elementwise::{Carried, Tensor, step_tensor};
use fusestep_launch::{
    Backend, BackendError, Batch, Buffer, Gate, HostCall, HostList, Launch, LaunchReport,
    ListBuffer, MAX_LISTS, MultiTensorKernel, Outcome, Record, SquareSum, UnitSums,
};
use fusestep_simd::{Split, Team};
use fusestep_tensor::Role;

use crate::CpuBackend;
use crate::backend::gate;
use crate::carried::ParamSums;
use crate::update_sums::{Slots, slots};

/// Below this many elements the team never works on one tensor together: waking it costs more than it saves.
const LARGE_ELEMENTS: u64 = 128 * 1024;

/// A tensor of more than a thread's work divided by this would leave the other threads waiting for its own at the end. What the team
/// does together costs two hand-overs, at which all wait for the last: with 16 here LARS took a tenth longer on ResNet-50.
const TENSORS_PER_THREAD: u64 = 5;

/// Parts that small tensors are cut into for each thread, on the boundaries of tensors.
pub(crate) const PARTS_PER_THREAD: usize = 32;

/// Lends one tensor: calls [`LentPiece::update`] with its parameter and gradient. It is called from any thread of the team, on one
/// thread never for two tensors at once.
pub type Lend<'a> = &'a (dyn Fn(LentPiece<'_>) -> Result<(), BackendError> + Sync);

/// A tensor whose state is at hand and whose parameter and gradient are to be lent, if they are not at hand as well.
pub struct LentPiece<'a> {
    call: LentCall<'a>,
    whole: Whole,
    /// The tensor's position among the caller's parameters.
    parameter: u32,
    /// The kernel's lists; those to be lent are absent.
    lists: [HostList<'a>; MAX_LISTS],
    /// The team, if the tensor is worth its while.
    team: Option<&'a Team>,
    carried: Option<Carried<'a>>,
    /// Places for the sums over what the update changes, if they are wanted.
    update_sums: Option<&'a mut [UnitSums]>,
}

/// What is the same for all pieces of a launch.
#[derive(Clone, Copy)]
struct LentCall<'a> {
    kernel: &'a dyn MultiTensorKernel,
    host: HostCall<'a>,
    /// The sums of all parameters' gradients, if they have been taken.
    grad_sums: Option<&'a [SquareSum]>,
    backend: &'static str,
    skipped: &'a AtomicU64,
}

impl CpuBackend {
    /// Runs a launch of a plan whose tensors are lent: `lend` is called once for each tensor, however launches cut it.
    ///
    /// # Errors
    /// The first error of `lend`; [`BackendError::ForeignBuffer`] if the state's memory is not the host's.
    pub fn launch_lent(
        &self,
        launch: Launch<'_>,
        lend: Lend<'_>,
    ) -> Result<LaunchReport, BackendError> {
        self.launch_by_tensor(launch, lend)
    }

    /// Calls `lend` once for each tensor, with the lists that are kept.
    pub(crate) fn launch_by_tensor(
        &self,
        mut launch: Launch<'_>,
        lend: Lend<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let report = LaunchReport::of(launch.batches);
        let backend = self.name();
        let Gate::Open(grad_factor) = gate(&launch)? else {
            return Ok(report);
        };
        let host = HostCall {
            level: self.level(),
            scalars: launch.scalars,
            grad_factor,
            sets: launch.sets,
            changes: None,
        };
        let call = LentCall {
            kernel: launch.kernel,
            host,
            grad_sums: launch.grad_sums.and_then(Buffer::host).and_then(sums_of),
            backend,
            skipped: self.count_skipped(),
        };
        let mut slots = slots(launch.update_sums.take(), launch.offsets)?;
        // Dropped with any error: the next step takes all sums anew.
        let sums = ParamSums::take(&mut launch);
        let tensors = Tensors::new(launch.batches);
        let large = large_elements(tensors, self.team().threads());
        for whole in tensors.filter(|whole| whole.is_large(large)) {
            let elements = whole.span(launch.offsets);
            let lists = lists_of(launch.kernel, launch.lists, Some(elements));
            lend(LentPiece {
                call,
                whole,
                parameter: launch.members[whole.tensor as usize],
                lists: lists.ok_or(BackendError::ForeignBuffer { backend })?,
                team: Some(self.team()),
                carried: whole.carried(sums.as_ref()),
                update_sums: whole.update_sums(&mut slots),
            })?;
        }
        let error = Mutex::new(None);
        let lists = lists_of(launch.kernel, launch.lists, None);
        self.team().run(SmallPieces {
            call,
            tensors,
            large,
            offsets: launch.offsets,
            members: launch.members,
            lists: lists.ok_or(BackendError::ForeignBuffer { backend })?,
            first: 0,
            elements: small_elements(tensors, large),
            lend,
            error: &error,
            sums: sums.as_ref(),
            slots,
        });
        let error = error.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = error {
            return Err(error);
        }
        if let Some(sums) = sums {
            sums.keep(launch.lists);
        }
        Ok(report)
    }
}

impl LentPiece<'_> {
    /// Index of the tensor in its storage.
    pub fn tensor(&self) -> usize {
        self.whole.tensor as usize
    }

    /// Updates the piece's elements of `param`, given whole, from `grad`, given whole.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if one of them is shorter than the tensor; nothing is written then.
    pub fn update(self, param: &mut [u8], grad: &[u8]) -> Result<(), BackendError> {
        let numel = self.whole.numel as usize;
        let check = |width: usize, found: usize| {
            let len_bytes = numel * width;
            if len_bytes <= found {
                return Ok(len_bytes);
            }
            Err(BackendError::OutOfBounds {
                backend: self.call.backend,
                offset_bytes: 0,
                len_bytes,
                found,
            })
        };
        let kernel = self.call.kernel;
        let (mut param, mut grad) = (HostList::ReadWrite(param), HostList::Read(grad));
        let mut lists: [HostList<'_>; MAX_LISTS] = Default::default();
        let declared = kernel.lists().iter();
        for ((list, kept), declared) in lists.iter_mut().zip(self.lists).zip(declared) {
            let width = declared.dtype.len_bytes();
            let lent = match declared.role {
                Role::Param => std::mem::take(&mut param),
                Role::Grad => std::mem::take(&mut grad),
                _ => {
                    *list = kept;
                    continue;
                }
            };
            let len_bytes = check(width, lent.bytes().len())?;
            *list = lent.split_at(len_bytes).0;
        }
        LentPiece { lists, ..self }.run();
        Ok(())
    }

    /// Updates a tensor all of whose lists are at hand.
    pub(crate) fn run(self) {
        let tensor = Tensor {
            kernel: self.call.kernel,
            call: self.call.host,
            class: self.whole.class,
            numel: self.whole.numel as usize,
            parameter: self.parameter,
            first_element: 0,
            lists: self.lists,
            carried: self.carried,
            grad_sum: self.call.grad_sums.and_then(|sums| {
                let own = sums.get(self.parameter as usize)?;
                Some(own.sum)
            }),
            update_sums: self.update_sums,
        };
        if step_tensor(tensor, self.team) == Outcome::Skip {
            self.call.skipped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A tensor of a launch, put together from the records that its batches cut it into.
#[derive(Clone, Copy)]
pub(crate) struct Whole {
    pub(crate) tensor: u32,
    pub(crate) numel: u64,
    class: u32,
}

impl Whole {
    /// Whether the team works on it together, where tensors from `large` elements on are.
    pub(crate) fn is_large(&self, large: u64) -> bool {
        self.numel >= large
    }

    fn carried<'a>(&self, sums: Option<&'a ParamSums>) -> Option<Carried<'a>> {
        sums?.of(self.tensor as usize, self.numel)
    }

    fn update_sums<'a>(&self, slots: &'a mut Option<Slots<'_>>) -> Option<&'a mut [UnitSums]> {
        slots.as_mut()?.of_tensor(self.tensor)
    }

    /// The storage elements of the tensor.
    fn span(&self, offsets: &[u64]) -> Range<usize> {
        // Storages lie in host memory, so their element counts fit a usize.
        let start = offsets[self.tensor as usize] as usize;
        start..start + self.numel as usize
    }
}

/// Memory of sums, which is aligned for them.
fn sums_of(bytes: &[u8]) -> Option<&[SquareSum]> {
    bytemuck::try_cast_slice(bytes).ok()
}

/// The kept lists in the kernel's order, all of them or some elements; `None` if their memory is not the host's.
fn lists_of<'a>(
    kernel: &dyn MultiTensorKernel,
    buffers: &'a mut [ListBuffer],
    elements: Option<Range<usize>>,
) -> Option<[HostList<'a>; MAX_LISTS]> {
    let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
    for buffer in buffers {
        let role = buffer.role();
        let position = kernel.lists().iter().position(|list| list.role == role)?;
        let width = buffer.dtype().len_bytes();
        let bytes = buffer.buffer.host_mut()?;
        let bytes = match &elements {
            Some(elements) => bytes.get_mut(elements.start * width..elements.end * width)?,
            None => bytes,
        };
        lists[position] = HostList::ReadWrite(bytes);
    }
    Some(lists)
}

/// Cuts all lists after so many elements.
fn cut<'a>(
    mut lists: [HostList<'a>; MAX_LISTS],
    kernel: &dyn MultiTensorKernel,
    elements: usize,
) -> ([HostList<'a>; MAX_LISTS], [HostList<'a>; MAX_LISTS]) {
    let mut right: [HostList<'a>; MAX_LISTS] = Default::default();
    for ((list, rest), declared) in lists.iter_mut().zip(&mut right).zip(kernel.lists()) {
        let len_bytes = elements * declared.dtype.len_bytes();
        (*list, *rest) = std::mem::take(list).split_at(len_bytes);
    }
    (lists, right)
}

/// Tensors of consecutive batches, in order.
#[derive(Clone, Copy)]
pub(crate) struct Tensors<'a> {
    batches: &'a [Batch],
    /// Records of the first batch that are already gone.
    gone: usize,
    /// Records there are left, of all batches.
    left: usize,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(batches: &'a [Batch]) -> Self {
        Self {
            batches,
            gone: 0,
            left: batches.iter().map(|batch| batch.records.len()).sum(),
        }
    }

    /// These tensors without those of `rest`, their end.
    pub(crate) fn before(self, rest: Self) -> Self {
        Self {
            left: self.left - rest.left,
            ..self
        }
    }

    fn record(&mut self) -> Option<(&'a Batch, &'a Record)> {
        if self.left == 0 {
            return None;
        }
        loop {
            let (batch, rest) = self.batches.split_first()?;
            if let Some(record) = batch.records.get(self.gone) {
                self.gone += 1;
                self.left -= 1;
                return Some((batch, record));
            }
            self.batches = rest;
            self.gone = 0;
        }
    }
}

impl Iterator for Tensors<'_> {
    type Item = Whole;

    fn next(&mut self) -> Option<Whole> {
        let (batch, record) = self.record()?;
        let mut whole = Whole {
            tensor: record.tensor,
            numel: record.numel,
            class: batch.classes[usize::from(record.set)],
        };
        let mut ahead = *self;
        while let Some((_, more)) = ahead.record()
            && more.tensor == whole.tensor
        {
            whole.numel += more.numel;
            *self = ahead;
        }
        Some(whole)
    }
}

/// The elements from which on the whole team works on one tensor. Smaller ones are one thread's each: nobody waits for another
/// between the sums of a tensor and its update, and there are enough of them to leave no thread without work.
pub(crate) fn large_elements(tensors: Tensors<'_>, threads: usize) -> u64 {
    let total: u64 = tensors.map(|whole| whole.numel).sum();
    (total / (threads as u64 * TENSORS_PER_THREAD)).max(LARGE_ELEMENTS)
}

pub(crate) fn small_elements(tensors: Tensors<'_>, large: u64) -> u64 {
    let small = tensors.filter(|whole| !whole.is_large(large));
    small.map(|whole| whole.numel).sum()
}

/// The small tensors among some tensors of a launch.
struct SmallPieces<'a> {
    call: LentCall<'a>,
    tensors: Tensors<'a>,
    /// Tensors from so many elements on are not small.
    large: u64,
    offsets: &'a [u64],
    members: &'a [u32],
    /// The kept lists from storage element `first` on.
    lists: [HostList<'a>; MAX_LISTS],
    first: usize,
    /// Elements of the small tensors.
    elements: u64,
    lend: Lend<'a>,
    error: &'a Mutex<Option<BackendError>>,
    sums: Option<&'a ParamSums>,
    /// Of the chunks from storage element `first` on.
    slots: Option<Slots<'a>>,
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
            taken += if whole.is_large(self.large) {
                0
            } else {
                whole.numel
            };
            end = whole.span(self.offsets).end;
        }
        let (left, right) = cut(self.lists, self.call.kernel, end - self.first);
        let (left_slots, right_slots) = match self.slots {
            Some(slots) => {
                let (left, right) = slots.cut(self.offsets, end as u64);
                (Some(left), Some(right))
            }
            None => (None, None),
        };
        let right = SmallPieces {
            tensors: rest,
            lists: right,
            first: end,
            elements: self.elements - taken,
            slots: right_slots,
            ..self
        };
        let left = SmallPieces {
            tensors: self.tensors.before(rest),
            lists: left,
            first: self.first,
            elements: taken,
            slots: left_slots,
            ..right
        };
        (left, right)
    }

    fn run(self) {
        let mut lists = self.lists;
        let mut first = self.first;
        let mut slots = self.slots;
        for whole in self.tensors {
            if whole.is_large(self.large) {
                continue;
            }
            let elements = whole.span(self.offsets);
            let (_, from_here) = cut(lists, self.call.kernel, elements.start - first);
            let (kept, rest) = cut(from_here, self.call.kernel, elements.len());
            (lists, first) = (rest, elements.end);
            let lent = (self.lend)(LentPiece {
                call: self.call,
                whole,
                parameter: self.members[whole.tensor as usize],
                lists: kept,
                team: None,
                carried: whole.carried(self.sums),
                update_sums: whole.update_sums(&mut slots),
            });
            if let Err(error) = lent {
                let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                return;
            }
        }
    }
}

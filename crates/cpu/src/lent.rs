//! Launches whose parameters and gradients a framework keeps and lends, tensor by tensor.
//!
//! A framework guards each tensor with its own lock. So a thread holds one tensor at a time: a large tensor is lent once and the
//! whole team works on it; small ones are shared out and each thread borrows its own, one after the other.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fusestep_launch::{
    Backend, BackendError, Batch, Gate, HostCall, HostList, HostSpans, Launch, LaunchReport,
    ListBuffer, MAX_LISTS, MultiTensorKernel, Record,
};
use fusestep_simd::{Split, Team};
use fusestep_tensor::Role;

use crate::CpuBackend;
use crate::backend::gate;
use crate::pieces::CUT_ELEMENTS;

/// From this many elements on the team works on one tensor together: below it, waking the team costs more than it saves.
const LARGE_ELEMENTS: u64 = 128 * 1024;

/// Lends one tensor: calls [`LentPiece::update`] with its parameter and gradient. It is called from any thread of the team, on one
/// thread never for two tensors at once.
pub type Lend<'a> = &'a (dyn Fn(LentPiece<'_>) -> Result<(), BackendError> + Sync);

/// A tensor, or the part of it that one launch takes, whose state is at hand and whose parameter and gradient are to be lent.
pub struct LentPiece<'a> {
    call: LentCall<'a>,
    record: Record,
    /// The tensor's position among the caller's parameters.
    parameter: u32,
    class: u32,
    /// The kernel's lists; those to be lent are absent.
    lists: [HostList<'a>; MAX_LISTS],
    /// The team, if the tensor is worth its while.
    team: Option<&'a Team>,
}

/// What is the same for all pieces of a launch.
#[derive(Clone, Copy)]
struct LentCall<'a> {
    kernel: &'a dyn MultiTensorKernel,
    host: HostCall<'a>,
    backend: &'static str,
}

impl CpuBackend {
    /// Runs a launch of a plan whose tensors are lent: `lend` is called once for each record.
    ///
    /// # Errors
    /// The first error of `lend`; [`BackendError::ForeignBuffer`] if the state's memory is not the host's.
    pub fn launch_lent(
        &self,
        launch: Launch<'_>,
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
        };
        let call = LentCall {
            kernel: launch.kernel,
            host,
            backend,
        };
        for batch in launch.batches {
            for record in batch.records.iter().filter(|record| is_large(record)) {
                let elements = span(launch.offsets, record);
                let lists = lists_of(launch.kernel, launch.lists, Some(elements));
                lend(LentPiece {
                    call,
                    record: *record,
                    parameter: launch.members[record.tensor as usize],
                    class: batch.classes[usize::from(record.set)],
                    lists: lists.ok_or(BackendError::ForeignBuffer { backend })?,
                    team: Some(self.team()),
                })?;
            }
        }
        let error = Mutex::new(None);
        let lists = lists_of(launch.kernel, launch.lists, None);
        self.team().run(SmallPieces {
            call,
            records: Records::new(launch.batches),
            offsets: launch.offsets,
            members: launch.members,
            lists: lists.ok_or(BackendError::ForeignBuffer { backend })?,
            first: 0,
            elements: small_elements(Records::new(launch.batches)),
            lend,
            error: &error,
        });
        let error = error.into_inner().unwrap_or_else(PoisonError::into_inner);
        error.map_or(Ok(report), Err)
    }
}

impl LentPiece<'_> {
    /// Index of the tensor in its storage.
    pub fn tensor(&self) -> usize {
        self.record.tensor as usize
    }

    /// Updates the piece's elements of `param`, given whole, from `grad`, given whole.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if one of them is shorter than the tensor; nothing is written then.
    pub fn update(self, param: &mut [u8], grad: &[u8]) -> Result<(), BackendError> {
        let first = self.record.first_element as usize;
        let elements = first..first + self.record.numel as usize;
        let cut = |width: usize, found: usize| {
            let bytes = elements.start * width..elements.end * width;
            if bytes.end <= found {
                return Ok(bytes);
            }
            Err(BackendError::OutOfBounds {
                backend: self.call.backend,
                offset_bytes: bytes.start,
                len_bytes: bytes.len(),
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
            let bytes = cut(width, len_bytes(&lent))?;
            *list = lent.split_at(bytes.start).1.split_at(bytes.len()).0;
        }
        let piece = Piece {
            kernel,
            host: self.call.host,
            numel: self.record.numel,
            parameter: self.parameter,
            first_element: self.record.first_element,
            class: self.class,
            lists,
        };
        match self.team {
            Some(team) => team.run(piece),
            None => piece.run(),
        }
        Ok(())
    }
}

fn len_bytes(list: &HostList<'_>) -> usize {
    match list {
        HostList::Absent => 0,
        HostList::Read(bytes) => bytes.len(),
        HostList::ReadWrite(bytes) => bytes.len(),
    }
}

fn is_large(record: &Record) -> bool {
    record.numel >= LARGE_ELEMENTS
}

/// The storage elements of a record.
fn span(offsets: &[u64], record: &Record) -> Range<usize> {
    // Storages lie in host memory, so their element counts fit a usize.
    let start = (offsets[record.tensor as usize] + record.first_element) as usize;
    start..start + record.numel as usize
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

/// One tensor in the team's hands.
struct Piece<'a> {
    kernel: &'a dyn MultiTensorKernel,
    host: HostCall<'a>,
    numel: u64,
    /// The tensor's position among the caller's parameters, and its elements before these.
    parameter: u32,
    first_element: u64,
    class: u32,
    lists: [HostList<'a>; MAX_LISTS],
}

impl Split for Piece<'_> {
    fn elements(&self) -> u64 {
        self.numel
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let at = elements.next_multiple_of(CUT_ELEMENTS).min(self.numel);
        let (left, right) = cut(self.lists, self.kernel, at as usize);
        let part = |lists, first, numel| Piece {
            kernel: self.kernel,
            host: self.host,
            parameter: self.parameter,
            first_element: self.first_element + first,
            class: self.class,
            numel,
            lists,
        };
        (part(left, 0, at), part(right, at, self.numel - at))
    }

    fn run(self) {
        let numel = self.numel as usize;
        let spans = HostSpans::part(numel, self.class, self.parameter, self.first_element);
        self.kernel.run_host(self.host, self.lists, spans);
    }
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

/// Records of consecutive batches, in order.
#[derive(Clone, Copy)]
struct Records<'a> {
    batches: &'a [Batch],
    /// Records of the first batch that are already gone.
    gone: usize,
    /// Records there are left, of all batches.
    left: usize,
}

impl<'a> Records<'a> {
    fn new(batches: &'a [Batch]) -> Self {
        Self {
            batches,
            gone: 0,
            left: batches.iter().map(|batch| batch.records.len()).sum(),
        }
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = (&'a Batch, &'a Record);

    fn next(&mut self) -> Option<Self::Item> {
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

fn small_elements(records: Records<'_>) -> u64 {
    let small = records.filter(|(_, record)| !is_large(record));
    small.map(|(_, record)| record.numel).sum()
}

/// The small tensors among some records of a launch.
struct SmallPieces<'a> {
    call: LentCall<'a>,
    records: Records<'a>,
    offsets: &'a [u64],
    members: &'a [u32],
    /// The kept lists from storage element `first` on.
    lists: [HostList<'a>; MAX_LISTS],
    first: usize,
    /// Elements of the small tensors.
    elements: u64,
    lend: Lend<'a>,
    error: &'a Mutex<Option<BackendError>>,
}

impl Split for SmallPieces<'_> {
    fn elements(&self) -> u64 {
        self.elements
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut rest, mut taken, mut end) = (self.records, 0, self.first);
        while taken < elements {
            let Some((_, record)) = rest.next() else {
                break;
            };
            taken += if is_large(record) { 0 } else { record.numel };
            end = span(self.offsets, record).end;
        }
        let (left, right) = cut(self.lists, self.call.kernel, end - self.first);
        let left_records = Records {
            left: self.records.left - rest.left,
            ..self.records
        };
        let left = SmallPieces {
            records: left_records,
            lists: left,
            elements: taken,
            ..self
        };
        let right = SmallPieces {
            records: rest,
            lists: right,
            first: end,
            elements: self.elements - taken,
            ..left
        };
        (left, right)
    }

    fn run(self) {
        let mut lists = self.lists;
        let mut first = self.first;
        for (batch, record) in self.records {
            if is_large(record) {
                continue;
            }
            let elements = span(self.offsets, record);
            let (_, from_here) = cut(lists, self.call.kernel, elements.start - first);
            let (kept, rest) = cut(from_here, self.call.kernel, elements.len());
            (lists, first) = (rest, elements.end);
            let lent = (self.lend)(LentPiece {
                call: self.call,
                record: *record,
                parameter: self.members[record.tensor as usize],
                class: batch.classes[usize::from(record.set)],
                lists: kept,
                team: None,
            });
            if let Err(error) = lent {
                let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                return;
            }
        }
    }
}

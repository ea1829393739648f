//! Launches tensor by tensor. They serve parameters and gradients that a framework keeps and lends,
//! and kernels that take sums over a tensor before they update it.
//!
//! A framework guards each tensor with its own lock, so a thread holds one tensor at a time. A
//! large tensor is borrowed once and the whole pool works on it. Small tensors are shared out, and
//! each thread borrows its own, one after the other. A kernel that takes sums profits from the same
//! order. A small tensor stays in its thread's cache between sums and update, a large one in the
//! shared cache.

mod small_pieces;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use fusestep_elementwise::{Cached, Tensor, step_tensor};
use fusestep_launch::{
    BackendError, Buffer, Gate, HostCall, HostList, HostRun, HostSpans, Launch, LaunchReport,
    ListBuffer, MAX_LISTS, MAX_SUMS, Memory, MultiTensorKernel, Outcome, SquareSum, Stride,
    TensorList, TensorSums, UnitSums,
};
use fusestep_simd::Pool;
use fusestep_tensor::Role;

use crate::CpuBackend;
use crate::call::{gate, host_call};
use crate::errors::{FOREIGN, NAME, out_of_bounds};
use crate::param_sums::ParamSums;
use crate::tensors::{Sizes, Tensors, Whole};
use crate::update_sums::rows;
use crate::window::{covered, window};
use small_pieces::SmallPieces;

/// Number of parts into which small tensors are cut for each thread, on the boundaries of tensors.
pub(crate) const PARTS_PER_THREAD: usize = 32;

/// Function that lends one tensor: it calls [`BorrowedPiece::update`] with the parameter and the
/// gradient. Any thread of the pool may call it, but a thread never calls it for two tensors at
/// once.
pub type Lend<'a> = &'a (dyn Fn(BorrowedPiece<'_>) -> Result<(), BackendError> + Sync);

/// A tensor whose state is at hand; its parameter and gradient are borrowed, unless they are at
/// hand as well.
pub struct BorrowedPiece<'a> {
    call: &'a BorrowedCall<'a>,
    whole: Whole,
    /// The tensor's position among the caller's parameters.
    parameter: u32,
    /// The kernel's lists; lists that are borrowed are absent.
    lists: [HostList<'a>; MAX_LISTS],
    /// The pool, if the tensor is large enough to share it out.
    pool: Option<&'a Pool>,
    cached: Option<Cached<'a>>,
    /// Places for the sums over the changes of the update, if these sums are wanted.
    update_sums: Option<&'a mut [UnitSums]>,
}

/// The data of a launch that all pieces share.
struct BorrowedCall<'a> {
    kernel: &'a dyn MultiTensorKernel,
    host: HostCall<'a>,
    /// The sums of all parameters' gradients, if the step has taken them.
    grad_sums: Option<&'a [SquareSum]>,
    /// The sums over whole tensors of the storage, if the step has taken them.
    tensor_sums: Option<&'a [[f64; MAX_SUMS]]>,
    backend: &'static str,
    skipped: &'a AtomicU64,
}

impl CpuBackend {
    /// Runs a launch of a plan whose tensors are borrowed. `lend` is called once for each tensor,
    /// however launches cut it.
    ///
    /// # Errors
    /// The first error of `lend`; [`BackendError::ForeignBuffer`] if the state's memory is not the
    /// host's.
    pub fn launch_borrowed(
        &self,
        launch: Launch<'_>,
        lend: Lend<'_>,
    ) -> Result<LaunchReport, BackendError> {
        self.launch_by_tensor(launch, lend)
    }

    /// Calls `lend` once for each tensor, with the lists that the plan keeps.
    pub(crate) fn launch_by_tensor(
        &self,
        mut launch: Launch<'_>,
        lend: Lend<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let report = LaunchReport::of(launch.batches);
        let Gate::Open(grad_factor) = gate(&launch)? else {
            return Ok(report);
        };
        let call = &BorrowedCall {
            kernel: launch.kernel,
            host: host_call(self.level(), &launch, grad_factor),
            grad_sums: launch.grad_sums.and_then(Buffer::host).and_then(sums_of),
            tensor_sums: sums_of_host(&launch)?,
            backend: self.name(),
            skipped: self.count_skipped(),
        };
        let (tensors, offsets) = (Tensors::new(launch.batches), launch.offsets);
        let sizes = Sizes::of(tensors, self.pool().threads());
        check_parts(&launch, sizes.part)?;
        let starts = tensors.map(|whole| whole.first_element);
        let mut rows = rows(launch.update_sums.take(), offsets, starts)?;
        // An error drops the sums, and the next step takes them all anew. A launch that has parts
        // of tensors does not use sums over whole tensors.
        let sums = match launch.tensor_sums {
            Some(_) => None,
            None => ParamSums::take(&mut launch),
        };
        for whole in sizes.large_ones(tensors) {
            let span = whole.span(offsets);
            let lists = lists_of(launch.kernel, launch.lists, launch.firsts, &span)?;
            lend(BorrowedPiece {
                call,
                whole,
                parameter: launch.members[whole.tensor as usize],
                lists,
                pool: Some(self.pool()),
                cached: whole.cached(sums.as_ref()),
                update_sums: whole.update_sums(&mut rows),
            })?;
        }
        let error = Mutex::new(None);
        let elements = covered(launch.batches, offsets);
        let lists = lists_of(launch.kernel, launch.lists, launch.firsts, &elements)?;
        self.pool().run(SmallPieces {
            call,
            tensors,
            large: sizes.large,
            offsets,
            members: launch.members,
            lists,
            first: elements.start,
            elements: sizes.small,
            lend,
            error: &error,
            sums: sums.as_ref(),
            rows,
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

impl BorrowedPiece<'_> {
    /// Index of the tensor in its storage.
    pub fn tensor(&self) -> usize {
        self.whole.tensor as usize
    }

    /// Updates this piece's elements of the parameter `param` from the gradient `grad`.
    ///
    /// Both slices are the bytes of whole tensors.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if a slice is shorter than its tensor. Nothing has been
    /// written then.
    pub fn update(self, param: &mut [u8], grad: &[u8]) -> Result<(), BackendError> {
        let (mut param, mut grad) = (HostList::ReadWrite(param), HostList::Read(grad));
        self.update_lists(|_, declared| match declared.role {
            Role::Param => Some(std::mem::take(&mut param)),
            Role::Grad => Some(std::mem::take(&mut grad)),
            _ => None,
        })
    }

    /// [`BorrowedPiece::update`] for a caller that lends state, too. `lend` is called once for each
    /// list of the kernel, in its order. It returns the whole tensor, or `None` for a list that the
    /// plan keeps.
    ///
    /// # Errors
    /// Those of [`BorrowedPiece::update`], for any of the lists.
    #[inline]
    pub fn update_lists<'b>(
        mut self,
        mut lend: impl FnMut(usize, &TensorList) -> Option<HostList<'b>>,
    ) -> Result<(), BackendError>
    where
        Self: 'b,
    {
        let declared = self.call.kernel.lists();
        let mut refused = Ok(());
        // Lists are put into place one by one: a small tensor feels every copy of the whole array.
        let mut lists = std::array::from_fn(|list| {
            let Some(own) = declared.get(list) else {
                return HostList::Absent;
            };
            match lend(list, own) {
                None => std::mem::take(&mut self.lists[list]),
                Some(borrowed) => {
                    let taken = take_part(borrowed, own.stride(), &self.whole);
                    taken.unwrap_or_else(|(offset_bytes, len_bytes, found)| {
                        refused = Err(BackendError::OutOfBounds {
                            backend: self.call.backend,
                            offset_bytes,
                            len_bytes,
                            found,
                        });
                        HostList::Absent
                    })
                }
            }
        });
        refused?;
        self.run_on(&mut lists);
        Ok(())
    }

    /// Updates a tensor that has all its lists at hand.
    pub(crate) fn run(mut self) {
        let mut lists = std::mem::take(&mut self.lists);
        self.run_on(&mut lists);
    }

    #[inline]
    fn run_on<'b>(self, lists: &mut [HostList<'b>; MAX_LISTS])
    where
        Self: 'b,
    {
        let kernel = self.call.kernel;
        if self.pool.is_none() && self.update_sums.is_none() && kernel.normed().is_none() {
            // Most tensors of most models come this way. Their lists are not moved, since small
            // tensors feel the copy.
            let Whole { first_element, numel, group, .. } = self.whole;
            let spans = HostSpans::part(numel as usize, group, self.parameter, first_element);
            return kernel.run_host(HostRun::new(self.call.host, lists, spans));
        }
        let sums = self.call.tensor_sums;
        let tensor = Tensor {
            kernel: self.call.kernel,
            call: self.call.host,
            group: self.whole.group,
            numel: self.whole.numel as usize,
            parameter: self.parameter,
            first_element: self.whole.first_element,
            lists: std::mem::take(lists),
            cached: self.cached,
            grad_sum: self.call.grad_sums.and_then(|sums| {
                let own = sums.get(self.parameter as usize)?;
                Some(own.sum)
            }),
            sums: sums.map(|sums| sums[self.whole.tensor as usize]),
            update_sums: self.update_sums,
        };
        // If several ranks or buckets have parts of a tensor, only the first part counts it.
        let begins = self.whole.first_element == 0;
        if step_tensor(tensor, self.pool) == Outcome::Skip && begins {
            self.call.skipped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The bytes as sums; `None` if they are not aligned for sums.
fn sums_of(bytes: &[u8]) -> Option<&[SquareSum]> {
    bytemuck::try_cast_slice(bytes).ok()
}

/// The sums over whole tensors of a launch, which must be in host memory.
fn sums_of_host<'a>(launch: &Launch<'a>) -> Result<Option<&'a [[f64; MAX_SUMS]]>, BackendError> {
    match launch.tensor_sums {
        None => Ok(None),
        Some(TensorSums::Host(sums)) => Ok(Some(sums)),
        Some(TensorSums::Device(_)) => Err(FOREIGN),
    }
}

/// Refuses fewer sums over whole tensors than there are tensors, and parts of tensors without such
/// sums.
fn check_parts(launch: &Launch<'_>, part: Option<Whole>) -> Result<(), BackendError> {
    if let Some(sums) = sums_of_host(launch)? {
        let len_bytes = launch.members.len() * size_of::<[f64; MAX_SUMS]>();
        if size_of_val(sums) < len_bytes {
            return Err(out_of_bounds(0, len_bytes, size_of_val(sums)));
        }
        return Ok(());
    }
    let Some(part) = part.filter(|_| launch.kernel.normed().is_some()) else {
        return Ok(());
    };
    Err(BackendError::Unavailable {
        backend: NAME,
        reason: format!(
            "`{}`: expected whole tensors or their sums, found tensor {} from element {} on and \
             none; take sums over leaves before",
            launch.kernel.entry(),
            part.tensor,
            part.first_element
        ),
    })
}

/// The given elements of the kept lists, in the kernel's order. `firsts` are those of the launch.
///
/// # Errors
/// [`BackendError::ForeignBuffer`] for a list that the kernel does not have; those of [`window`].
fn lists_of<'a>(
    kernel: &dyn MultiTensorKernel,
    buffers: &'a mut [ListBuffer],
    firsts: &[u64],
    elements: &Range<u64>,
) -> Result<[HostList<'a>; MAX_LISTS], BackendError> {
    let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
    for (index, buffer) in buffers.iter_mut().enumerate() {
        let role = buffer.role();
        let position = kernel.lists().iter().position(|list| list.role == role);
        let first = firsts.get(index).copied().unwrap_or(0);
        lists[position.ok_or(FOREIGN)?] = window(buffer, first, elements)?;
    }
    Ok(lists)
}

/// Takes `len_bytes` bytes off a list, after skipping `before` bytes.
#[inline]
fn take_bytes<'a>(list: &mut HostList<'a>, before: usize, len_bytes: usize) -> HostList<'a> {
    let (_, from_here) = std::mem::take(list).split_at(before);
    let (own, rest) = from_here.split_at(len_bytes);
    *list = rest;
    own
}

/// The part of a whole borrowed tensor that belongs to a launch.
///
/// # Errors
/// The offset and the length of the part, and the length of the tensor, if the tensor is too short
/// for the part.
#[inline]
fn take_part<'a>(
    mut borrowed: HostList<'a>,
    stride: Stride,
    whole: &Whole,
) -> Result<HostList<'a>, (usize, usize, usize)> {
    // Tensors lie in host memory, so their element counts fit a usize.
    let before = stride.len_bytes(whole.first_element as usize);
    let len_bytes = stride.len_bytes(whole.numel as usize);
    let found = borrowed.bytes().len();
    if (before, len_bytes) == (0, found) {
        return Ok(borrowed);
    }
    if before + len_bytes > found {
        return Err((before, len_bytes, found));
    }
    Ok(take_bytes(&mut borrowed, before, len_bytes))
}

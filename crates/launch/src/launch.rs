//! Launches: a kernel, its batches and its memory; and the report of running them.

use crate::{Batch, Buffer, LaunchLimits, ListBuffer, MultiTensorKernel, TensorSums, UpdateSums};

/// A kernel, its batches and the memory they refer to: all that running them takes.
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a dyn MultiTensorKernel,
    /// The batches, one launch each on a device; their records are in storage order and do not
    /// overlap.
    pub batches: &'a [Batch],
    /// First element of each tensor of the storage, the same in every list.
    pub offsets: &'a [u64],
    /// Position of each tensor of the storage among the caller's parameters.
    pub members: &'a [u32],
    /// The kernel's lists, in its order.
    pub lists: &'a mut [ListBuffer],
    /// For each list the element of the storage that its memory begins with; empty if all begin
    /// with element 0. Element `e` of the storage lies at place `e.wrapping_sub(first)`, so
    /// several shards can lie one behind the other in one list. The batches' elements
    /// lie in all lists.
    pub firsts: &'a [u64],
    /// The kernel's scalars.
    pub scalars: &'a [u8],
    /// The [`crate::ControlBlock`] that decides whether anything is written and with which factor
    /// on every gradient; without one everything is, with factor 1.
    pub control: Option<&'a dyn Buffer>,
    /// The [`crate::SquareSum`] of each parameter's gradient, by the position that `members` says,
    /// if the step has read all gradients before: a kernel that needs the same sums
    /// ([`crate::NormedKernel::grad_sum`]) need not read them once more.
    pub grad_sums: Option<&'a dyn Buffer>,
    /// The sums that a kernel with [`crate::NormedKernel`] needs of each tensor, if they have been
    /// taken: the batches hold parts of tensors then, and the sums of a whole tensor come from all
    /// ranks.
    pub tensor_sums: Option<TensorSums<'a>>,
    /// Places for the sums over changes, if they are asked for. If the control block stops the
    /// step, nothing is written there. CUDA writes them in launches from a resident table
    /// ([`crate::Tables::launch_table`]) and refuses other launches with
    /// [`crate::BackendError::Unavailable`].
    pub update_sums: Option<UpdateSums<'a>>,
    /// The kernel's step scalars, group after group.
    pub step_scalars: &'a [u8],
    /// The limits the batches were made with.
    pub limits: LaunchLimits,
}

impl Launch<'_> {
    /// The element of the storage that a list's memory begins with.
    pub fn first(&self, list: usize) -> u64 {
        self.firsts.get(list).copied().unwrap_or(0)
    }
}

/// The memory of all ranks that a launch reduces from and writes to, where ranks see each other's.
#[derive(Debug)]
pub struct Replicas<'a, 'b, 'c> {
    /// This rank.
    pub rank: usize,
    /// The way in which gradients become one.
    pub sums: SumsOfRanks<'c>,
    /// Element of the storage that all these slices begin with; they are of one numel and hold all
    /// elements of the batches.
    pub first: u64,
    /// Each rank's gradients, in rank order; with [`SumsOfRanks::Along`] those of each sum.
    pub grads: &'a [&'b [u8]],
    /// The lists that every rank has a replica of: the parameters, and at ZeRO stage 0 the state.
    pub lists: &'c mut [Replicated<'a, 'b>],
}

/// The way in which gradients of ranks become one.
#[derive(Clone, Copy, Debug)]
pub enum SumsOfRanks<'a> {
    /// Their average, added in rank order.
    Average,
    /// Their sum in one binary tree over the ranks, divided by a number.
    Tree(f64),
    /// The sum of what ranks bring of one tree, some of them more than one part of it.
    Along {
        /// The number that the sum is divided by.
        divisor: f64,
        /// Left neighbours that are added to each part before the next one comes.
        merges: &'a [usize],
    },
}

/// One list of a kernel in the memory of all ranks.
#[derive(Debug)]
pub struct Replicated<'a, 'b> {
    /// The list's position among the kernel's.
    pub list: usize,
    /// Each rank's replica, in rank order, all with the same values.
    pub ranks: &'a mut [&'b mut [u8]],
}

/// The report of running a [`Launch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchReport {
    /// Launches issued.
    pub launches: u64,
    /// Elements updated.
    pub elements: u64,
}

impl LaunchReport {
    /// The report of running these batches one launch each.
    pub fn of(batches: &[Batch]) -> Self {
        Self { launches: batches.len() as u64, elements: batches.iter().map(Batch::elements).sum() }
    }
}

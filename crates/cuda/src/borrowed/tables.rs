//! Argument tables of launches on borrowed tensors, kept in the device's memory.
//!
//! A step whose tensors lie where they lay packs and copies nothing: the device has the addresses,
//! and counts steps and derives step scalars itself, as with the tables of a backend's own memory.
//! What has moved is written again, behind the launches that still read it.
//!
//! ```text
//! eager     steps | table           written where it differs from what the device has
//! recorded  steps ┐ table of its own for each recording, written beside the graph
//!                 └ one count for all of them, so that replays and steps go on from each other
//! ```

use fusestep_launch::{
    BackendError, Batch, GroupValues, Launch, LaunchReport, MultiTensorKernel, Reduce, SquareSum,
    pack_reduction_table_of_tensors, pack_steps, pack_table_of_tensors, resident_step_scalars,
};

use super::kept::{Kept, Table};
use super::{DeviceTensor, LendOnDevice, check_launch, look_up, look_up_gradients};
use crate::backend::CudaBackend;
use crate::checks::check_end;
use crate::recording::aside;
use crate::session::unavailable;
use crate::{NAME, Result, borrowed};

/// Fewest tensors of a launch whose table is kept. The device derives the step scalars of a table
/// by a launch of its own, which takes as long as packing so many records.
const LEAST_TENSORS: usize = 16;

/// The step on borrowed tensors that launches belong to.
#[derive(Clone, Debug, Default)]
pub struct BorrowedStep {
    /// Number of the tensors' places. With the number of the step before no tensor has moved, and
    /// the lender is not asked; 0 is asked about each time.
    pub places: u64,
    /// Whether a framework records the stream, as [`CudaBackend::recorded_on`] says.
    pub is_recorded: bool,
    /// Whether tables are kept for few tensors, too: those of a step that is to be recorded.
    pub keeps_all: bool,
    /// The learning rate of each rule of the plan, an f64 that the device reads at every step and
    /// replay; `None` for a rate that the host has. Missing ones are the host's.
    pub rates: Vec<Option<DeviceTensor>>,
    /// A control block that takes the place of the launches'.
    pub control: Option<DeviceTensor>,
}

/// Tables of the launches of one plan on borrowed tensors, kept from step to step.
///
/// Recorded steps refer to its memory, so it outlives the framework's graphs. Once a step is
/// recorded, later ones have the same parameters and settings, but for the learning rate.
#[derive(Debug, Default)]
pub struct BorrowedTables {
    step: BorrowedStep,
    updates: Tables,
    reads: Tables,
    copied_bytes: u64,
}

/// Tables of one kind, in the order of a step's launches.
#[derive(Debug, Default)]
struct Tables {
    kept: Vec<Option<Kept>>,
    next: usize,
}

impl Tables {
    /// Takes out the table of the step's next launch, which [`Tables::put_back`] puts back.
    fn take(&mut self) -> Option<Kept> {
        if self.kept.len() == self.next {
            self.kept.push(None);
        }
        self.kept[self.next].take()
    }

    fn put_back(&mut self, kept: Option<Kept>) {
        self.kept[self.next] = kept;
        self.next += 1;
    }
}

impl BorrowedTables {
    /// Begins a step, whose launches follow in the order of the plan.
    pub fn begin(&mut self, step: BorrowedStep) {
        self.step = step;
        (self.updates.next, self.reads.next) = (0, 0);
    }

    /// Bytes that were copied to the device for tables until now.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// Whether a step was recorded, so that replays may take steps.
    pub fn is_recorded(&self) -> bool {
        self.updates.kept.iter().flatten().any(Kept::is_recorded)
    }

    /// Takes back the count of the last step, which the control block has skipped.
    pub fn skipped(&mut self) {
        // Those behind were of no launch of it.
        for kept in self.updates.kept[..self.updates.next].iter_mut().flatten() {
            kept.count(|step| step.saturating_sub(1));
        }
    }

    /// Reads how many steps were taken in replays of recorded steps since this was asked last, by
    /// all parameters of them alike; waits for the device.
    ///
    /// # Errors
    /// [`BackendError::Device`].
    pub fn steps_taken(&mut self) -> Result<u64, BackendError> {
        let mut taken = 0;
        for kept in self.updates.kept.iter_mut().flatten().filter(|kept| kept.is_recorded()) {
            taken = kept.steps_taken()?.max(taken);
        }
        Ok(taken)
    }

    /// Enqueues a launch from its table, as [`CudaBackend::launch_borrowed`] does with arguments.
    /// `values` are the groups' hyper-parameters at this step, and `rule` the number of their rule
    /// in the plan.
    ///
    /// # Errors
    /// As [`CudaBackend::launch_borrowed`]; [`BackendError::Unavailable`] for a step unlike those
    /// that were recorded.
    pub fn launch(
        &mut self,
        backend: &CudaBackend,
        launch: Launch<'_>,
        rule: usize,
        values: &[GroupValues],
        lend: LendOnDevice<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let control = match self.step.control {
            Some(control) => control.address(),
            None => backend.control_address(launch.control)?,
        };
        let mut kept = self.updates.take();
        let count: usize = launch.batches.iter().map(|batch| batch.records.len()).sum();
        let is_few = count < LEAST_TENSORS && !self.step.keeps_all && !self.step.is_recorded;
        // Sums that the host has go with arguments.
        let has_sums = launch.tensor_sums.is_some();
        let done = if has_sums || is_few && kept.is_none() {
            borrowed::launch_in_arguments(backend, &launch, control, lend)
        } else {
            let update = Update { rule, values, control };
            self.update(backend, &mut kept, launch, update, lend)
        };
        self.updates.put_back(kept);
        done
    }

    fn update(
        &mut self,
        backend: &CudaBackend,
        place: &mut Option<Kept>,
        mut launch: Launch<'_>,
        of: Update<'_>,
        lend: LendOnDevice<'_>,
    ) -> Result<LaunchReport, BackendError> {
        check_launch(&launch)?;
        let step_scalars = resident_step_scalars(NAME, launch.kernel)?;
        let entry = launch.kernel.entry();
        let fits = place.as_ref().is_some_and(|kept| kept.is_of(entry, launch.batches));
        if !fits {
            refuse_other(entry, place.as_ref())?;
            *place = Some(if self.step.is_recorded {
                aside(backend, || Kept::of_launch(backend, &launch))?
            } else {
                Kept::of_launch(backend, &launch)?
            });
        }
        let Some(kept) = place else { return Ok(LaunchReport::default()) };
        let batch = kept.batch();
        let launch = of_batches(&mut launch, std::slice::from_ref(batch.as_ref()));
        let layout = launch.kernel.argument_layout();
        let mut steps = pack_steps(&step_scalars, layout, &batch, of.values);
        let rate = self.step.rates.get(of.rule).copied().flatten();
        if rate.is_some() {
            kept.keep_rate(&mut steps);
        }
        let (flags, chunk) = (launch.kernel.flags(), launch.limits.chunk_elements);
        let mut head = [flags.to_le_bytes(), chunk.to_le_bytes()].concat();
        head.extend_from_slice(launch.scalars);
        head.extend_from_slice(&of.control.to_le_bytes());
        // Lists that the caller keeps lie where they lay, too.
        for (index, list) in launch.lists.iter().enumerate() {
            head.extend_from_slice(&backend.address(list.buffer.as_ref())?.to_le_bytes());
            head.extend_from_slice(&launch.first(index).to_le_bytes());
        }
        let table = if self.step.is_recorded || !kept.has(self.step.places, &head) {
            let mut tensors = backend.borrowed();
            look_up(backend, &launch, lend, &mut tensors)?;
            let mut bytes = pack_table_of_tensors(&launch, &batch, &tensors, of.control);
            kept.write_workspace(&launch, &mut bytes);
            Some(Table { bytes, layout })
        } else {
            None
        };
        let address = if self.step.is_recorded {
            kept.record(backend, &steps, table)?
        } else {
            self.copied_bytes += kept.refresh(backend, &steps, table)?;
            kept.has_now(self.step.places, head);
            kept.table_address()
        };
        if let Some(rate) = rate {
            kept.take_rate(rate)?;
        }
        let elements = batch.elements();
        let stem = launch.kernel.stem();
        let launches =
            kept.enqueue_update(backend, stem, step_scalars.entry, &names(launch.kernel), address)?;
        if !self.step.is_recorded {
            kept.count(|step| step + 1);
        }
        Ok(LaunchReport { launches, elements })
    }

    /// Enqueues a read of gradients from its table, as [`CudaBackend::reduce_borrowed`] does with
    /// arguments.
    ///
    /// # Errors
    /// As [`CudaBackend::reduce_borrowed`]; as [`BorrowedTables::launch`].
    pub fn reduce(
        &mut self,
        backend: &CudaBackend,
        reduce: Reduce<'_>,
        lend: LendOnDevice<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let mut kept = self.reads.take();
        let count: usize = reduce.batches.iter().map(|batch| batch.records.len()).sum();
        let is_few = count < LEAST_TENSORS && !self.step.keeps_all;
        // The graph has the arguments of a launch; what they refer to is not the host's to change.
        let done = if is_few && kept.is_none() {
            borrowed::reduce_in_arguments(backend, &reduce, lend)
        } else {
            self.read(backend, &mut kept, &reduce, lend)
        };
        self.reads.put_back(kept);
        done
    }

    fn read(
        &mut self,
        backend: &CudaBackend,
        place: &mut Option<Kept>,
        reduce: &Reduce<'_>,
        lend: LendOnDevice<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let entry = reduce.kernel.entry();
        if !place.as_ref().is_some_and(|kept| kept.is_of(entry, reduce.batches)) {
            refuse_other(entry, place.as_ref())?;
            *place = Some(Kept::of_reduction(backend, reduce)?);
        }
        let Some(kept) = place else { return Ok(LaunchReport::default()) };
        let batch = kept.batch();
        let width = size_of::<SquareSum>() as u64;
        let end = reduce.first_partial.saturating_add(u64::from(batch.chunks));
        check_end(end.saturating_mul(width), reduce.partials.len_bytes())?;
        let partials = backend.address(&*reduce.partials)? + reduce.first_partial * width;
        let head = partials.to_le_bytes().to_vec();
        let table = if self.step.is_recorded || !kept.has(self.step.places, &head) {
            let mut tensors = backend.borrowed();
            look_up_gradients(reduce, lend, &mut tensors)?;
            let bytes = pack_reduction_table_of_tensors(reduce, &batch, &tensors, partials);
            Some(Table { bytes, layout: reduce.kernel.argument_layout() })
        } else {
            None
        };
        let address = if self.step.is_recorded {
            kept.record(backend, &[], table)?
        } else {
            self.copied_bytes += kept.refresh(backend, &[], table)?;
            kept.has_now(self.step.places, head);
            kept.table_address()
        };
        kept.enqueue(backend, reduce.kernel.stem(), entry, address)?;
        Ok(LaunchReport { launches: 1, elements: 0 })
    }
}

/// Values and the control block of one update.
struct Update<'a> {
    rule: usize,
    values: &'a [GroupValues],
    control: u64,
}

/// A launch with other batches; it has neither sums that others have taken nor places for sums.
fn of_batches<'a>(launch: &'a mut Launch<'_>, batches: &'a [Batch]) -> Launch<'a> {
    Launch {
        kernel: launch.kernel,
        batches,
        offsets: launch.offsets,
        members: launch.members,
        lists: &mut *launch.lists,
        firsts: launch.firsts,
        scalars: launch.scalars,
        control: launch.control,
        grad_sums: launch.grad_sums,
        tensor_sums: None,
        update_sums: None,
        step_scalars: launch.step_scalars,
        limits: launch.limits,
    }
}

/// Entries of a kernel's launches, in their order.
fn names(kernel: &dyn MultiTensorKernel) -> Vec<&'static str> {
    match kernel.normed().map(|normed| normed.sums_and_update()) {
        Some(names) => vec![names.sums, names.update],
        None => vec![kernel.entry()],
    }
}

/// Refuses another launch in the place of one that was recorded.
fn refuse_other(entry: &str, kept: Option<&Kept>) -> Result<()> {
    if !kept.is_some_and(Kept::is_recorded) {
        return Ok(());
    }
    Err(unavailable(format!(
        "`{entry}`: expected the tensors with gradients of the step that was recorded, whose \
         replays count with it, found others; make a new optimizer for them"
    )))
}

//! The communicator: what it keeps between calls, and the order of steps of each call.

use std::collections::HashMap;
use std::time::Instant;

use fusestep_collective::{
    Aborter, Blocks, Buffers, Call, CallContext, CallShape, CollectiveError, Communicator,
    DeviceCall, Fingerprint, FlightRecorder, MAX_TIMEOUT, Membership, Operation,
};

use crate::device::UnderWay;
use crate::exchange::renamed;
use crate::founding::{Site, as_call_error};
use crate::link::{Link, Progress, relax};
use crate::options::version_text;
use crate::{NcclError, NcclOptions, exchange, staging};

/// Polls between two looks at the clock and at what others say.
const POLLS: u32 = 32;

/// One rank of a group of GPUs, on NCCL.
///
/// A rank has two lines to the others. The *control communicator*, any other engine with the same
/// ranks, says what is about to be done: late ranks and different calls are found there, before
/// data moves. NCCL then moves the data, on a stream of its own.
///
/// # Cost
/// One all-gather of 56 bytes through the control communicator, then the transfers that
/// [`docs/collectives.md`] lists. Host buffers are copied to the GPU and back.
///
/// [`docs/collectives.md`]: https://docs.rs/fusestep-collective-nccl
pub struct NcclCommunicator {
    pub(crate) control: Box<dyn Communicator>,
    pub(crate) site: Site,
    pub(crate) link: Link,
    pub(crate) options: NcclOptions,
    pub(crate) sequence: u64,
    pub(crate) context: CallContext,
    pub(crate) recorder: FlightRecorder,
    /// The last call, for errors.
    pub(crate) last: Option<Fingerprint>,
    /// Transfers made, by sender and receiver.
    pub(crate) made: HashMap<(usize, usize), u64>,
    /// What was enqueued on device memory and has not been waited for, and that it counts as under
    /// way.
    pub(crate) enqueued: Option<(Fingerprint, UnderWay)>,
    broken_off: bool,
    closed: Option<CollectiveError>,
}

/// How far a call has come when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// Its data is there.
    Done,
    /// It will be, in the order of the stream.
    Enqueued,
}

impl NcclCommunicator {
    /// A rank on GPU `device` of its machine, for each rank of `control`; all of them call it.
    /// `control` carries NCCL's unique id and from then on what ranks say to each other: MPI's
    /// world, threads of a process with several GPUs, or processes that meet in a folder.
    ///
    /// # Errors
    /// [`NcclError`]. What all ranks can know, they all return: one GPU used twice, different
    /// versions. A rank that lacks a library or its GPU says so, and the others return
    /// [`NcclError::Peer`].
    /// # Cost
    /// What it takes NCCL to connect the ranks: seconds on many machines. Of the GPU's memory twice
    /// [`NcclOptions::scratch_bytes`], for as long as the communicator lives. The first one of a
    /// GPU loads the kernel's entries, eight files of machine code of 50 KB, or has the driver
    /// compile as many. All of this may wait for calls that are under way on the same GPU.
    pub fn new(
        mut control: Box<dyn Communicator>,
        device: usize,
        options: &NcclOptions,
    ) -> Result<Self, NcclError> {
        let mut options = options.clone();
        options.timeout = options.timeout.min(MAX_TIMEOUT);
        let site = Site::agree(&mut *control, device, &options)?;
        let link = site.connect(&mut *control, &options)?;
        Ok(Self::with(control, site, link, options))
    }

    fn with(control: Box<dyn Communicator>, site: Site, link: Link, options: NcclOptions) -> Self {
        let (rank, world_size) = (control.rank(), control.world_size());
        let recorder =
            FlightRecorder::new(rank, world_size, options.recorded_calls, Instant::now())
                .dumped_into(options.dump_folder.clone());
        Self {
            control,
            site,
            link,
            options,
            sequence: 0,
            context: CallContext::default(),
            recorder,
            last: None,
            made: HashMap::new(),
            enqueued: None,
            broken_off: false,
            closed: None,
        }
    }

    /// The version of NCCL.
    pub fn library_version(&self) -> String {
        version_text(self.site.version)
    }

    /// Name and index of this rank's GPU.
    pub fn gpu(&self) -> (&str, usize) {
        (&self.site.device.name, self.site.device.index)
    }

    /// The steps that all calls have in common: check, compare, move. `body` says whether the call
    /// is done when it returns, or only enqueued.
    pub(crate) fn run(
        &mut self,
        shape: CallShape<'_>,
        body: impl FnOnce(&mut Self, Blocks<'_>, &Fingerprint) -> Result<Moved, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        if let Some(closed) = &self.closed {
            return Err(closed.clone());
        }
        let blocks = shape.blocks(self.rank(), self.world_size());
        let blocks = blocks.or_else(|error| self.refuse(error))?;
        let outcome = exchange::announce(self, &shape, blocks.numel).and_then(|print| {
            if shape.operation == Operation::Barrier {
                return Ok(());
            }
            let under_way = self.site.device.begin_call();
            let moved = body(self, blocks, &print);
            if let Err(error) = &moved {
                self.break_off(error);
            }
            // One that is done was behind all others on the stream.
            self.enqueued = match moved {
                Ok(Moved::Enqueued) => Some((print, under_way)),
                _ => None,
            };
            moved.map(|_| ())
        });
        self.end(outcome)
    }

    /// Waits until calls on device memory that have returned are done.
    fn finish_enqueued(&mut self) -> Result<(), CollectiveError> {
        if let Some(closed) = &self.closed {
            return Err(closed.clone());
        }
        let Some((print, under_way)) = self.enqueued.take() else {
            return Ok(());
        };
        let done = self.finish(&print);
        if let Err(error) = &done {
            self.break_off(error);
        }
        drop(under_way);
        done.or_else(|error| self.end(Err(error)))
    }

    /// Waits until everything enqueued so far is done.
    pub(crate) fn finish(&mut self, print: &Fingerprint) -> Result<(), CollectiveError> {
        self.wait(print, Link::enqueued)?;
        self.engine(print, |link| link.mark())?;
        self.wait(print, |link| match link.reached()? {
            Progress::Done => Ok(Progress::Done),
            // A fault of another rank shows here and never at the mark.
            Progress::Waiting => link.enqueued().map(|_| Progress::Waiting),
        })
    }

    /// Waits until NCCL takes more; what is enqueued goes on.
    pub(crate) fn settle(&mut self, print: &Fingerprint) -> Result<(), CollectiveError> {
        self.wait(print, Link::enqueued)
    }

    fn wait(
        &mut self,
        print: &Fingerprint,
        look: impl Fn(&Link) -> Result<Progress, String>,
    ) -> Result<(), CollectiveError> {
        let (begun, mut polls) = (Instant::now(), 0u32);
        loop {
            if self.engine(print, |link| look(link))? == Progress::Done {
                return Ok(());
            }
            polls = polls.wrapping_add(1);
            if !polls.is_multiple_of(POLLS) {
                continue;
            }
            let waited = begun.elapsed();
            relax(waited);
            match self.control.failure() {
                // It had done its part of everything, this call included, or it would have told
                // another error.
                None | Some(CollectiveError::Left { .. }) => {}
                Some(error) => return Err(error),
            }
            if waited > self.options.timeout {
                self.link.handle.abort_in_background(None);
                return Err(exchange::stuck(self, print));
            }
        }
    }

    /// A step of NCCL or of the driver; its failure is an error of the call.
    pub(crate) fn engine<R>(
        &mut self,
        print: &Fingerprint,
        step: impl FnOnce(&mut Link) -> Result<R, String>,
    ) -> Result<R, CollectiveError> {
        let rank = self.control.rank();
        step(&mut self.link)
            .map_err(|reason| CollectiveError::engine(rank, print.operation.name(), reason))
    }

    /// Closes the group on all ranks, then ends NCCL's part of it on this one, and with it all
    /// groups of the GPU. Once is enough, and more does nothing.
    fn break_off(&mut self, error: &CollectiveError) {
        if std::mem::replace(&mut self.broken_off, true) {
            return;
        }
        self.control.aborter().close(error.clone());
        // The first error holds.
        let first = self.control.failure();
        let error = first.as_ref().unwrap_or(error);
        self.link.handle.end_all_of_device(error, self.options.timeout);
    }

    /// What a call that fails leaves behind: the group closed on all ranks, by the first error,
    /// which the control communicator knows.
    fn fail(&mut self, error: CollectiveError) -> CollectiveError {
        self.break_off(&error);
        let error = renamed(self.control.failure().unwrap_or(error), self.last.as_ref());
        self.closed.get_or_insert(error).clone()
    }

    /// A call that this rank cannot make.
    pub(crate) fn refuse<T>(&mut self, error: CollectiveError) -> Result<T, CollectiveError> {
        let error = self.fail(error);
        self.recorder.dump_once();
        Err(error)
    }

    /// Writes an outcome down; an error closes the group on all ranks.
    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let outcome = outcome.map_err(|error| self.fail(error));
        self.recorder.end(outcome.as_ref().map(|_| ()));
        outcome
    }

    fn join(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        let print = exchange::announce(self, &CallShape::SPLIT, 0)?;
        let control = self.control.split(membership)?;
        let Some(mut control) = control else {
            return Ok(None);
        };
        let rank = self.rank();
        let link = self.site.connect(&mut *control, &self.options);
        let link = link.map_err(|error| as_call_error(error, rank))?;
        let mut options = self.options.clone();
        options.dump_folder =
            options.dump_folder.map(|folder| folder.join(format!("group-{}", print.sequence)));
        let made = Self::with(control, self.site.clone(), link, options);
        Ok(Some(Box::new(made)))
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn world_size(&self) -> usize {
        self.control.world_size()
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        let shape = call.shape();
        let mut buffers: Buffers<'_> = call.buffers;
        self.run(shape, |comm, blocks, print| {
            staging::through_the_device(comm, &mut buffers, blocks, print)?;
            Ok(Moved::Done)
        })
    }

    fn device(&self) -> Option<u32> {
        u32::try_from(self.site.device.index).ok()
    }

    fn execute_on_device(&mut self, call: DeviceCall<'_>) -> Result<(), CollectiveError> {
        self.on_device(call)
    }

    fn finish_on_device(&mut self) -> Result<(), CollectiveError> {
        self.finish_enqueued()
    }

    fn control(&mut self) -> Option<&mut dyn Communicator> {
        Some(self.control.as_mut())
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        if let Some(closed) = &self.closed {
            return Err(closed.clone());
        }
        let outcome = self.join(membership);
        self.end(outcome)
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        self.control.aborter()
    }

    fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.closed.clone().or_else(|| self.control.failure())
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The others will not finish what this rank has begun.
            let (rank, calls) = (self.rank(), self.recorder.calls_begun());
            self.break_off(&CollectiveError::Panicked { rank, calls });
        }
    }
}

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", &self.site.device.index)
            .finish_non_exhaustive()
    }
}

//! The communicator: what it keeps between calls, and the order of steps of each call.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fusestep_collective::{
    Aborter, Blocks, Buffers, Call, CallContext, CallShape, CollectiveError, Communicator,
    Fingerprint, FlightRecorder, Lengths, Membership, Operation,
};
use fusestep_tensor::DType;

use crate::device::DeviceBuffer;
use crate::driver::Address;
use crate::exchange::renamed;
use crate::founding::{Site, as_call_error};
use crate::link::{Link, Progress, relax};
use crate::options::version_text;
use crate::{NcclError, NcclOptions};

/// Longest timeout; a longer one is cut to this, so that every wait ends.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Polls between two looks at the clock and at what others say.
const POLLS: u32 = 32;

/// One rank of a group of GPUs, on NCCL.
///
/// A rank has two lines to the others. The *control communicator*, any other engine with the same
/// ranks, says what is about to be done: late ranks and different calls are found there, before
/// data moves. NCCL then moves the data, on a stream of its own.
///
/// # Cost
/// One all-gather of 72 bytes through the control communicator, then the transfers that
/// [`docs/collectives.md`] lists. Host buffers are copied to the GPU and back.
///
/// [`docs/collectives.md`]: https://docs.rs/fusestep-collective-nccl
pub struct NcclCommunicator {
    pub(crate) control: Box<dyn Communicator>,
    site: Site,
    pub(crate) link: Link,
    pub(crate) options: NcclOptions,
    pub(crate) sequence: u64,
    pub(crate) context: CallContext,
    pub(crate) recorder: FlightRecorder,
    /// The last call, for errors.
    pub(crate) last: Option<Fingerprint>,
    /// Transfers made, by sender and receiver.
    pub(crate) made: HashMap<(usize, usize), u64>,
    /// What others contribute to the part that this rank reduces.
    pub(crate) scratch: Option<DeviceBuffer>,
    /// Where host buffers go.
    pub(crate) staged: [Option<DeviceBuffer>; 2],
    closed: Option<CollectiveError>,
    dumped: Option<Result<PathBuf, String>>,
}

/// Device memory of a call; as [`Buffers`] of the host.
#[derive(Debug)]
pub enum DeviceBuffers<'a> {
    /// One buffer of the whole length.
    InPlace(&'a mut DeviceBuffer),
    /// Two buffers.
    OutOfPlace {
        /// The input.
        send: &'a DeviceBuffer,
        /// The result.
        receive: &'a mut DeviceBuffer,
    },
}

/// A call on device memory; as [`Call`] on the host's.
#[derive(Debug)]
pub struct DeviceCall<'a> {
    /// What to do.
    pub operation: Operation,
    /// The elements' type.
    pub dtype: DType,
    /// Elements of each rank's block, for the operations that have blocks; the same on all ranks.
    pub counts: Option<&'a [usize]>,
    /// Input and result.
    pub buffers: DeviceBuffers<'a>,
}

/// Where a call's memory lies on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    Same(Address),
    Two { send: Address, receive: Address },
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
    /// What it takes NCCL to connect the ranks: seconds on many machines.
    pub fn new(
        mut control: Box<dyn Communicator>,
        device: usize,
        options: &NcclOptions,
    ) -> Result<Self, NcclError> {
        let mut options = options.clone();
        options.timeout = options.timeout.min(MAX_TIMEOUT);
        let site = Site::agree(&mut *control, device, &options)?;
        let link = site.connect(&mut *control, options.timeout)?;
        Ok(Self::with(control, site, link, options))
    }

    fn with(control: Box<dyn Communicator>, site: Site, link: Link, options: NcclOptions) -> Self {
        let (rank, world_size) = (control.rank(), control.world_size());
        let recorder =
            FlightRecorder::new(rank, world_size, options.recorded_calls, Instant::now());
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
            scratch: None,
            staged: [None, None],
            closed: None,
            dumped: None,
        }
    }

    /// The version of NCCL.
    pub fn library_version(&self) -> String {
        version_text(self.site.version)
    }

    /// Name and index of this rank's GPU.
    pub fn device(&self) -> (&str, usize) {
        (&self.site.device.name, self.site.device.index)
    }

    /// Where the flight recorder was written, or why it could not be; `None` while all is well or
    /// without a folder.
    pub fn dumped(&self) -> Option<&Result<PathBuf, String>> {
        self.dumped.as_ref()
    }

    /// Memory on this rank's GPU.
    ///
    /// # Errors
    /// The driver's words.
    pub fn device_buffer(&self, len_bytes: usize) -> Result<DeviceBuffer, NcclError> {
        DeviceBuffer::allocate(&self.site.device, len_bytes).map_err(|reason| NcclError::Call {
            call: "cuMemAlloc",
            reason,
        })
    }

    /// Memory that the caller already has on this rank's GPU, in its primary context.
    ///
    /// # Safety
    /// `address` leads to `len_bytes` bytes there, which live as long as the buffer; nothing else
    /// uses them during a call, and what was enqueued for them on other streams has ended.
    pub unsafe fn borrow_device_memory(&self, address: u64, len_bytes: usize) -> DeviceBuffer {
        // SAFETY: as required of the caller.
        unsafe { DeviceBuffer::borrow(&self.site.device, address, len_bytes) }
    }

    /// [`execute`](Communicator::execute) on device memory: nothing goes through the host.
    ///
    /// # Errors
    /// As there; [`CollectiveError::Refused`] for memory of another GPU.
    pub fn execute_on_device(&mut self, call: DeviceCall<'_>) -> Result<(), CollectiveError> {
        let (memory, lengths, devices) = match &call.buffers {
            DeviceBuffers::InPlace(buffer) => (
                Memory::Same(buffer.address),
                Lengths::InPlace(buffer.len_bytes()),
                [buffer.device.index; 2],
            ),
            DeviceBuffers::OutOfPlace { send, receive } => (
                Memory::Two {
                    send: send.address,
                    receive: receive.address,
                },
                Lengths::OutOfPlace {
                    send: send.len_bytes(),
                    receive: receive.len_bytes(),
                },
                [send.device.index, receive.device.index],
            ),
        };
        let own = self.site.device.index;
        if let Some(other) = devices.into_iter().find(|&device| device != own) {
            let refused = CollectiveError::Refused {
                rank: self.rank(),
                operation: call.operation.name(),
                reason: format!(
                    "expected memory of GPU {own}, this rank's, found some of GPU {other}"
                ),
            };
            return self.end(Err(refused));
        }
        let shape = CallShape {
            operation: call.operation,
            dtype: call.dtype,
            counts: call.counts,
            lengths,
        };
        self.run(shape, |comm, blocks, print| {
            comm.move_data(memory, blocks, print)
        })
    }

    /// The steps that all calls have in common: check, compare, move.
    fn run(
        &mut self,
        shape: CallShape<'_>,
        body: impl FnOnce(&mut Self, Blocks<'_>, &Fingerprint) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        if let Some(closed) = &self.closed {
            return Err(closed.clone());
        }
        let checked = shape.blocks(self.rank(), self.world_size());
        let outcome = checked.and_then(|blocks| {
            let print = self.announce(&shape, blocks.numel)?;
            match shape.operation {
                Operation::Barrier => Ok(()),
                _ => body(self, blocks, &print),
            }
        });
        self.end(outcome)
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
                self.link.abort();
                return Err(self.stuck(print));
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
        step(&mut self.link).map_err(|reason| CollectiveError::Engine {
            rank,
            operation: print.operation.name(),
            reason,
        })
    }

    /// Writes an outcome down; an error closes the group on all ranks, and NCCL's part of it on
    /// this one.
    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        match outcome {
            Ok(value) => {
                self.recorder.end(Ok(()));
                Ok(value)
            }
            Err(error) => {
                self.link.abort();
                self.control.aborter().close(error.clone());
                // The first error holds; the control communicator knows which one that was.
                let error = renamed(self.control.failure().unwrap_or(error), self.last.as_ref());
                self.recorder.end(Err(&error));
                if let (None, Some(folder)) = (&self.dumped, &self.options.dump_folder) {
                    let dumped = self.recorder.dump(folder);
                    self.dumped = Some(dumped.map_err(|error| error.to_string()));
                }
                Err(self.closed.get_or_insert(error).clone())
            }
        }
    }

    fn join(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        let shape = CallShape {
            operation: Operation::Split,
            dtype: DType::U8,
            counts: None,
            lengths: Lengths::InPlace(0),
        };
        let print = self.announce(&shape, 0)?;
        let control = self.control.split(membership)?;
        let Some(mut control) = control else {
            return Ok(None);
        };
        let rank = self.rank();
        let link = self.site.connect(&mut *control, self.options.timeout);
        let link = link.map_err(|error| as_call_error(error, rank))?;
        let mut options = self.options.clone();
        options.dump_folder = options
            .dump_folder
            .map(|folder| folder.join(format!("group-{}", print.sequence)));
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
            comm.through_the_device(&mut buffers, blocks, print)
        })
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

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", &self.site.device.index)
            .finish_non_exhaustive()
    }
}

//! Link of a rank to the others: an NCCL communicator with its stream, made, watched and ended
//! without ever blocking in NCCL.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fusestep_collective::Aborter;
use fusestep_simd::Polling;

use crate::NcclError;
use crate::device::Device;
use crate::driver::{Address, Event};
use crate::handle::Handle;
use crate::library::{BYTES, Comm, Config, IN_PROGRESS, Nccl, SUCCESS, Stream, UniqueId};
use crate::workspace::Workspace;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

/// Pauses while waiting for NCCL and the device, which wake no thread.
pub(crate) const POLLING: Polling =
    Polling { keep: Duration::from_micros(50), offer: Duration::from_millis(1) };

/// A communicator, the stream that its operations run on, and memory for them.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) device: Arc<Device>,
    pub(crate) handle: Arc<Handle>,
    pub(crate) stream: Stream,
    event: Event,
    pub(crate) workspace: Workspace,
}

// SAFETY: streams and events may be used from any thread, by one at a time: `Link` is not `Sync`.
unsafe impl Send for Link {}

/// A part of a group of transfers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    way: Way,
    peer: usize,
    /// Address in device memory.
    address: Address,
    len_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Out,
    In,
}

impl Message {
    pub(crate) fn out(peer: usize, address: Address, len_bytes: usize) -> Self {
        Self { way: Way::Out, peer, address, len_bytes }
    }

    pub(crate) fn into(peer: usize, address: Address, len_bytes: usize) -> Self {
        Self { way: Way::In, ..Self::out(peer, address, len_bytes) }
    }
}

/// Progress of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    Waiting,
}

/// Place of a rank in its group: its rank, the world size and the group's unique id.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) id: UniqueId,
}

impl Link {
    /// Makes the stream, the event and the memory for calls of a group of `ranks`, with twice
    /// `scratch_bytes`. The communicator itself comes later. `aborter` aborts the group.
    pub(crate) fn prepare(
        nccl: Arc<Nccl>,
        device: Arc<Device>,
        aborter: Aborter,
        scratch_bytes: usize,
        ranks: usize,
    ) -> Result<Self, NcclError> {
        let workspace = Workspace::allocate(&device, scratch_bytes, ranks);
        let mut link = Self {
            handle: Handle::new(nccl, Arc::clone(&device), aborter),
            stream: std::ptr::null_mut(),
            event: std::ptr::null_mut(),
            workspace: workspace.map_err(NcclError::of_call("cuMemAlloc"))?,
            device: Arc::clone(&device),
        };
        let _entered = device.enter().map_err(NcclError::of_call("cuCtxSetCurrent"))?;
        let driver = &device.driver;
        // SAFETY: each writes one handle into the link, whose drop gives it back; the context is
        // current.
        unsafe {
            let code = (driver.stream_create)(&mut link.stream, NON_BLOCKING);
            driver.check(code).map_err(NcclError::of_call("cuStreamCreate"))?;
            let code = (driver.event_create)(&mut link.event, DISABLE_TIMING);
            driver.check(code).map_err(NcclError::of_call("cuEventCreate"))?;
        }
        Ok(link)
    }

    /// Starts to connect the ranks; [`enqueued`](Self::enqueued) tells when they are connected.
    pub(crate) fn connect(&self, place: Place) -> Result<(), NcclError> {
        let entered = self.device.enter();
        let _entered = entered.map_err(NcclError::of_call("cuCtxSetCurrent"))?;
        let made = self.handle.make(|nccl, comm: &mut Comm| {
            let mut config = Config::without_blocking();
            // SAFETY: the id was made by `ncclGetUniqueId`; all ranks pass the same one, and each
            // its own rank. The configuration is read before the call returns.
            let code = unsafe {
                (nccl.init_rank)(
                    comm,
                    place.world_size as c_int,
                    place.id,
                    place.rank as c_int,
                    &mut config,
                )
            };
            nccl.check(code)
        });
        made.map_err(NcclError::of_call("ncclCommInitRankConfig"))
    }

    /// Whether NCCL has nothing left to set up or enqueue.
    pub(crate) fn enqueued(&self) -> Result<Progress, String> {
        self.handle.with(|nccl, comm| {
            let mut state = SUCCESS;
            // SAFETY: the communicator lives; it writes one code.
            let asked = unsafe { (nccl.async_error)(comm, &mut state) };
            match (asked, state) {
                (SUCCESS, SUCCESS) => Ok(Progress::Done),
                (SUCCESS, IN_PROGRESS) => Ok(Progress::Waiting),
                (SUCCESS, code) | (code, _) => Err(nccl.text(code)),
            }
        })
    }

    /// Makes the calls of `body` as one group of NCCL. [`enqueued`](Self::enqueued) tells when the
    /// calls are enqueued.
    pub(crate) fn group(
        &self,
        body: impl FnOnce(&Nccl, Comm, Stream) -> c_int,
    ) -> Result<(), String> {
        let _entered = self.device.enter()?;
        self.handle.with(|nccl, comm| {
            // SAFETY: groups are the calling thread's, and each start has its end.
            let (started, called, ended) = unsafe {
                let started = (nccl.group_start)();
                let called = body(nccl, comm, self.stream);
                (started, called, (nccl.group_end)())
            };
            [started, called, ended].into_iter().try_for_each(|code| nccl.check(code))
        })
    }

    /// Starts transfers; empty messages are left out on both sides.
    pub(crate) fn transfers(&self, messages: &[Message]) -> Result<(), String> {
        let messages = messages.iter().filter(|message| message.len_bytes > 0);
        let messages: Vec<&Message> = messages.collect();
        if messages.is_empty() {
            return Ok(());
        }
        self.group(|nccl, comm, stream| {
            let mut first_error = SUCCESS;
            for message in messages {
                let (peer, len_bytes) = (message.peer as c_int, message.len_bytes);
                // SAFETY: addresses are those of device buffers that the communicator or its caller
                // holds until the event after this group has come, or until the
                // communicator was aborted; lengths were checked against them.
                let code = unsafe {
                    match message.way {
                        Way::Out => {
                            let from = message.address as *const _;
                            (nccl.send)(from, len_bytes, BYTES, peer, comm, stream)
                        }
                        Way::In => {
                            let into = message.address as *mut _;
                            (nccl.receive)(into, len_bytes, BYTES, peer, comm, stream)
                        }
                    }
                };
                if !matches!(code, SUCCESS | IN_PROGRESS) && first_error == SUCCESS {
                    first_error = code;
                }
            }
            first_error
        })
    }

    /// Copies within the device, in the order of the stream.
    pub(crate) fn copy(&self, from: Address, to: Address, len_bytes: usize) -> Result<(), String> {
        if len_bytes == 0 || from == to {
            return Ok(());
        }
        // SAFETY: as for transfers.
        self.device.call(|driver| unsafe { (driver.copy)(to, from, len_bytes, self.stream) })
    }

    /// Makes the stream's next work wait for `ready`, an event of another stream.
    pub(crate) fn follow(&self, ready: u64) -> Result<(), String> {
        let ready = ready as Event;
        // SAFETY: the stream is this link's; whoever lent memory has promised that the event of its
        // order lives, in the device's primary context.
        self.device.call(|driver| unsafe { (driver.stream_wait_event)(self.stream, ready, 0) })
    }

    /// Records `done`, an event of a memory's owner, behind the work enqueued on this stream.
    pub(crate) fn tell(&self, done: u64) -> Result<(), String> {
        // SAFETY: as above.
        self.device.call(|driver| unsafe { (driver.event_record)(done as Event, self.stream) })
    }

    /// Records the mark behind the stream's work, for [`reached`](Self::reached) to query.
    pub(crate) fn mark(&self) -> Result<(), String> {
        // SAFETY: both are this link's.
        self.device.call(|driver| unsafe { (driver.event_record)(self.event, self.stream) })
    }

    /// Whether the device has come to the mark.
    pub(crate) fn reached(&self) -> Result<Progress, String> {
        let _entered = self.device.enter()?;
        let driver = &self.device.driver;
        // SAFETY: the event is this link's.
        let come = driver.has_come(unsafe { (driver.event_query)(self.event) })?;
        Ok(if come { Progress::Done } else { Progress::Waiting })
    }

    /// Lets NCCL finish and free its memory; aborts the communicator if that takes longer than
    /// `limit`.
    fn destroy(&self, limit: Duration) {
        let begun = Instant::now();
        // SAFETY: the communicator lives.
        let finalized = |nccl: &Nccl, comm| nccl.check(unsafe { (nccl.finalize)(comm) });
        let mut outcome = self.handle.with(finalized);
        while outcome.is_ok() {
            match self.enqueued() {
                Ok(Progress::Done) => return self.handle.destroy(),
                Ok(Progress::Waiting) if begun.elapsed() < limit => POLLING.pause(begun.elapsed()),
                Ok(Progress::Waiting) => outcome = Err(String::new()),
                Err(reason) => outcome = Err(reason),
            }
        }
        self.handle.abort_within(limit);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let device = Arc::clone(&self.device);
        let _entered = device.enter();
        if self.handle.is_live() {
            self.destroy(Duration::from_secs(5));
        }
        // SAFETY: made by `prepare`, destroyed once; the driver keeps what is still in use until it
        // is not.
        unsafe {
            if !self.event.is_null() {
                (device.driver.event_destroy)(self.event);
            }
            if !self.stream.is_null() {
                (device.driver.stream_destroy)(self.stream);
            }
        }
    }
}

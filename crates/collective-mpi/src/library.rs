//! MPI in this process: started once, called under a lock if it takes one thread at a time, and
//! ended with its last user.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fusestep_collective::CollectiveError;
use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;

use crate::say::say;
use crate::{MpiError, MpiOptions, Reduction};

/// Kind of a message, which makes the lowest bits of its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Header = 0,
    Data = 1,
    Result = 2,
    Notice = 3,
    TransferHeader = 4,
    Transfer = 5,
    Farewell = 6,
}

/// Number of tags of one group, one for each kind.
const KINDS: c_int = 8;

/// A message under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request(ffi::MPI_Request);

/// A communicator of MPI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle(pub(crate) ffi::MPI_Comm);

// SAFETY: handles are names that MPI looks up; any thread may use them, one at a time where
// `Mpi::turn` says so.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Send for Handle {}
// SAFETY: as above; a shared handle is only copied.
unsafe impl Sync for Handle {}

/// MPI in this process.
pub(crate) struct Mpi {
    /// Communicator of all processes, apart from the program's other messages over MPI. Its errors
    /// are returned, not fatal.
    pub(crate) world: Handle,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) version: String,
    /// Lock on calls of MPI, if MPI takes one thread at a time.
    turns: Option<Mutex<()>>,
    /// Groups that a process can lead before tags run out.
    group_limit: u32,
    next_group: AtomicU32,
    leave_timeout: Duration,
    timeout: Duration,
    /// Whether a group has ended in an error, so that some messages may never arrive.
    pub(crate) troubled: AtomicBool,
    /// First error of a group, printed if the job ends before the program has reported it.
    first_error: Mutex<Option<CollectiveError>>,
    universe: Mutex<Option<Universe>>,
}

impl Mpi {
    pub(crate) fn start(options: &MpiOptions) -> Result<Self, MpiError> {
        let (universe, level) =
            mpi::initialize_with_threading(Threading::Multiple).ok_or(MpiError::AlreadyStarted)?;
        let (needed, expected) = match options.reduction {
            Reduction::Reproducible => (Threading::Serialized, "serialized"),
            Reduction::Engine => (Threading::Multiple, "multiple"),
        };
        if level < needed {
            let found = match level {
                Threading::Single => "single",
                Threading::Funneled => "funneled",
                Threading::Serialized => "serialized",
                Threading::Multiple => "multiple",
            };
            return Err(MpiError::ThreadLevel { expected, found });
        }
        let call = |call: &'static str, code: c_int| check(code).map_err(MpiError::of_call(call));
        let (mut comm, mut rank, mut world_size) = (no_comm(), 0, 0);
        // SAFETY: MPI was started above; all processes of the job come here, first thing.
        call("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm) })?;
        // SAFETY: `comm` was made above; the results are this function's own.
        unsafe {
            call(
                "MPI_Comm_set_errhandler",
                ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN),
            )?;
            call("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &mut rank))?;
            call("MPI_Comm_size", ffi::MPI_Comm_size(comm, &mut world_size))?;
        }
        let (rank, world_size) = (rank as usize, world_size as usize);
        let group_limit = (highest_tag(comm) / KINDS) as usize / world_size;
        Ok(Self {
            world: Handle(comm),
            rank,
            world_size,
            version: mpi::environment::library_version().unwrap_or_default(),
            turns: (level < Threading::Multiple).then(Mutex::default),
            group_limit: u32::try_from(group_limit).unwrap_or(u32::MAX),
            next_group: AtomicU32::new(1),
            leave_timeout: options.leave_timeout,
            timeout: options.timeout,
            troubled: AtomicBool::new(false),
            first_error: Mutex::new(None),
            universe: Mutex::new(Some(universe)),
        })
    }

    /// Locks MPI for a call, if MPI takes one thread at a time.
    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        let turns = self.turns.as_ref()?;
        Some(turns.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reserves a number for a group that this process leads; no other group of this process has
    /// it.
    pub(crate) fn reserve_group(&self) -> u32 {
        self.next_group.fetch_add(1, Ordering::SeqCst)
    }

    /// The tag of a group, from its leader and the number that the leader reserved; `None` if tags
    /// have run out.
    pub(crate) fn group_tag(&self, leader: usize, number: u32) -> Option<i32> {
        (number < self.group_limit).then(|| (number as usize * self.world_size + leader) as i32)
    }

    fn tag(group: i32, kind: Kind) -> c_int {
        group * KINDS + kind as c_int
    }

    /// Starts sending to a process of the job.
    ///
    /// # Safety
    /// `bytes` stays where it is, unchanged, until [`done`](Self::done) says so of the request. It
    /// is at most `c_int::MAX` long.
    pub(crate) unsafe fn send(
        &self,
        bytes: &[u8],
        to: usize,
        group: i32,
        kind: Kind,
    ) -> Result<Request, String> {
        let (mut request, _turn) = (no_request(), self.turn());
        // SAFETY: the slice is valid for reads; the caller keeps it so until the request is done.
        let code = unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast::<c_void>(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                Self::tag(group, kind),
                self.world.0,
                &mut request,
            )
        };
        check(code).map(|()| Request(request))
    }

    /// Starts receiving from a process of the job.
    ///
    /// # Safety
    /// `bytes` stays where it is, used by nobody, until [`done`](Self::done) says so of the
    /// request. It is at most `c_int::MAX` long.
    pub(crate) unsafe fn receive(
        &self,
        bytes: &mut [u8],
        from: usize,
        group: i32,
        kind: Kind,
    ) -> Result<Request, String> {
        let (mut request, _turn) = (no_request(), self.turn());
        // SAFETY: the slice is valid for writes; the caller keeps it so until the request is done.
        let code = unsafe {
            ffi::MPI_Irecv(
                bytes.as_mut_ptr().cast::<c_void>(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                from as c_int,
                Self::tag(group, kind),
                self.world.0,
                &mut request,
            )
        };
        check(code).map(|()| Request(request))
    }

    /// Whether a message of this process has been received or sent; advances all messages. A
    /// request that is done stays done.
    pub(crate) fn done(&self, request: &mut Request) -> Result<bool, String> {
        let (mut flag, _turn) = (0, self.turn());
        // SAFETY: the request was made by this process; once it is done, MPI makes it the null
        // request, of which the same is true.
        let code = unsafe { ffi::MPI_Test(&mut request.0, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check(code).map(|()| flag != 0)
    }

    /// Sends a short message without waiting. Its bytes are leaked, since MPI may need them until
    /// the end.
    pub(crate) fn send_and_forget(&self, bytes: Vec<u8>, to: usize, group: i32, kind: Kind) {
        let bytes: &'static [u8] = Vec::leak(bytes);
        // SAFETY: leaked memory stays. A failure leaves the receiver to its deadline, which is
        // there for that.
        if let Ok(mut request) = unsafe { self.send(bytes, to, group, kind) } {
            let _turn = self.turn();
            // SAFETY: the request is active and not used again; MPI finishes it by itself.
            unsafe { ffi::MPI_Request_free(&mut request.0) };
        }
    }

    /// Takes a message that has arrived from any process, with its sender. One thread at a time
    /// calls it for each group and kind.
    pub(crate) fn take(&self, group: i32, kind: Kind) -> Option<(usize, Vec<u8>)> {
        let _turn = self.turn();
        // SAFETY: a status is plain numbers (and padding), for which zeros are valid.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        let (mut flag, mut len, tag) = (0, 0, Self::tag(group, kind));
        // SAFETY: all results are this function's own.
        let probed = unsafe {
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.world.0, &mut flag, &mut status)
        };
        if probed != 0 || flag == 0 {
            return None;
        }
        // SAFETY: the status is that of a message that has arrived.
        unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut len) };
        let mut bytes = vec![0u8; usize::try_from(len).ok()?];
        let source = status.MPI_SOURCE;
        // SAFETY: the message was seen to be there, of this length, and nobody else takes it (the
        // caller's lock), so this returns at once; messages of this kind are short enough
        // to have arrived whole.
        let code = unsafe {
            ffi::MPI_Recv(
                bytes.as_mut_ptr().cast::<c_void>(),
                len,
                ffi::RSMPI_UINT8_T,
                source,
                tag,
                self.world.0,
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        (code == 0).then_some((source as usize, bytes))
    }

    /// Keeps the first error, to be printed at the end. Any other error replaces a dropped result,
    /// for a caller drops results when another call has failed.
    pub(crate) fn keep_error(&self, error: CollectiveError) {
        let mut first = self.first_error();
        if matches!(*first, None | Some(CollectiveError::Dropped { .. })) {
            *first = Some(error);
        }
    }

    fn first_error(&self) -> MutexGuard<'_, Option<CollectiveError>> {
        self.first_error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the whole job at once.
    pub(crate) fn abort(&self) -> ! {
        // SAFETY: MPI runs until `Drop`; this call does not come back.
        unsafe { ffi::MPI_Abort(self.world.0, 1) };
        std::process::exit(1)
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Drop for Mpi {
    /// Leaves MPI once all other processes leave, too. After an error a process may never leave, so
    /// the wait is shorter.
    fn drop(&mut self) {
        let troubled = self.troubled.load(Ordering::SeqCst);
        let patience = if troubled { self.timeout / 2 } else { self.leave_timeout };
        for to in (0..self.world_size).filter(|&to| to != self.rank) {
            self.send_and_forget(vec![0], to, 0, Kind::Farewell);
        }
        let (mut gone, deadline) = (vec![false; self.world_size], Instant::now() + patience);
        gone[self.rank] = true;
        while gone.contains(&false) {
            if let Some((from, _)) = self.take(0, Kind::Farewell) {
                gone[from] = true;
            } else if Instant::now() > deadline {
                let ranks: Vec<usize> = (0..self.world_size).filter(|&rank| !gone[rank]).collect();
                let before = match &*self.first_error() {
                    Some(error) => format!("{error}; then "),
                    None => String::new(),
                };
                say(&format!(
                    "rank {}: {before}ranks {ranks:?} have not left MPI within {} ms of this one; \
                     the job is ended",
                    self.rank,
                    patience.as_millis()
                ));
                self.abort();
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let universe = self.universe.get_mut().unwrap_or_else(PoisonError::into_inner);
        drop(universe.take());
    }
}

/// Returns MPI's own words for a return code that is not success.
pub(crate) fn check(code: c_int) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    let (mut text, mut len) = ([0u8; 1024], 0);
    // SAFETY: no MPI has error texts of 1,024 bytes (MPI_MAX_ERROR_STRING is 256 to 512).
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = &text[..usize::try_from(len).unwrap_or(0).min(1024)];
    Err(format!("{} (code {code})", String::from_utf8_lossy(text)))
}

fn no_comm() -> ffi::MPI_Comm {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_COMM_NULL }
}

fn no_request() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

/// The highest tag that MPI allows; at least 32,767 by the standard.
fn highest_tag(comm: ffi::MPI_Comm) -> c_int {
    let (mut value, mut flag) = (std::ptr::null_mut::<c_int>(), 0);
    // SAFETY: the attribute is a pointer to an int that the library keeps, and is read only if it
    // is there.
    unsafe {
        let place = (&raw mut value).cast::<c_void>();
        ffi::MPI_Comm_get_attr(comm, ffi::MPI_TAG_UB as c_int, place, &mut flag);
        if flag != 0 && !value.is_null() { *value } else { 32_767 }
    }
}

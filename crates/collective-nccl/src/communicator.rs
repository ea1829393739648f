//! Communicator on NCCL, which programs hold.

use fusestep_collective::{CallOptions, Communicator, MAX_TIMEOUT, Ranked, Timeout, forward_calls};

use crate::buffer::DeviceBuffer;
use crate::founding::Site;
use crate::gpus::Gpus;
use crate::options::version_text;
use crate::{NcclError, NcclOptions};

/// One rank of a group of GPUs, on NCCL.
///
/// A rank has two lines to the others. The *control communicator*, any other engine with the same
/// ranks, carries the fingerprint of each call. Late ranks and different calls are found there,
/// before data moves. NCCL then moves the data, on a stream of its own.
///
/// # Cost
/// One all-gather of 56 bytes through the control communicator, then the transfers that
/// [`docs/collectives.md`] lists. Host buffers are copied to the GPU and back.
///
/// [`docs/collectives.md`]: https://docs.rs/fusestep-collective-nccl
pub struct NcclCommunicator(Ranked<Gpus>);

impl NcclCommunicator {
    /// Makes a communicator of the ranks of `control`, each on GPU `device` of its machine; all of
    /// them call it. `control` carries NCCL's unique id and later the fingerprints of calls. It may
    /// be MPI's world, threads of a process with several GPUs, or processes that meet in a folder.
    ///
    /// # Errors
    /// [`NcclError`]. All ranks return the same error for one GPU used twice and for different
    /// versions. A rank that lacks a library or its GPU returns its own error, and the others
    /// return [`NcclError::Peer`].
    /// # Cost
    /// The time in which NCCL connects the ranks: seconds on many machines. Twice
    /// [`NcclOptions::scratch_bytes`] of the GPU's memory, for as long as the communicator lives.
    /// The first communicator of a GPU loads the kernel's entries, eight files of machine code of
    /// 50 KB, or has the driver compile as many. Each step may wait for calls that are under way on
    /// the same GPU.
    pub fn new(
        mut control: Box<dyn Communicator>,
        device: usize,
        options: &NcclOptions,
    ) -> Result<Self, NcclError> {
        let mut options = options.clone();
        options.timeout = options.timeout.min(MAX_TIMEOUT);
        let site = Site::agree(&mut *control, device, &options)?;
        let link = site.connect(&mut *control, &options)?;
        let calls = CallOptions {
            timeout: Timeout::new(options.timeout),
            recorded_calls: options.recorded_calls,
            dump_folder: options.dump_folder.clone(),
        };
        Ok(Self(Ranked::on(Gpus::new(control, site, link, options), calls)))
    }

    /// The version of NCCL.
    pub fn library_version(&self) -> String {
        version_text(self.0.engine().site.version)
    }

    /// Name and index of this rank's GPU.
    pub fn gpu(&self) -> (&str, usize) {
        (&self.0.engine().site.device.name, self.0.engine().site.device.index)
    }

    /// Memory on this rank's GPU.
    ///
    /// # Errors
    /// [`NcclError::Call`] with the driver's words.
    pub fn device_buffer(&self, len_bytes: usize) -> Result<DeviceBuffer, NcclError> {
        let made = DeviceBuffer::allocate(&self.0.engine().site.device, len_bytes);
        made.map_err(NcclError::of_call("cuMemAlloc"))
    }
}

impl Communicator for NcclCommunicator {
    forward_calls! {
        this => this.0;
        rank, world_size, execute, split, set_context, aborter, recorder, allocate, device,
        execute_on_device, finish_on_device, control, failure,
    }
}

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", &self.gpu().1)
            .finish_non_exhaustive()
    }
}

//! Founding of a group: ranks exchange their versions and GPUs, all make the same checks, and NCCL
//! connects them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use fusestep_collective::{CollectiveError, Collectives, Communicator};

use crate::device::Device;
use crate::library::{Nccl, UniqueId};
use crate::link::{Link, POLLING, Place, Progress};
use crate::options::version_text;
use crate::{NcclError, NcclOptions};

/// Greeting that a rank sends to the others: its NCCL version, machine and GPU, or its error.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Greeting {
    /// 1 if the rank can take part, 0 if not.
    comes: u32,
    version: u32,
    machine: u64,
    uuid: [u8; 16],
    device: u64,
    scratch_bytes: u64,
    /// Name of the rank's GPU, or the reason why the rank cannot take part; zeros behind it.
    text: [[u8; 8]; 26],
}

/// Libraries and GPU of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) nccl: Arc<Nccl>,
    pub(crate) version: u32,
    pub(crate) device: Arc<Device>,
}

impl Site {
    fn open(device: usize, rank: usize, options: &NcclOptions) -> Result<Self, NcclError> {
        let device = Device::open(&options.driver_library, device, rank)?;
        let (nccl, version) = Nccl::load(&options.nccl_library)?;
        Ok(Self { nccl: Arc::new(nccl), version, device })
    }

    /// Opens libraries and GPU, and checks that all ranks can work together. All ranks call it. If
    /// one fails, all get an error: their own, or [`NcclError::Peer`].
    pub(crate) fn agree(
        control: &mut dyn Communicator,
        device: usize,
        options: &NcclOptions,
    ) -> Result<Self, NcclError> {
        let opened = Self::open(device, control.rank(), options);
        let own = Greeting::of(&opened, options.scratch_bytes);
        let mut all = vec![own; control.world_size()];
        let told = control.all_gather(bytemuck::bytes_of(&own), bytemuck::cast_slice_mut(&mut all));
        told.map_err(NcclError::Control)?;
        let site = opened?;
        judge(&all)?;
        Ok(site)
    }

    /// Connects the ranks of `control`, once all have the memory and streams that calls need.
    pub(crate) fn connect(
        &self,
        control: &mut dyn Communicator,
        options: &NcclOptions,
    ) -> Result<Link, NcclError> {
        let (rank, world_size) = (control.rank(), control.world_size());
        let prepared = Link::prepare(
            Arc::clone(&self.nccl),
            Arc::clone(&self.device),
            control.aborter(),
            options.scratch_bytes,
            world_size,
        );
        let link = agreed(control, prepared, "it lacks what calls need on its GPU")?;
        let place = Place { rank, world_size, id: self.unique_id(control)? };
        let linked = link.connect(place).and_then(|()| wait_connected(link, options.timeout));
        agreed(control, linked, "NCCL did not connect it")
    }

    /// Gets NCCL's unique id on rank 0 and broadcasts it.
    fn unique_id(&self, control: &mut dyn Communicator) -> Result<UniqueId, NcclError> {
        // One byte says whether there is an id.
        let mut message = [0u8; 129];
        let mut made = Ok(());
        if control.rank() == 0 {
            let mut id = UniqueId([0; 128]);
            // SAFETY: it writes one id.
            let code = unsafe { (self.nccl.get_unique_id)(&mut id) };
            made = self.nccl.check(code);
            message[0] = u8::from(made.is_ok());
            message[1..].copy_from_slice(&id.0);
        }
        control.broadcast(&mut message, 0).map_err(NcclError::Control)?;
        made.map_err(NcclError::of_call("ncclGetUniqueId"))?;
        if message[0] == 0 {
            return Err(NcclError::Peer {
                rank: 0,
                reason: "it got no unique id from NCCL".to_owned(),
            });
        }
        let mut id = UniqueId([0; 128]);
        id.0.copy_from_slice(&message[1..]);
        Ok(id)
    }
}

/// Returns this rank's link if all ranks have succeeded. A rank that failed tells the others, which
/// would otherwise wait for a deadline.
fn agreed(
    control: &mut dyn Communicator,
    outcome: Result<Link, NcclError>,
    lack: &str,
) -> Result<Link, NcclError> {
    let mut states = vec![0u8; control.world_size()];
    let told = control.all_gather(&[u8::from(outcome.is_ok())], &mut states);
    let link = outcome?;
    told.map_err(NcclError::Control)?;
    match states.iter().position(|&state| state == 0) {
        None => Ok(link),
        Some(rank) => Err(NcclError::Peer { rank, reason: lack.to_owned() }),
    }
}

fn wait_connected(link: Link, timeout: Duration) -> Result<Link, NcclError> {
    let begun = Instant::now();
    loop {
        match link.enqueued() {
            Ok(Progress::Done) => return Ok(link),
            Ok(Progress::Waiting) if begun.elapsed() < timeout => POLLING.pause(begun.elapsed()),
            Ok(Progress::Waiting) => {
                link.handle.abort_within(timeout);
                return Err(NcclError::NotConnected {
                    timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
                });
            }
            Err(reason) => {
                link.handle.abort_within(timeout);
                return Err(NcclError::of_call("connecting the ranks")(reason));
            }
        }
    }
}

impl Greeting {
    fn of(opened: &Result<Site, NcclError>, scratch_bytes: usize) -> Self {
        let (mut own, text) = match opened {
            Err(error) => (Self::zeroed(), error.to_string()),
            Ok(site) => {
                let own = Self {
                    comes: 1,
                    version: site.version,
                    machine: machine(),
                    uuid: site.device.uuid,
                    device: site.device.index as u64,
                    scratch_bytes: scratch_bytes as u64,
                    ..Self::zeroed()
                };
                (own, site.device.name.clone())
            }
        };
        let room = own.text.as_flattened_mut();
        let mut len = text.len().min(room.len());
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        room[..len].copy_from_slice(&text.as_bytes()[..len]);
        own
    }

    fn text(&self) -> String {
        let text = String::from_utf8_lossy(self.text.as_flattened());
        text.trim_end_matches('\0').to_owned()
    }
}

/// Number that tells machines apart, and so GPUs of different machines with the same id.
fn machine() -> u64 {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mix = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    boot.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Refuses ranks that cannot work together; the error is the same on all of them.
fn judge(all: &[Greeting]) -> Result<(), NcclError> {
    if let Some(rank) = all.iter().position(|greeting| greeting.comes == 0) {
        return Err(NcclError::Peer { rank, reason: all[rank].text() });
    }
    for (rank, own) in all.iter().enumerate() {
        if own.version != all[0].version {
            return Err(NcclError::VersionsDiffer {
                rank,
                expected: version_text(all[0].version),
                found: version_text(own.version),
            });
        }
        if own.scratch_bytes != all[0].scratch_bytes {
            return Err(NcclError::ScratchDiffers {
                rank,
                expected: all[0].scratch_bytes,
                found: own.scratch_bytes,
            });
        }
        let gpu = |greeting: &Greeting| (greeting.machine, greeting.uuid);
        if let Some(first) = all[..rank].iter().position(|other| gpu(other) == gpu(own)) {
            return Err(NcclError::SharedDevice {
                first,
                second: rank,
                device: all[first].device as usize,
                name: all[first].text(),
            });
        }
    }
    Ok(())
}

/// Rewrites an error of making a subgroup as an error of the call `split`.
pub(crate) fn as_call_error(error: NcclError, rank: usize) -> CollectiveError {
    match error {
        NcclError::Control(error) => error,
        error => CollectiveError::engine(rank, "split", error),
    }
}

//! Launches on tensors in a framework's memory of the device. Each tensor has an address of its
//! own; records have addresses anyway.

mod kept;
mod parts;
pub(crate) mod tables;

use std::sync::{MutexGuard, PoisonError};

use cust::sys::{self, CUdeviceptr, CUevent};
use fusestep_launch::{
    BackendError, Buffer, Launch, LaunchReport, MAX_SUMS, Record, Reduce, TensorList,
    pack_reduction_of_tensors, pack_tensors,
};
use fusestep_tensor::{DeviceOrder, DeviceSliceMut, Role};

use crate::backend::CudaBackend;
use crate::buffer::DeviceBuffer;
use crate::checks::{argument_bytes, check_records, saturate};
use crate::host_copy::{self, HostCopy};
use crate::leaves::check_without_tensor_sums;
use crate::session::{Session, unavailable};
use crate::update_sums::check_without_update_sums;
use crate::{NAME, Result, checks, launch, reduce};

/// The place of one tensor on the device, as consecutive elements in the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    address: u64,
    len_bytes: usize,
}

impl DeviceTensor {
    /// The tensor at a device address, aligned to its elements at least: 16 bytes and more are
    /// faster. An address of 0 is one of 0 bytes.
    ///
    /// # Safety
    /// Until what is enqueued with it is done on the device:
    /// - the memory is allocated in the backend's context, `len_bytes` long, and holds initialised
    ///   elements of the list's dtype;
    /// - nothing writes it that is not ordered with the backend's stream, and if the kernel writes
    ///   it, nothing reads it either;
    /// - what the kernel writes overlaps no other tensor of the launch.
    ///
    /// If the launch is recorded, that holds for each replay of its graph.
    pub unsafe fn at(address: u64, len_bytes: usize) -> Self {
        Self { address, len_bytes }
    }

    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// A function that gives the place of one tensor, by the position of its parameter among the
/// caller's and its role. `None` stands for a tensor that the caller does not have. The function is
/// called for every part of a tensor and answers the same each time.
pub type LendOnDevice<'a> = &'a mut dyn FnMut(u32, Role) -> Option<DeviceTensor>;

impl CudaBackend {
    /// Enqueues a launch of a plan whose tensors are borrowed. `lend` is called for those lists of
    /// the kernel that `launch.lists` lacks.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a tensor that is not lent, or lies at an address that is
    /// not aligned to its elements; [`BackendError::OutOfBounds`] for one that is too short.
    /// Nothing is enqueued then. As [`fusestep_launch::Launches::launch`].
    /// # Cost
    /// As [`fusestep_launch::Launches::launch`] with tables in arguments: linear in tensors on the
    /// host, and allocates nothing once it has run.
    pub fn launch_borrowed(
        &self,
        launch: Launch<'_>,
        lend: LendOnDevice<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let control = self.control_address(launch.control)?;
        launch_in_arguments(self, &launch, control, lend)
    }

    /// Takes the sums that the launch's kernel defines over each borrowed tensor, at the tensor's
    /// position in the storage. Others may have other parts of the tensors: a launch with the sums
    /// over all parts ([`fusestep_launch::TensorSums::Host`]) updates by those.
    ///
    /// # Errors
    /// As [`CudaBackend::launch_borrowed`]; [`BackendError::Unavailable`] for a kernel that takes
    /// no sums; [`BackendError::OutOfBounds`] for fewer places than tensors.
    /// # Cost
    /// One launch for each batch; waits for the device.
    pub fn measure_borrowed(
        &self,
        launch: &Launch<'_>,
        lend: LendOnDevice<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        let control = self.control_address(launch.control)?;
        parts::measure(self, launch, control, lend, sums)
    }

    /// Enqueues a reduction of a plan whose gradients are borrowed.
    ///
    /// # Errors
    /// As [`CudaBackend::launch_borrowed`] and [`fusestep_launch::Launches::reduce`].
    pub fn reduce_borrowed(
        &self,
        reduce: Reduce<'_>,
        lend: LendOnDevice<'_>,
    ) -> Result<LaunchReport, BackendError> {
        reduce_in_arguments(self, &reduce, lend)
    }

    /// Begins to copy a borrowed tensor to the host, as [`CudaBackend::begin_read`] does.
    ///
    /// # Errors
    /// As there.
    pub fn begin_read_of(&self, tensor: DeviceTensor) -> Result<HostCopy, BackendError> {
        let DeviceTensor { address, len_bytes } = tensor;
        // SAFETY: who made the tensor has promised its memory until what is enqueued is done.
        unsafe { host_copy::begin_at(&self.session, &self.spare, address, len_bytes) }
    }

    /// Copies a borrowed tensor to memory of the device that is lent, such as a gradient's, in the
    /// order of the stream and of the memory's events.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for memory of another device or of another length;
    /// [`BackendError::Device`].
    pub fn copy_lent(&self, from: DeviceTensor, to: DeviceSliceMut<'_>) -> Result<()> {
        let (own, len_bytes) = (self.session.info.ordinal, to.len_bytes());
        if (to.ordinal(), from.len_bytes) != (own, len_bytes) {
            return Err(unavailable(format!(
                "a copy: expected {len_bytes} bytes on device {}, found {} on device {own}",
                to.ordinal(),
                from.len_bytes
            )));
        }
        let session = &self.session;
        let copying = || format!("copying {len_bytes} bytes within the device");
        let (ready, done) = match to.order() {
            DeviceOrder::HostWaits => (None, None),
            DeviceOrder::Events { ready, done } => (Some(ready), Some(done)),
        };
        // SAFETY: who lends the memory has promised its events, too.
        session.call(copying, |stream| unsafe {
            ready.map_or(sys::CUresult::CUDA_SUCCESS, |ready| {
                sys::cuStreamWaitEvent(stream, ready as CUevent, 0)
            })
        })?;
        if len_bytes > 0 {
            // SAFETY: who made the tensor and who lends the memory have promised both, which are
            // not the same, since the lent memory is borrowed alone.
            session.call(copying, |stream| unsafe {
                sys::cuMemcpyDtoDAsync_v2(to.address(), from.address, len_bytes, stream)
            })?;
        }
        match done {
            // SAFETY: as above.
            Some(done) => session
                .call(copying, |stream| unsafe { sys::cuEventRecord(done as CUevent, stream) }),
            None => session.synchronize(),
        }
    }

    /// Copies a borrowed f64 to a byte of a buffer, in the order of the stream.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] beyond the buffer; [`BackendError::Unavailable`] for a tensor
    /// of fewer bytes; [`BackendError::Device`].
    pub fn copy_number(
        &self,
        from: DeviceTensor,
        to: &mut dyn Buffer,
        offset_bytes: usize,
    ) -> Result<(), BackendError> {
        let to = DeviceBuffer::of_mut(&self.session, to)?;
        let place = to.range(offset_bytes, size_of::<f64>())?.start;
        copy_number(&self.session, from, place)
    }

    /// Sets a number of a buffer, in the order of the stream and without waiting for it.
    ///
    /// # Errors
    /// As [`CudaBackend::copy_number`].
    pub fn set_number(
        &self,
        to: &mut dyn Buffer,
        offset_bytes: usize,
        value: f64,
    ) -> Result<(), BackendError> {
        DeviceBuffer::of_mut(&self.session, to)?.set_f64(offset_bytes, value)
    }

    fn borrowed(&self) -> MutexGuard<'_, Vec<u64>> {
        self.borrowed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies a borrowed f64 to an address of the session's memory, in the order of the stream.
fn copy_number(session: &Session, from: DeviceTensor, to: CUdeviceptr) -> Result<()> {
    let len_bytes = size_of::<f64>();
    if from.len_bytes < len_bytes {
        let found = from.len_bytes;
        return Err(unavailable(format!("a number: expected {len_bytes} bytes, found {found}")));
    }
    let copying = || "copying a number within the device".to_owned();
    // SAFETY: who made the tensor has promised its memory; the callers have looked at the place,
    // which is not the tensor's.
    session.call(copying, |stream| unsafe {
        sys::cuMemcpyDtoDAsync_v2(to, from.address, len_bytes, stream)
    })
}

/// Enqueues a launch with its tables in arguments, under the control block at this address.
fn launch_in_arguments(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    control: u64,
    lend: LendOnDevice<'_>,
) -> Result<LaunchReport, BackendError> {
    if launch.tensor_sums.is_some() {
        return parts::launch(backend, launch, control, lend);
    }
    check_records_of(backend, launch)?;
    let mut tensors = backend.borrowed();
    look_up(backend, launch, lend, &mut tensors)?;
    let tensors = &tensors[..];
    launch::enqueue_batches(backend, launch, &|batch, bytes| {
        pack_tensors(launch, batch, tensors, control, bytes);
    })
}

/// Refuses a launch with its tables in arguments that goes beyond its memory or theirs.
fn check_records_of(backend: &CudaBackend, launch: &Launch<'_>) -> Result<()> {
    check_records_in(launch)?;
    for batch in launch.batches {
        checks::check_arguments(backend, argument_bytes(launch, batch))?;
    }
    Ok(())
}

/// Refuses a launch with a table in memory that goes beyond its memory, or has sums of others'.
fn check_launch(launch: &Launch<'_>) -> Result<()> {
    check_without_tensor_sums(launch)?;
    check_records_in(launch)
}

/// Refuses a launch that goes beyond its memory, or leaves sums.
fn check_records_in(launch: &Launch<'_>) -> Result<()> {
    check_without_update_sums(launch)?;
    checks::check_groups(launch)?;
    for batch in launch.batches {
        check_records(launch.lists, launch.firsts, launch.offsets, batch)?;
    }
    Ok(())
}

/// Finds the addresses of a launch's tensors, as [`fusestep_launch::pack_tensors`] takes them.
fn look_up(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    lend: LendOnDevice<'_>,
    tensors: &mut Vec<u64>,
) -> Result<()> {
    let declared = launch.kernel.lists();
    tensors.clear();
    tensors.resize(launch.offsets.len() * declared.len(), 0);
    for (at, list) in declared.iter().enumerate() {
        let kept = launch.lists.iter().position(|kept| kept.role() == list.role);
        let kept = match kept {
            Some(index) => {
                let buffer = launch.lists[index].buffer.as_ref();
                Some((backend.address(buffer)?, launch.first(index)))
            }
            None => None,
        };
        for record in launch.batches.iter().flat_map(|batch| &batch.records) {
            let tensor = record.tensor as usize;
            tensors[tensor * declared.len() + at] = match kept {
                Some((address, first)) => {
                    let (offset, stride) = (launch.offsets[tensor], list.stride());
                    // Modulo 2⁶⁴: a shard may begin inside of the tensor.
                    address
                        .wrapping_add(stride.bytes(offset.saturating_sub(first)))
                        .wrapping_sub(stride.bytes(first.saturating_sub(offset)))
                }
                None => {
                    let parameter = launch.members[tensor];
                    checked(lend(parameter, list.role), list, record, parameter)?
                }
            };
        }
    }
    Ok(())
}

/// Enqueues a reduction with its tables in arguments.
fn reduce_in_arguments(
    backend: &CudaBackend,
    reduce: &Reduce<'_>,
    lend: LendOnDevice<'_>,
) -> Result<LaunchReport, BackendError> {
    let mut tensors = backend.borrowed();
    look_up_gradients(reduce, lend, &mut tensors)?;
    let (kernel, tensors) = (reduce.kernel, &tensors[..]);
    reduce::enqueue_batches(backend, reduce, &|batch, partials, bytes| {
        pack_reduction_of_tensors(kernel, batch, tensors, partials, bytes);
    })
}

/// Finds the addresses of a reduction's gradients.
fn look_up_gradients(
    reduce: &Reduce<'_>,
    lend: LendOnDevice<'_>,
    tensors: &mut Vec<u64>,
) -> Result<()> {
    let list = reduce.kernel.list();
    tensors.clear();
    tensors.resize(reduce.offsets.len(), 0);
    for batch in reduce.batches {
        check_records(&[], &[], reduce.offsets, batch)?;
        for record in &batch.records {
            let tensor = record.tensor as usize;
            let parameter = reduce.members[tensor];
            let borrowed = lend(parameter, list.role);
            tensors[tensor] = checked(borrowed, &list, record, parameter)?;
        }
    }
    Ok(())
}

/// The checked address of a tensor, for a record of its elements.
fn checked(
    borrowed: Option<DeviceTensor>,
    list: &TensorList,
    record: &Record,
    parameter: u32,
) -> Result<u64, BackendError> {
    let role = list.role;
    let refused = |found: String| {
        let width = list.dtype.len_bytes();
        Err(unavailable(format!(
            "{role} of parameter {parameter}: expected {} at a device address that is a multiple \
             of {width}, found {found}",
            list.dtype
        )))
    };
    let Some(DeviceTensor { address, len_bytes }) = borrowed else {
        return refused("none".to_owned());
    };
    let width = list.dtype.len_bytes() as u64;
    let stride = list.stride();
    let (place, needed) = (stride.bytes(record.first_element), stride.bytes(record.numel));
    if place.saturating_add(needed) > len_bytes as u64 {
        return Err(BackendError::OutOfBounds {
            backend: NAME,
            offset_bytes: saturate(place),
            len_bytes: saturate(needed),
            found: len_bytes,
        });
    }
    if address == 0 || !address.is_multiple_of(width) {
        return refused(format!("address {address:#x}"));
    }
    if address.checked_add(len_bytes as u64).is_none() {
        return refused(format!("{len_bytes} bytes from address {address:#x} on"));
    }
    Ok(address)
}

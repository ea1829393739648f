//! Bytes of a call, on the host or on a device, and memory kept for another use.

use std::any::Any;
use std::ops::Range;

use fusestep_collective::{
    Buffers, Call, CollectiveError, Communicator, DeviceBuffers, DeviceCall, Operation,
};
use fusestep_launch::Buffer;
use fusestep_tensor::{DType, DeviceSliceMut};

/// Most bytes of the host that ranks on devices tell each other without these: no longer than that
/// would take to the device and back.
const CONTROL_BYTES: usize = 1 << 16;

/// Bytes in memory that a call can use.
pub(crate) enum Bytes<'a> {
    Host(&'a mut [u8]),
    Device(DeviceSliceMut<'a>),
}

impl<'a, T: AsMut<[u8]> + ?Sized> From<&'a mut T> for Bytes<'a> {
    fn from(bytes: &'a mut T) -> Self {
        Bytes::Host(bytes.as_mut())
    }
}

/// Kind of a call: its operation, the type of its elements and, where parts differ in length, how
/// many elements each rank has.
#[derive(Clone, Debug)]
pub(crate) struct CallKind {
    pub(crate) operation: Operation,
    pub(crate) dtype: DType,
    pub(crate) counts: Option<Vec<usize>>,
}

impl CallKind {
    /// A call in which all ranks have as many elements.
    pub(crate) fn even(operation: Operation, dtype: DType) -> Self {
        Self { operation, dtype, counts: None }
    }
}

impl<'a> Bytes<'a> {
    /// A part of a buffer; `None` beyond its end, and for a device's that was not handed over.
    pub(crate) fn of(buffer: &'a mut dyn Buffer, range: Range<usize>) -> Option<Bytes<'a>> {
        if buffer.host().is_some() {
            return buffer.host_mut()?.get_mut(range).map(Bytes::Host);
        }
        buffer.device_mut()?.part(range).map(Bytes::Device)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Bytes::Host(bytes) => bytes.len(),
            Bytes::Device(memory) => memory.len_bytes(),
        }
    }

    pub(crate) fn call(
        self,
        comm: &mut dyn Communicator,
        operation: Operation,
        dtype: DType,
        counts: Option<&[usize]>,
    ) -> Result<(), CollectiveError> {
        match self {
            Bytes::Host(bytes) => {
                let len_bytes = bytes.len();
                let call = Call { operation, dtype, counts, buffers: Buffers::InPlace(bytes) };
                on_host(comm, call, len_bytes)
            }
            Bytes::Device(memory) => comm.execute_on_device(DeviceCall {
                operation,
                dtype,
                counts,
                buffers: DeviceBuffers::InPlace(memory),
            }),
        }
    }
}

/// Makes a call on memory of the host, of so many bytes on every rank.
pub(crate) fn on_host(
    comm: &mut dyn Communicator,
    call: Call<'_>,
    len_bytes: usize,
) -> Result<(), CollectiveError> {
    match comm.control().filter(|_| len_bytes <= CONTROL_BYTES) {
        Some(control) => control.execute(call),
        None => comm.execute(call),
    }
}

/// The error of a rank of the world whose buffer is neither the host's nor handed over.
pub(crate) fn foreign(rank: usize) -> CollectiveError {
    CollectiveError::Refused {
        rank,
        operation: "bucket",
        reason: "expected host memory or a device's that was handed over, found others".to_owned(),
    }
}

/// Stand-in for a list's memory while all ranks or a stream use that memory.
#[derive(Debug)]
pub(crate) struct Elsewhere;

impl Buffer for Elsewhere {
    fn len_bytes(&self) -> usize {
        0
    }
    fn host(&self) -> Option<&[u8]> {
        None
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Takes the shortest memory that has at least so many bytes.
pub(crate) fn take_shortest(
    spare: &mut Vec<Box<dyn Buffer>>,
    len_bytes: usize,
) -> Option<Box<dyn Buffer>> {
    let lens = spare.iter().map(|memory| memory.len_bytes()).enumerate();
    let fits = lens.filter(|&(_, len)| len >= len_bytes);
    let (at, _) = fits.min_by_key(|&(_, len)| len)?;
    Some(spare.swap_remove(at))
}

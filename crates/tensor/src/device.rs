//! Memory of a device, as its owner lends it to others that work on the same device.

use std::marker::PhantomData;
use std::ops::Range;

/// The order between an owner's work on its memory and the work of others that borrow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceOrder {
    /// No work is under way when the memory is handed over. The borrower waits for the end of its
    /// own work before it returns.
    HostWaits,
    /// By two `CUevent`s of the device's primary context: work on the memory begins behind `ready`,
    /// and whoever borrows it records `done` behind that work. The host waits for neither.
    Events {
        /// Recorded by the owner.
        ready: u64,
        /// Recorded by the borrower.
        done: u64,
    },
}

/// Bytes of a device's memory, to be read and written.
///
/// Reading or writing the bytes is unsafe; it relies on the promises that [`DeviceSliceMut::new`]
/// asks for.
#[derive(Debug)]
pub struct DeviceSliceMut<'a> {
    ordinal: u32,
    address: u64,
    len_bytes: usize,
    order: DeviceOrder,
    memory: PhantomData<&'a mut [u8]>,
}

impl DeviceSliceMut<'_> {
    /// `len_bytes` bytes of device `ordinal` from `address` on, a `CUdeviceptr` of its primary
    /// context.
    ///
    /// # Safety
    /// The bytes are allocated there for as long as the slice lives, with events until `done` has
    /// come. Nobody else uses them meanwhile but in the order that `order` says. Its events live as
    /// long as the slice.
    pub unsafe fn new(ordinal: u32, address: u64, len_bytes: usize, order: DeviceOrder) -> Self {
        Self { ordinal, address, len_bytes, order, memory: PhantomData }
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The order between the owner's work on the bytes and the borrower's.
    pub fn order(&self) -> DeviceOrder {
        self.order
    }

    /// The bytes in `range`; `None` if it reaches beyond their end.
    pub fn part(self, range: Range<usize>) -> Option<Self> {
        let is_within = range.start <= range.end && range.end <= self.len_bytes;
        is_within.then(|| Self {
            address: self.address + range.start as u64,
            len_bytes: range.len(),
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_within_the_whole() {
        // SAFETY: nobody looks behind the address.
        let slice = || unsafe { DeviceSliceMut::new(1, 4096, 100, DeviceOrder::HostWaits) };
        let part = slice().part(10..30).unwrap();
        assert_eq!((part.ordinal(), part.address(), part.len_bytes()), (1, 4106, 20));
        assert_eq!(part.order(), DeviceOrder::HostWaits);
        assert_eq!(slice().part(100..100).unwrap().len_bytes(), 0);
        assert!(slice().part(90..101).is_none());
        #[expect(clippy::reversed_empty_ranges, reason = "that is the case")]
        let reversed = slice().part(30..10);
        assert!(reversed.is_none());
    }
}

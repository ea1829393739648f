//! A batch as the argument bytes that a device kernel reads.

use crate::{Batch, HEADER_BYTES, Launch};

/// Writes the arguments of one batch of `launch` into `out` and returns their length in bytes.
///
/// `addresses` are the lists' device addresses, in the kernel's order. The layout is that of [`crate::ArgumentLayout`],
/// little-endian; `kernels/multi_tensor.cuh` reads it.
///
/// # Panics
/// If `out` is shorter than the batch's argument bytes: batches are made for a limit, and `out` is as long as that limit.
pub fn pack(launch: &Launch<'_>, batch: &Batch, addresses: &[u64], out: &mut [u8]) -> usize {
    let layout = launch.kernel.argument_layout();
    let len_bytes = layout.bytes(batch.records.len(), batch.classes.len());
    assert!(
        len_bytes <= out.len() && addresses.len() == layout.lists,
        "a batch of {len_bytes} argument bytes and {} lists was made for other limits",
        layout.lists
    );
    let mut writer = Writer { out, at: 0 };
    writer.u32(batch.records.len() as u32);
    writer.u32(batch.classes.len() as u32);
    writer.u32(launch.limits.chunk_elements);
    writer.u32(launch.kernel.flags());
    debug_assert_eq!(writer.at, HEADER_BYTES);
    writer.bytes(launch.scalars);
    for &class in &batch.classes {
        let start = class as usize * layout.set_bytes;
        writer.bytes(&launch.sets[start..start + layout.set_bytes]);
    }
    for record in &batch.records {
        let first = launch.offsets[record.tensor as usize] + record.first_element;
        for (list, &address) in launch.lists.iter().zip(addresses) {
            writer.u64(address + first * list.dtype().len_bytes() as u64);
        }
        writer.u64(record.numel);
        writer.u32(record.first_chunk);
        writer.bytes(&record.set.to_le_bytes());
        writer.bytes(&[0; 2]);
    }
    debug_assert_eq!(writer.at, len_bytes);
    len_bytes
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }
}

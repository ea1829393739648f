//! A batch as the argument bytes that a device kernel reads.

use crate::{
    ArgumentLayout, Batch, ChangedRecord, FLAG_STOCHASTIC, HEADER_BYTES, Launch,
    MultiTensorReduction, ORIGIN_WORDS, Record,
};

/// Bytes of a conclusion's arguments before the rule's own: header, three addresses and the tensor
/// count.
pub const CONCLUSION_BYTES: usize = HEADER_BYTES + 4 * size_of::<u64>();

/// Device addresses of what a launch refers to.
#[derive(Clone, Copy, Debug)]
pub struct Addresses<'a> {
    /// The lists, in the kernel's order.
    pub lists: &'a [u64],
    /// The control block; 0 if there is none.
    pub control: u64,
}

/// Writes the arguments of one batch of `launch` into `out` and returns their length in bytes.
///
/// `addresses` are the device addresses of what the launch refers to. The layout is that of
/// [`crate::ArgumentLayout`], little-endian; `kernels/multi_tensor.cuh` reads it.
///
/// # Panics
/// If `out` is shorter than the batch's argument bytes: batches are made for a limit, and `out` is
/// as long as that limit.
pub fn pack(launch: &Launch<'_>, batch: &Batch, addresses: Addresses<'_>, out: &mut [u8]) -> usize {
    let words = addresses.lists.len().min(launch.lists.len());
    pack_records(launch, batch, addresses.control, words, out, |record, index| {
        let element = launch.offsets[record.tensor as usize] + record.first_element;
        let place = element.wrapping_sub(launch.first(index));
        addresses.lists[index] + launch.lists[index].stride().bytes(place)
    })
}

/// [`pack`] for tensors that lie anywhere; `launch.lists` has those that are kept. `tensors` has,
/// for each tensor, the address of its first element in each of the kernel's lists, in their order.
/// `control` is the address of the control block, 0 if there is none.
///
/// # Panics
/// As [`pack`].
pub fn pack_tensors(
    launch: &Launch<'_>,
    batch: &Batch,
    tensors: &[u64],
    control: u64,
    out: &mut [u8],
) -> usize {
    let declared = launch.kernel.lists();
    pack_records(launch, batch, control, declared.len(), out, |record, index| {
        let tensor = tensors[record.tensor as usize * declared.len() + index];
        let place = declared[index].stride().bytes(record.first_element);
        tensor.wrapping_add(place)
    })
}

/// Writes a batch of records with `lists` addresses each, which `address_of` gives.
fn pack_records(
    launch: &Launch<'_>,
    batch: &Batch,
    control: u64,
    lists: usize,
    out: &mut [u8],
    address_of: impl Fn(&Record, usize) -> u64,
) -> usize {
    let layout = launch.kernel.argument_layout();
    let len_bytes = layout.bytes(batch.records.len(), batch.groups.len());
    let flags = launch.kernel.flags();
    let origin = flags & FLAG_STOCHASTIC != 0;
    let words = lists + if origin { ORIGIN_WORDS } else { 0 };
    assert!(
        len_bytes <= out.len() && words == layout.lists,
        "a batch of {len_bytes} argument bytes and {} words per record was made for other limits",
        layout.lists
    );
    let mut writer = Writer { out, at: 0 };
    let counts = [batch.records.len() as u32, batch.groups.len() as u32];
    writer.header(counts, launch.limits.chunk_elements, flags, control);
    writer.bytes(launch.scalars);
    for &group in &batch.groups {
        let start = group as usize * layout.step_scalar_bytes;
        writer.bytes(&launch.step_scalars[start..start + layout.step_scalar_bytes]);
    }
    for record in &batch.records {
        for index in 0..lists {
            writer.u64(address_of(record, index));
        }
        if origin {
            writer.u64(launch.members[record.tensor as usize].into());
            writer.u64(record.first_element);
        }
        writer.place(record);
    }
    debug_assert_eq!(writer.at, len_bytes);
    len_bytes
}

/// Writes the arguments of one batch of a reduction into `out` and returns their length in bytes.
///
/// `list` is the address of the list, `partials` that of the batch's first partial sum.
///
/// # Panics
/// If `out` is shorter than the batch's argument bytes.
pub fn pack_reduction(
    kernel: &dyn MultiTensorReduction,
    batch: &Batch,
    offsets: &[u64],
    list: u64,
    partials: u64,
    out: &mut [u8],
) -> usize {
    let width = kernel.list().dtype.len_bytes() as u64;
    pack_reads(kernel, batch, partials, out, |record| {
        let first = offsets[record.tensor as usize] + record.first_element;
        list + first * width
    })
}

/// [`pack_reduction`] for tensors that lie anywhere, with the address of each tensor of the
/// storage.
///
/// # Panics
/// As [`pack_reduction`].
pub fn pack_reduction_of_tensors(
    kernel: &dyn MultiTensorReduction,
    batch: &Batch,
    tensors: &[u64],
    partials: u64,
    out: &mut [u8],
) -> usize {
    let width = kernel.list().dtype.len_bytes() as u64;
    pack_reads(kernel, batch, partials, out, |record| {
        tensors[record.tensor as usize].wrapping_add(record.first_element * width)
    })
}

fn pack_reads(
    kernel: &dyn MultiTensorReduction,
    batch: &Batch,
    partials: u64,
    out: &mut [u8],
    address_of: impl Fn(&Record) -> u64,
) -> usize {
    let layout: ArgumentLayout = kernel.argument_layout();
    let mut writer = Writer { out, at: 0 };
    // There are no hyper-parameters, so the groups that the records name take no bytes.
    let counts = [batch.records.len() as u32, 0];
    writer.header(counts, kernel.chunk_elements(), 0, 0);
    writer.u64(partials);
    for record in &batch.records {
        writer.u64(address_of(record));
        writer.place(record);
    }
    debug_assert_eq!(writer.at, layout.bytes(batch.records.len(), 0));
    writer.at
}

/// Writes the arguments of a conclusion into `out` and returns their length in bytes.
///
/// `addresses` are those of partial sums, tensors and sums; `control` that of the block.
///
/// # Panics
/// If `out` is shorter than the arguments.
pub fn pack_conclusion(
    addresses: [u64; 3],
    tensor_count: u64,
    control: u64,
    scalars: &[u8],
    out: &mut [u8],
) -> usize {
    let mut writer = Writer { out, at: 0 };
    writer.header([0, 0], 0, 0, control);
    for address in addresses {
        writer.u64(address);
    }
    writer.u64(tensor_count);
    debug_assert_eq!(writer.at, CONCLUSION_BYTES);
    writer.bytes(scalars);
    writer.at
}

/// The bytes of the table from which a device keeps the values of a batch before the update, and
/// sums up their changes behind it; `kernels/update_sums.cu` reads it.
///
/// `values` are the positions of the lists that make up a value, with their addresses; `sums` is
/// the address of the rows, and `changed` is as long as the batch's records.
///
/// # Panics
/// If the launch leaves no sums.
pub fn pack_update_sums(
    launch: &Launch<'_>,
    batch: &Batch,
    values: &[(usize, u64)],
    control: u64,
    sums: u64,
    changed: &[ChangedRecord],
) -> Vec<u8> {
    let rows = launch.update_sums.as_ref();
    let rows = rows.expect("the launch leaves sums over what it changes");
    let layout = ArgumentLayout { lists: values.len() + 3, scalar_bytes: 8, step_scalar_bytes: 0 };
    let mut out = vec![0; layout.bytes(batch.records.len(), 0)];
    let mut writer = Writer { out: &mut out, at: 0 };
    let counts = [batch.records.len() as u32, 0];
    writer.header(counts, launch.limits.chunk_elements, 0, control);
    writer.u64(sums);
    for (record, changed) in batch.records.iter().zip(changed) {
        let element = launch.offsets[record.tensor as usize] + record.first_element;
        for &(list, address) in values {
            let width = launch.lists[list].dtype().len_bytes() as u64;
            writer.u64(address + element.wrapping_sub(launch.first(list)) * width);
        }
        writer.u64(changed.kept);
        writer.u64(rows.row(record.tensor, record.first_element));
        writer.u64(changed.skipped);
        writer.place(record);
    }
    debug_assert_eq!(writer.at, out.len());
    push_chunks(&mut out, batch, launch.limits.chunk_elements);
    out
}

/// Appends the record of every chunk of a batch.
pub(crate) fn push_chunks(out: &mut Vec<u8>, batch: &Batch, chunk_elements: u32) {
    out.reserve(4 * batch.chunks as usize);
    for (index, record) in batch.records.iter().enumerate() {
        for _ in 0..chunks_of(record.numel, chunk_elements) {
            out.extend_from_slice(&(index as u32).to_le_bytes());
        }
    }
}

fn chunks_of(numel: u64, chunk_elements: u32) -> u32 {
    // A batch's chunks fit a u32 together.
    u32::try_from(numel.div_ceil(u64::from(chunk_elements))).unwrap_or(u32::MAX)
}

/// Argument bytes, written one part behind the other.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn header(
        &mut self,
        [records, groups]: [u32; 2],
        chunk_elements: u32,
        flags: u32,
        control: u64,
    ) {
        for value in [records, groups, chunk_elements, flags] {
            self.u32(value);
        }
        self.u64(control);
        debug_assert_eq!(self.at, HEADER_BYTES);
    }

    /// The part of a record behind its addresses.
    fn place(&mut self, record: &Record) {
        self.u64(record.numel);
        self.u32(record.first_chunk);
        self.bytes(&record.group.to_le_bytes());
        self.bytes(&[0; 2]);
    }

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

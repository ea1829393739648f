//! Tables in the device's memory: built once, launched with two addresses.

pub(crate) mod launch;

use std::any::Any;
use std::sync::{Arc, Mutex};

use fusestep_launch::{
    Addresses, ArgumentLayout, BackendError, Batch, Buffer, GroupValues, HEADER_BYTES, Launch,
    Reduce, ResidentTable, SquareSum, TensorSums, WORKSPACE_BYTES, Workspace, pack_launch_of_table,
    pack_reduction_table, pack_steps, pack_table, resident_step_scalars,
};

use crate::backend::CudaBackend;
use crate::buffer::{Allocation, DeviceBuffer};
use crate::checks::{check_end, check_groups, check_records};
use crate::entry::threads_for;
use crate::normed::{self, row_count, workspace};
use crate::reduce::read_list;
use crate::rows::Rows;
use crate::session::unavailable;
use crate::tensor_sums::{Place, workspaces_of_parts};
use crate::update_sums::{PlacedSums, check_update_sums};
use crate::{NAME, Result, tensor_sums, update_sums};

/// The tables of one launch, one for each batch.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    /// The addresses that the tables were built from: lists, control block and rows for update
    /// sums, then the element that each list begins with. For a reduction: its list and its first
    /// partial sum.
    addresses: Vec<u64>,
    /// The device entry of the kernel that the table was built for.
    entry: &'static str,
    batches: Vec<PlacedBatch>,
    elements: u64,
    does: Does,
    /// Memory besides lists whose addresses the tables have.
    memory: Vec<Arc<Allocation>>,
}

/// Work of the launches from a table, once its step scalars are derived.
#[derive(Debug)]
enum Does {
    /// Update, or read gradients.
    Run,
    /// Take sums over tensors and then update; the table holds the address of the rows.
    SumAndUpdate(Arc<Mutex<Rows>>),
    /// Place the sums of whole tensors, by launches with these arguments, and update parts of them.
    UpdateParts { rows: Arc<Mutex<Rows>>, places: Vec<Vec<u8>> },
    /// Take the sums of leaves.
    SumLeaves,
}

impl Does {
    fn rows(&self) -> Option<&Arc<Mutex<Rows>>> {
        match self {
            Does::SumAndUpdate(rows) | Does::UpdateParts { rows, .. } => Some(rows),
            Does::Run | Does::SumLeaves => None,
        }
    }
}

#[derive(Debug)]
struct PlacedBatch {
    /// The values that step scalars are derived from, and behind them the table.
    memory: DeviceBuffer,
    table: u64,
    /// The arguments of launches from the table.
    arguments: Vec<u8>,
    groups: u32,
    shape: Shape,
    sums: Option<PlacedSums>,
}

/// The grid of a batch's launch.
#[derive(Clone, Copy, Debug)]
struct Shape {
    threads: u32,
    blocks: u32,
}

impl ResidentTable for DeviceTable {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

pub(crate) fn place_launch(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    values: &[GroupValues],
) -> Result<DeviceTable, BackendError> {
    let addresses = launch_addresses(backend, launch)?;
    check_update_sums(launch)?;
    check_groups(launch)?;
    let mut memory = Vec::new();
    let place_rows = || backend.kernels().place_rows(row_count(launch)?);
    let indices = 0..launch.batches.len();
    let (does, workspaces, tensor_rows) = match (launch.kernel.normed(), launch.tensor_sums) {
        (None, _) => (Does::Run, Vec::new(), None),
        (Some(_), None) => {
            let (rows, address) = place_rows()?;
            let workspaces = indices.map(|index| workspace(launch, index, address));
            (Does::SumAndUpdate(rows), workspaces.collect(), Some(address))
        }
        (Some(_), Some(TensorSums::Device(sums))) => {
            let (rows, address) = place_rows()?;
            let places = tensor_sums::pack_places(backend, launch, address, sums)?;
            for buffer in [sums.sums, sums.tensors] {
                memory.push(Arc::clone(backend.device_buffer(buffer)?.allocation()));
            }
            let place = Place { rows: address, first_row: 0 };
            let workspaces = workspaces_of_parts(launch.batches, place).collect();
            (Does::UpdateParts { rows, places }, workspaces, None)
        }
        (Some(_), Some(TensorSums::Host(_))) => {
            return Err(unavailable(format!(
                "`{}`: expected sums over tensors on the device for a table, found those of \
                 the host; launch with arguments",
                launch.kernel.entry()
            )));
        }
    };
    let mut batches = place_batches(backend, launch, values, &addresses, &workspaces)?;
    let (lists, others) = addresses.split_at(launch.lists.len());
    for (index, placed) in batches.iter_mut().enumerate() {
        let [control, sums] = [others[0], others[1]];
        placed.sums =
            update_sums::place(backend, launch, index, lists, control, sums, tensor_rows)?;
    }
    Ok(DeviceTable {
        addresses,
        entry: launch.kernel.entry(),
        batches,
        elements: launch.batches.iter().map(Batch::elements).sum(),
        does,
        memory,
    })
}

/// Places tables of sums over leaves, as [`fusestep_launch::Tables::place_leaf_sums`] says.
pub(crate) fn place_leaves(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    values: &[GroupValues],
    rows: &dyn Buffer,
    first: u64,
) -> Result<DeviceTable, BackendError> {
    let (_, place) = tensor_sums::check_leaf_sums(backend, launch, rows, first)?;
    let addresses = launch_addresses(backend, launch)?;
    let workspaces: Vec<_> = workspaces_of_parts(launch.batches, place).collect();
    Ok(DeviceTable {
        batches: place_batches(backend, launch, values, &addresses, &workspaces)?,
        addresses,
        entry: launch.kernel.entry(),
        elements: 0,
        does: Does::SumLeaves,
        memory: vec![Arc::clone(backend.device_buffer(rows)?.allocation())],
    })
}

/// Places the tables of all batches; of a kernel with norms each with its workspace.
fn place_batches(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    values: &[GroupValues],
    addresses: &[u64],
    workspaces: &[Workspace],
) -> Result<Vec<PlacedBatch>, BackendError> {
    let step_scalars = resident_step_scalars(NAME, launch.kernel)?;
    let (lists, others) = addresses.split_at(launch.lists.len());
    let packed = Addresses { lists, control: others[0] };
    for batch in launch.batches {
        check_records(launch.lists, launch.firsts, launch.offsets, batch)?;
    }
    let place = |(index, batch): (usize, &Batch)| {
        let layout = launch.kernel.argument_layout();
        let steps = pack_steps(&step_scalars, layout, batch, values);
        let mut table = pack_table(launch, batch, packed);
        let mut shape = Shape { threads: threads_for(batch), blocks: batch.chunks };
        if let Some(workspace) = workspaces.get(index) {
            table[HEADER_BYTES..HEADER_BYTES + WORKSPACE_BYTES].copy_from_slice(&workspace.bytes());
            let (threads, blocks) = normed::shape(batch);
            shape = Shape { threads, blocks };
        }
        place_batch(backend, &steps, &table, layout, batch, shape)
    };
    launch.batches.iter().enumerate().map(place).collect()
}

fn place_batch(
    backend: &CudaBackend,
    steps: &[u8],
    table: &[u8],
    layout: ArgumentLayout,
    batch: &Batch,
    shape: Shape,
) -> Result<PlacedBatch, BackendError> {
    let mut memory = DeviceBuffer::zeroed(&backend.session, steps.len() + table.len())?;
    memory.write(0, &[steps, table].concat())?;
    let address = memory.address() + steps.len() as u64;
    Ok(PlacedBatch {
        table: address,
        memory,
        arguments: pack_launch_of_table(table, layout, address),
        // The batching loop counts them in 16 bits.
        groups: batch.groups.len() as u32,
        shape,
        sums: None,
    })
}

/// The lists' addresses, those of the control block and of the rows for update sums, or 0, and
/// the elements that the lists begin with.
fn launch_addresses(backend: &CudaBackend, launch: &Launch<'_>) -> Result<Vec<u64>, BackendError> {
    let count = launch.lists.len();
    let mut addresses = Vec::with_capacity(2 * count + 2);
    addresses.extend(&backend.list_addresses(launch)?[..count]);
    addresses.push(backend.control_address(launch.control)?);
    addresses.push(update_sums::address_of(backend, launch)?);
    addresses.extend((0..count).map(|list| launch.first(list)));
    Ok(addresses)
}

pub(crate) fn set_lr(backend: &CudaBackend, table: &mut dyn ResidentTable, lr: f64) -> Result<()> {
    let table = table.as_any_mut().downcast_mut::<DeviceTable>();
    let table = table.ok_or(BackendError::ForeignTable { backend: NAME })?;
    for batch in &mut table.batches {
        DeviceBuffer::of(&backend.session, &batch.memory)?;
        batch.memory.set_f64(0, lr)?;
    }
    Ok(())
}

pub(crate) fn place_reads(
    backend: &CudaBackend,
    reduce: &Reduce<'_>,
) -> Result<DeviceTable, BackendError> {
    let addresses = reduce_addresses(backend, reduce)?;
    let [list, partials] = addresses;
    let chunks: u64 = reduce.batches.iter().map(|b| u64::from(b.chunks)).sum();
    let width = size_of::<SquareSum>() as u64;
    let end = reduce.first_partial.saturating_add(chunks);
    check_end(end.saturating_mul(width), reduce.partials.len_bytes())?;
    let mut batches = Vec::with_capacity(reduce.batches.len());
    let mut next = partials;
    for batch in reduce.batches {
        let read = std::slice::from_ref(read_list(reduce)?);
        check_records(read, &[], reduce.offsets, batch)?;
        let table = pack_reduction_table(reduce, batch, list, next);
        let layout = reduce.kernel.argument_layout();
        let shape = Shape { threads: threads_for(batch), blocks: batch.chunks };
        batches.push(place_batch(backend, &[], &table, layout, batch, shape)?);
        next += u64::from(batch.chunks) * width;
    }
    Ok(DeviceTable {
        addresses: addresses.to_vec(),
        entry: reduce.kernel.entry(),
        batches,
        elements: 0,
        does: Does::Run,
        memory: Vec::new(),
    })
}

/// The addresses of the list and of the reduction's first partial sum.
fn reduce_addresses(backend: &CudaBackend, reduce: &Reduce<'_>) -> Result<[u64; 2], BackendError> {
    let list = backend.address(read_list(reduce)?.buffer.as_ref())?;
    let partials = backend.address(&*reduce.partials)?;
    let width = size_of::<SquareSum>() as u64;
    Ok([list, partials + reduce.first_partial * width])
}

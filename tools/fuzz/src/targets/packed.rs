//! Launches as the argument bytes and tables that a device reads, held to what their layout says.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_launch::{
    Access, Addresses, ArgumentLayout, Batch, FLAG_RESIDENT, FLAG_STOCHASTIC, GROUP_BYTES,
    GroupValues, HostRun, Launch, LaunchLimits, ListBuffer, Memory, MultiTensorKernel,
    ORIGIN_WORDS, ResidentStepScalars, STEPS_BYTES, TensorList, pack, pack_launch_of_table,
    pack_steps, pack_table, pack_tensors,
};
use fusestep_tensor::{DType, Role};

/// Groups of tensors.
const CLASSES: usize = 256;

/// Chunks beyond which a launch's table is not made: it has a word for each.
const MOST_CHUNKS: u32 = 1 << 16;

/// Where a launch's table and its control block lie.
const TABLE: u64 = 0x0123_4567_89ab_cdef;
const CONTROL: u64 = 0x0fed_cba9_8765_4321;

/// A kernel of any lists that does nothing.
struct Kernel {
    lists: Vec<TensorList>,
    layout: ArgumentLayout,
    flags: u32,
}

impl MultiTensorKernel for Kernel {
    fn stem(&self) -> &'static str {
        "fuzz"
    }
    fn entry(&self) -> &'static str {
        "fuzz_f32"
    }
    fn lists(&self) -> &[TensorList] {
        &self.lists
    }
    fn argument_layout(&self) -> ArgumentLayout {
        self.layout
    }
    fn flags(&self) -> u32 {
        self.flags
    }
    fn write_scalars(&self, _: &mut [u8]) {}
    fn write_step_scalars(&self, _: GroupValues, _: &mut [u8]) {}
    fn run_host(&self, _: HostRun<'_, '_>) {}
}

/// What batches are packed for: made once for an input.
pub(super) struct Packer {
    kernel: Kernel,
    limits: LaunchLimits,
    offsets: Vec<u64>,
    members: Vec<u32>,
    lists: Vec<ListBuffer>,
    firsts: Vec<u64>,
    scalars: Vec<u8>,
    step_scalars: Vec<u8>,
    addresses: Vec<u64>,
    out: Vec<u8>,
}

impl Packer {
    /// Of tensors with so many elements each.
    pub(super) fn new(
        layout: ArgumentLayout,
        limits: LaunchLimits,
        numels: impl Iterator<Item = u64>,
        rounds_at_random: bool,
    ) -> Result<Self, String> {
        let at_random = rounds_at_random && layout.lists >= ORIGIN_WORDS;
        let words = if at_random { ORIGIN_WORDS } else { 0 };
        let dtypes = [DType::F32, DType::BF16, DType::F64];
        let lists: Vec<TensorList> = (0..layout.lists - words)
            .map(|at| TensorList {
                role: Role::Param,
                dtype: dtypes[at % dtypes.len()],
                access: Access::ReadWrite,
            })
            .collect();
        let mut next = 64;
        let offsets = numels.map(|numel| {
            let offset = next;
            // One storage has no more elements than this; tensors may lie over each other here.
            next = if offset + numel > 1 << 51 { 64 } else { offset + numel };
            offset
        });
        let offsets: Vec<u64> = offsets.collect();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let buffers = lists.iter().map(|&list| {
            let buffer = backend.allocate(0).map_err(|error| error.to_string())?;
            Ok(ListBuffer { list, buffer })
        });
        Ok(Self {
            lists: buffers.collect::<Result<_, String>>()?,
            firsts: (0..lists.len() as u64).map(|list| list * 7).collect(),
            addresses: (1..=lists.len() as u64).map(|list| list << 56).collect(),
            kernel: Kernel { lists, layout, flags: if at_random { FLAG_STOCHASTIC } else { 0 } },
            limits,
            members: (0..offsets.len() as u32).rev().collect(),
            offsets,
            scalars: (0..layout.scalar_bytes).map(|at| at as u8).collect(),
            step_scalars: (0..layout.step_scalar_bytes * CLASSES)
                .map(|at| (at / 3) as u8)
                .collect(),
            out: vec![0xa5; limits.argument_bytes],
        })
    }

    /// Packs a batch in every way, and reads each again.
    pub(super) fn check(&mut self, batch: &Batch) -> Result<(), String> {
        let layout = self.kernel.layout;
        let expected = self.expected(batch, |packer, tensor, list| {
            let place = packer.offsets[tensor] - packer.firsts[list];
            packer.addresses[list] + place * packer.width(list)
        });
        let tensors: Vec<u64> =
            (0..self.offsets.len() * self.kernel.lists.len()).map(|at| (at as u64) << 20).collect();
        let of_tensors = self.expected(batch, |packer, tensor, list| {
            tensors[tensor * packer.kernel.lists.len() + list]
        });
        let launch = Launch {
            kernel: &self.kernel,
            batches: &[],
            offsets: &self.offsets,
            members: &self.members,
            lists: &mut self.lists,
            firsts: &self.firsts,
            scalars: &self.scalars,
            control: None,
            grad_sums: None,
            tensor_sums: None,
            update_sums: None,
            step_scalars: &self.step_scalars,
            limits: self.limits,
        };
        let (lists, control) = (&self.addresses[..], CONTROL);
        let length = pack(&launch, batch, Addresses { lists, control }, &mut self.out);
        same("arguments", &self.out[..length], &expected)?;
        let length = pack_tensors(&launch, batch, &tensors, control, &mut self.out);
        same("arguments of tensors", &self.out[..length], &of_tensors)?;
        if batch.chunks <= MOST_CHUNKS {
            let table = pack_table(&launch, batch, Addresses { lists, control });
            check_table(&table, &expected, batch, (layout, self.limits))?;
        }
        check_steps(layout, batch)
    }

    fn width(&self, list: usize) -> u64 {
        self.kernel.lists[list].dtype.len_bytes() as u64
    }

    /// The bytes as the layout describes them; `base` is a tensor's address in a list.
    fn expected(&self, batch: &Batch, base: impl Fn(&Self, usize, usize) -> u64) -> Vec<u8> {
        let mut out = Vec::new();
        let flags = self.kernel.flags;
        let counts = [batch.records.len() as u32, batch.groups.len() as u32];
        for value in [counts[0], counts[1], self.limits.chunk_elements, flags] {
            out.extend(value.to_le_bytes());
        }
        out.extend(CONTROL.to_le_bytes());
        out.extend(&self.scalars);
        let step_scalar_bytes = self.kernel.layout.step_scalar_bytes;
        for &group in &batch.groups {
            out.extend(
                &self.step_scalars[group as usize * step_scalar_bytes..][..step_scalar_bytes],
            );
        }
        for record in &batch.records {
            let tensor = record.tensor as usize;
            for list in 0..self.kernel.lists.len() {
                let address = base(self, tensor, list) + record.first_element * self.width(list);
                out.extend(address.to_le_bytes());
            }
            if flags & FLAG_STOCHASTIC != 0 {
                out.extend(u64::from(self.members[tensor]).to_le_bytes());
                out.extend(record.first_element.to_le_bytes());
            }
            out.extend(record.numel.to_le_bytes());
            out.extend(record.first_chunk.to_le_bytes());
            out.extend(u32::from(record.group).to_le_bytes());
        }
        out
    }
}

/// A table is the arguments and the record of every chunk; its launch has their head.
fn check_table(
    table: &[u8],
    arguments: &[u8],
    batch: &Batch,
    (layout, limits): (ArgumentLayout, LaunchLimits),
) -> Result<(), String> {
    let mut expected = arguments.to_vec();
    for (index, record) in batch.records.iter().enumerate() {
        for _ in 0..record.numel.div_ceil(limits.chunk_elements.into()) {
            expected.extend((index as u32).to_le_bytes());
        }
    }
    same("table", table, &expected)?;
    if table.len() != arguments.len() + 4 * batch.chunks as usize {
        return Err(format!("a table without a word for each of {} chunks", batch.chunks));
    }
    let mut head = arguments[..layout.bytes(0, 0)].to_vec();
    head[15] |= (FLAG_RESIDENT >> 24) as u8;
    head.extend(TABLE.to_le_bytes());
    same("launch of a table", &pack_launch_of_table(table, layout, TABLE), &head)
}

/// What step scalars are derived from: as many bytes as are said, and the steps taken before.
fn check_steps(layout: ArgumentLayout, batch: &Batch) -> Result<(), String> {
    let step_scalars = ResidentStepScalars::new("fuzz_sets_f32", &[0.5, 0.25], 9);
    let values: Vec<GroupValues> = (0..CLASSES as u64)
        .map(|group| GroupValues {
            lr: 0.125,
            lr_scale: group as f64,
            weight_decay: None,
            trust: None,
            step: group,
        })
        .collect();
    let steps = pack_steps(&step_scalars, layout, batch, &values);
    if steps.len() != STEPS_BYTES + batch.groups.len() * GROUP_BYTES {
        return Err(format!("{} bytes of steps", steps.len()));
    }
    for (group, bytes) in batch.groups.iter().zip(steps[STEPS_BYTES..].chunks(GROUP_BYTES)) {
        let taken = u64::from(*group).saturating_sub(1);
        same("steps of a group", &bytes[..8], &f64::from(*group).to_le_bytes())?;
        same("steps of a group", &bytes[16..24], &taken.to_le_bytes())?;
    }
    Ok(())
}

fn same(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let at = found.iter().zip(expected).position(|(found, expected)| found != expected);
    let (found, expected) = (found.len(), expected.len());
    Err(format!("{what}: expected {expected} bytes, found {found}, other ones from {at:?} on"))
}

//! Storages of random tensors, and launches over parts of them.

use std::num::NonZeroUsize;
use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_cpu::CpuBackend;
use fusestep_launch::{
    Batch, Buffer, GroupValues, Launch, LaunchLimits, ListBuffer, MultiTensorKernel, Precision,
    Record, UpdateRule,
};
use fusestep_tensor::{DType, Role};
use half::{bf16, f16};

/// Records of one batch: few, so that launches have several batches.
const RECORDS: usize = 3;

/// Tensors of a storage and the bytes of all lists of a kernel.
pub(crate) struct Storage {
    pub(crate) kernel: Box<dyn MultiTensorKernel>,
    pub(crate) offsets: Vec<u64>,
    pub(crate) numels: Vec<u64>,
    pub(crate) members: Vec<u32>,
    pub(crate) scalars: Vec<u8>,
    pub(crate) step_scalars: Vec<u8>,
    /// In the kernel's order.
    pub(crate) lists: Vec<Vec<u8>>,
    pub(crate) elements: u64,
}

impl Storage {
    /// Tensors of these lengths, each behind a gap of at most 63 elements.
    pub(crate) fn new(
        rule: &dyn UpdateRule,
        (dtype, precision): (DType, Precision),
        numels: &[u64],
    ) -> Self {
        let kernel = rule.kernel(dtype, precision).unwrap();
        let layout = kernel.argument_layout();
        let mut offsets = Vec::new();
        let mut elements: u64 = 0;
        for numel in numels {
            offsets.push(elements);
            elements = (elements + numel).next_multiple_of(64);
        }
        let mut scalars = vec![0; layout.scalar_bytes];
        kernel.write_scalars(&mut scalars);
        let mut step_scalars = vec![0; 2 * layout.step_scalar_bytes];
        let of_groups = step_scalars.chunks_exact_mut(layout.step_scalar_bytes);
        for (step_scalars, weight_decay) in of_groups.zip([None, Some(0.0)]) {
            let values =
                GroupValues { lr: 0.01, lr_scale: 1.5, weight_decay, trust: None, step: 3 };
            kernel.write_step_scalars(values, step_scalars);
        }
        let lists = kernel.lists().iter().enumerate();
        let lists = lists.map(|(index, list)| {
            let positive = list.role == Role::Moment2;
            values(list.dtype, elements, index as u64 + 1, positive)
        });
        let count = numels.len() as u32;
        Self {
            lists: lists.collect(),
            // No parameter has its tensor's number.
            members: (0..count).map(|tensor| 3 * (count - tensor)).collect(),
            kernel,
            offsets,
            numels: numels.to_vec(),
            scalars,
            step_scalars,
            elements,
        }
    }

    pub(crate) fn width(&self, list: usize) -> usize {
        self.kernel.lists()[list].dtype.len_bytes()
    }

    pub(crate) fn position(&self, role: Role) -> usize {
        let lists = self.kernel.lists();
        lists.iter().position(|list| list.role == role).unwrap()
    }

    /// The batches of what lies in these elements of the storage.
    pub(crate) fn batches(&self, elements: &Range<u64>) -> Vec<Batch> {
        let mut records = Vec::new();
        for (tensor, (&offset, &numel)) in self.offsets.iter().zip(&self.numels).enumerate() {
            let start = offset.max(elements.start);
            let end = (offset + numel).min(elements.end);
            if start < end {
                records.push(Record {
                    tensor: tensor as u32,
                    first_element: start - offset,
                    numel: end - start,
                    first_chunk: 0,
                    group: (tensor % 2) as u16,
                });
            }
        }
        let batches = records.chunks(RECORDS).map(|records| Batch {
            records: records.to_vec(),
            groups: vec![0, 1],
            chunks: 0,
        });
        batches.collect()
    }

    /// A launch over these batches; sums, control and rows are the caller's to add.
    pub(crate) fn launch<'a>(
        &'a self,
        batches: &'a [Batch],
        lists: &'a mut [ListBuffer],
        firsts: &'a [u64],
    ) -> Launch<'a> {
        Launch {
            kernel: self.kernel.as_ref(),
            batches,
            offsets: &self.offsets,
            members: &self.members,
            lists,
            firsts,
            scalars: &self.scalars,
            control: None,
            grad_sums: None,
            tensor_sums: None,
            update_sums: None,
            step_scalars: &self.step_scalars,
            limits: LaunchLimits::default(),
        }
    }

    /// All lists as buffers that no backend has allocated.
    pub(crate) fn buffers(&self) -> Vec<ListBuffer> {
        let lists = self.kernel.lists().iter().zip(&self.lists);
        lists.map(|(&list, bytes)| ListBuffer { list, buffer: buffer(bytes) }).collect()
    }
}

/// Memory with these bytes.
pub(crate) fn buffer(bytes: &[u8]) -> Box<dyn Buffer> {
    let mut memory = HostMemory::zeroed(bytes.len()).unwrap();
    memory.bytes_mut().copy_from_slice(bytes);
    Box::new(memory)
}

/// The bytes of all lists.
pub(crate) fn bytes(lists: &[ListBuffer]) -> Vec<Vec<u8>> {
    let bytes = lists.iter().map(|list| list.buffer.host().unwrap());
    bytes.map(<[u8]>::to_vec).collect()
}

pub(crate) fn backend(threads: usize) -> CpuBackend {
    CpuBackend::new(NonZeroUsize::new(threads).unwrap())
}

/// Random numbers of many magnitudes as elements of this type.
pub(crate) fn values(dtype: DType, numel: u64, seed: u64, positive: bool) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::new();
    for _ in 0..numel {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (state >> 32) as f64 / f64::from(u32::MAX) - 0.5;
        let x = x * 2f64.powi(-((state >> 20) as i32 % 5));
        push(dtype, if positive { x.abs() } else { x }, &mut bytes);
    }
    bytes
}

/// Appends one element.
pub(crate) fn push(dtype: DType, x: f64, bytes: &mut Vec<u8>) {
    match dtype {
        DType::F32 => bytes.extend((x as f32).to_le_bytes()),
        DType::F64 => bytes.extend(x.to_le_bytes()),
        DType::F16 => bytes.extend(f16::from_f64(x).to_le_bytes()),
        DType::BF16 => bytes.extend(bf16::from_f64(x).to_le_bytes()),
        // Remainders: any bits.
        _ => bytes.extend(&x.to_le_bytes()[3..3 + dtype.len_bytes()]),
    }
}

//! Parts of tensors updated by sums over the whole of each, which the device folds from leaves and
//! adds up.

use fusestep_lars_momentum::Lars;
use fusestep_launch::{
    Backend, Batchable, Buffer, CHUNK_LEAVES, CHUNK_UNITS, ChunkSums, DeviceSums, FoldLeaves,
    GroupValues, LEAF_ELEMENTS, Launch, LaunchLimits, Launches, ListBuffer, MAX_SUMS, Memory,
    MultiTensorKernel, Precision, ROW_VALUES, TensorPartials, TensorSums, UpdateRule, batches,
    leaf_place, tree_sum,
};
use fusestep_tensor::DType;

use crate::common::{cpu, cuda};

/// Chunks of each tensor: nothing, a group or less, more than one, and more than 32 groups.
const CHUNKS: [u64; 6] = [0, 1, 3, 32, 65, 1_029];

/// The kernel of LARS, which takes two sums.
fn kernel() -> Box<dyn MultiTensorKernel> {
    let lars = Lars { lr: 0.5, ..Lars::default() };
    // In f64 a sum's last bit shows.
    lars.kernel(DType::F64, Precision::default()).unwrap()
}

/// A buffer of the backend with these bytes.
fn buffer(backend: &dyn Backend, bytes: &[u8]) -> Box<dyn Buffer> {
    let mut buffer = backend.allocate(bytes.len()).unwrap();
    backend.write(buffer.as_mut(), 0, bytes).unwrap();
    buffer
}

/// Tables of the chunks of all tensors; what each chunk has of leaves is for `leaves` to say.
fn tables(leaves: impl Fn(u64) -> u64) -> (Vec<TensorPartials>, Vec<TensorPartials>) {
    let (mut tensors, mut chunks, mut next) = (Vec::new(), Vec::new(), 0);
    for count in CHUNKS {
        let first = chunks.len() as u64;
        tensors.push(TensorPartials { first, count });
        for chunk in first..first + count {
            let count = leaves(chunk);
            chunks.push(TensorPartials { first: next, count });
            next += count;
        }
    }
    (tensors, chunks)
}

/// Sums that are not alike. Adding up the first in another order, or rounded otherwise, gives
/// another; the second is exact, so that no quotient of them hides it.
fn sums(at: u64) -> [f64; MAX_SUMS] {
    [1.0 / (at as f64 + 3.0), (at % 7 + 1) as f64 / 1024.0]
}

/// The sum of a chunk's leaves, by halves.
fn by_halves(mut leaves: [f64; CHUNK_LEAVES]) -> f64 {
    let mut count = CHUNK_LEAVES;
    while count > 1 {
        count /= 2;
        for leaf in 0..count {
            leaves[leaf] += leaves[leaf + count];
        }
    }
    leaves[0]
}

/// The sums of every chunk, folded from leaves by the host.
fn folded(chunks: &[TensorPartials]) -> Vec<[f64; MAX_SUMS]> {
    let of_chunk = |chunk: &TensorPartials| {
        std::array::from_fn(|sum| {
            let mut lanes = [0.0; CHUNK_LEAVES];
            for (leaf, lane) in (chunk.first..chunk.first + chunk.count).zip(&mut lanes) {
                *lane = sums(leaf)[sum];
            }
            by_halves(lanes)
        })
    };
    chunks.iter().map(of_chunk).collect()
}

#[test]
fn chunks_are_folded_from_leaves_wherever_these_lie() {
    let backend = cuda();
    // Chunks of all leaves, of more than half, of a few and of one.
    let (_, chunks) = tables(|chunk| [64, 33, 7, 1, 32][chunk as usize % 5]);
    let leaves = chunks.iter().map(|chunk| chunk.count).sum::<u64>();
    // Three leaves of every row are taken, in no order of theirs.
    let count = leaves.div_ceil(3);
    let place = |leaf: u64| (count - 1 - leaf / 3, [5, 0, 7][leaf as usize % 3]);
    let mut rows = vec![f64::NAN; (count * ROW_VALUES) as usize];
    let mut index = Vec::new();
    for leaf in 0..leaves {
        let (row, unit) = place(leaf);
        let at = (row * ROW_VALUES) as usize + unit * MAX_SUMS;
        rows[at..at + MAX_SUMS].copy_from_slice(&sums(leaf));
        index.push(leaf_place(row, unit as u64).unwrap());
    }
    let mut partials = backend.allocate(size_of::<[f64; MAX_SUMS]>() * chunks.len()).unwrap();
    let fold = |partials: &mut dyn Buffer| {
        backend.fold_leaves(FoldLeaves {
            leaves: buffer(&backend, bytemuck::cast_slice(&rows)).as_ref(),
            index: Some(buffer(&backend, bytemuck::cast_slice(&index)).as_ref()),
            places: buffer(&backend, bytemuck::cast_slice(&chunks)).as_ref(),
            partials,
        })
    };
    fold(partials.as_mut()).unwrap();
    let mut found = vec![[f64::NAN; MAX_SUMS]; chunks.len()];
    let bytes = bytemuck::cast_slice_mut(&mut found);
    backend.read(partials.as_ref(), 0, bytes).unwrap();
    assert_eq!(found, folded(&chunks));
    let mut short = backend.allocate(partials.len_bytes() - 8).unwrap();
    assert!(fold(short.as_mut()).is_err(), "beyond its end");
}

/// Elements of a record: one, several leaves, and more than a chunk; of very many one each.
fn numel(record: u64, records: u64) -> u64 {
    match record {
        _ if records > 100 => 1,
        7 => 65_536 + 5,
        _ => [1, 1025, 40][record as usize % 3],
    }
}

/// The lists of the kernel, where the part of one record lies behind that of the record before, and
/// where each record's tensor would begin.
fn lists(
    backend: &dyn Backend,
    kernel: &dyn MultiTensorKernel,
    records: u64,
) -> (Vec<ListBuffer>, Vec<u64>) {
    let mut offsets: Vec<u64> = Vec::new();
    let mut end = 0;
    for record in 0..records {
        offsets.push(end + LEAF_ELEMENTS * records - LEAF_ELEMENTS * record);
        end += numel(record, records);
    }
    let elements = end + LEAF_ELEMENTS * records;
    let lists = kernel.lists().iter().enumerate().map(|(index, &list)| {
        let value = |at: u64| ((at * 37 + index as u64) % 1_009) as f64 * 0.003 - 1.5;
        let bytes: Vec<u8> = (0..elements).flat_map(|at| value(at).to_le_bytes()).collect();
        let buffer = buffer(backend, &bytes);
        ListBuffer { list, buffer }
    });
    (lists.collect(), offsets)
}

/// Updates parts of tensors; the sums are the host's, or to be added up by a device.
fn updated(backend: &dyn Backend, records: u64, on_device: bool) -> Vec<Vec<u8>> {
    let kernel = kernel();
    let layout = kernel.argument_layout();
    let limits = LaunchLimits::default().of(kernel.as_ref());
    let parts = (0..records).map(|record| Batchable {
        tensor: record as u32,
        // Parts in the midst of tensors.
        first_element: LEAF_ELEMENTS * record,
        numel: numel(record, records),
        group: 0,
    });
    let batches = batches("test", parts, layout, limits).unwrap();
    let (mut lists, offsets) = lists(backend, kernel.as_ref(), records);
    let mut scalars = vec![0; layout.scalar_bytes];
    let mut step_scalars = vec![0; layout.step_scalar_bytes];
    kernel.write_scalars(&mut scalars);
    let values = GroupValues {
        // So much that what is updated hangs on the sums to the last bit.
        lr: 1e4,
        lr_scale: 1.0,
        weight_decay: Some(0.01),
        trust: None,
        step: 1,
    };
    kernel.write_step_scalars(values, &mut step_scalars);
    // Each record is of another parameter than its tensor's number says.
    let members: Vec<u32> = (0..records).map(|r| ((r + 4) % 6) as u32).collect();
    let (tensors, _) = tables(|_| 0);
    let chunks: Vec<[f64; MAX_SUMS]> = (0..CHUNKS.iter().sum()).map(sums).collect();
    let of_param = |&param: &u32| {
        let TensorPartials { first, count } = tensors[param as usize];
        tree_sum(count as usize, |at| chunks[first as usize + at])
    };
    let host: Vec<[f64; MAX_SUMS]> = members.iter().map(of_param).collect();
    let on_backend = buffer(backend, bytemuck::cast_slice(&chunks));
    let tensors = buffer(backend, bytemuck::cast_slice(&tensors));
    for _ in 0..2 {
        let launch = Launch {
            kernel: kernel.as_ref(),
            batches: &batches,
            offsets: &offsets,
            members: &members,
            lists: &mut lists,
            firsts: &[],
            scalars: &scalars,
            control: None,
            grad_sums: None,
            tensor_sums: Some(if on_device {
                TensorSums::Device(ChunkSums {
                    sums: on_backend.as_ref(),
                    tensors: tensors.as_ref(),
                })
            } else {
                TensorSums::Host(&host)
            }),
            update_sums: None,
            step_scalars: &step_scalars,
            limits,
        };
        backend.launch(launch).unwrap();
    }
    let read = |list: &ListBuffer| {
        let mut bytes = vec![0; list.buffer.len_bytes()];
        backend.read(list.buffer.as_ref(), 0, &mut bytes).unwrap();
        bytes
    };
    lists.iter().map(read).collect()
}

#[test]
fn parts_are_updated_by_the_sums_that_the_device_adds_up() {
    for records in [1, 12] {
        let expected = updated(&cpu(), records, false);
        assert!(updated(&cuda(), records, false) == expected, "{records}");
        let backend = cuda();
        assert!(updated(&backend, records, true) == expected, "{records}");
        // Rows have the sums of other records still, which count for nothing.
        updated(&backend, 101, true);
        assert!(updated(&backend, records, true) == expected, "{records}");
        assert_eq!(backend.take_skipped().unwrap(), 0);
    }
}

/// More records than one launch places the sums of.
#[test]
fn sums_are_placed_for_any_number_of_records() {
    let records = 2_044 + 3;
    assert!(updated(&cuda(), records, true) == updated(&cpu(), records, false));
}

#[test]
fn a_row_has_no_more_than_its_units() {
    assert_eq!(leaf_place(0, 3), Some(3));
    assert_eq!(leaf_place(2, 0), Some(18));
    assert_eq!(leaf_place(u64::MAX / 2, CHUNK_UNITS - 1), None);
}

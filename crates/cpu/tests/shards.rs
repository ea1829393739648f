//! Laws of launches over parts of a storage: the bits are those of one launch over all of it.

#[allow(dead_code, reason = "each suite uses what it needs")]
mod common;

use std::ops::Range;

use common::{Storage, backend, buffer, bytes, push};
use fusestep_amp::norm_kernel;
use fusestep_cpu::CpuBackend;
use fusestep_elementwise::fold;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{
    BackendError, CHUNK_ELEMENTS, CHUNK_LEAVES, ControlBlock, GradDType, HostCall, LEAF_ELEMENTS,
    Launches, LeafSquares, ListBuffer, MAX_LISTS, MAX_SUMS, Master, Precision, Rounding, SquareSum,
    StateDType, TensorSums, UnitSums, UpdateRule, UpdateSums, tree_sum,
};
use fusestep_simd::Level;
use fusestep_tensor::{DType, Role};

/// Lengths around those of leaves, chunks and what a pool shares.
const NUMELS: [u64; 9] = [5, 1024, 0, 70_001, 1, 140_000, 1023, 131_073, 2049];

const F32: (DType, Precision) = (
    DType::F32,
    Precision {
        master: Master::None,
        state: StateDType::Compute,
        rounding: Rounding::Nearest,
        grad: GradDType::Param,
    },
);

fn bf16(master: Master, rounding: Rounding) -> (DType, Precision) {
    let precision = Precision { master, rounding, ..Precision::default() };
    (DType::BF16, precision)
}

const STOCHASTIC: Rounding = Rounding::Stochastic { seed: 77 };

/// Ends of shards: within tensors at multiples of `of` elements from their start, or between them.
fn shards(storage: &Storage, of: u64) -> Vec<Range<u64>> {
    let cut = |tensor: usize, at: u64| storage.offsets[tensor] + at * of;
    let cuts =
        [0, cut(3, 3), cut(3, 11), storage.offsets[5], cut(7, 1), cut(7, 1), storage.elements];
    cuts.windows(2).map(|ends| ends[0]..ends[1]).collect()
}

/// Parameters and gradients whole, the state of shards one behind the other, the last one first.
struct Sharded {
    lists: Vec<ListBuffer>,
    shards: Vec<Range<u64>>,
    /// For each shard the element that each list's memory begins with.
    firsts: Vec<Vec<u64>>,
}

impl Sharded {
    fn new(storage: &Storage, shards: Vec<Range<u64>>) -> Self {
        let mut lists = storage.buffers();
        let mut place = 0u64;
        let mut firsts = vec![Vec::new(); shards.len()];
        for (shard, firsts) in shards.iter().zip(&mut firsts).rev() {
            let first = shard.start.wrapping_sub(place);
            let kernel = storage.kernel.lists().iter();
            *firsts = kernel
                .map(|list| match list.role {
                    Role::Param | Role::Grad => 0,
                    _ => first,
                })
                .collect();
            place += shard.end - shard.start;
        }
        for (index, list) in lists.iter_mut().enumerate() {
            if !matches!(list.role(), Role::Param | Role::Grad) {
                let width = list.dtype().len_bytes() as u64;
                let shards = shards.iter().rev();
                let parts = shards.map(|s| (s.start * width) as usize..(s.end * width) as usize);
                let whole = &storage.lists[index];
                let moved: Vec<u8> = parts.flat_map(|part| whole[part].to_vec()).collect();
                list.buffer = buffer(&moved);
            }
        }
        Self { lists, shards, firsts }
    }

    /// The lists as they would lie whole.
    fn whole(&self, storage: &Storage) -> Vec<Vec<u8>> {
        let mut whole = storage.lists.clone();
        for (index, (whole, list)) in whole.iter_mut().zip(&self.lists).enumerate() {
            let (bytes, width) = (list.buffer.host().unwrap(), storage.width(index) as u64);
            for (shard, firsts) in self.shards.iter().zip(&self.firsts) {
                let place = shard.start.wrapping_sub(firsts[index]);
                let len = ((shard.end - shard.start) * width) as usize;
                let at = (shard.start * width) as usize;
                let from = (place * width) as usize;
                whole[at..at + len].copy_from_slice(&bytes[from..from + len]);
            }
        }
        whole
    }
}

/// The sums over every leaf of a shard, put where those of the whole storage lie.
fn take_leaf_sums(
    storage: &Storage,
    sharded: &mut Sharded,
    control: Option<&ControlBlock>,
    backend: &CpuBackend,
) -> Vec<[f64; MAX_SUMS]> {
    let leaves = |tensor: usize| storage.numels[tensor].div_ceil(LEAF_ELEMENTS) as usize;
    let mut all: Vec<Vec<[f64; MAX_SUMS]>> =
        (0..storage.numels.len()).map(|tensor| vec![[0.0; MAX_SUMS]; leaves(tensor)]).collect();
    let control = control.map(|control| buffer(bytemuck::bytes_of(control)));
    for (shard, firsts) in sharded.shards.iter().zip(&sharded.firsts) {
        let batches = storage.batches(shard);
        let records = || batches.iter().flat_map(|batch| &batch.records);
        let count: u64 = records().map(|r| r.numel.div_ceil(LEAF_ELEMENTS)).sum();
        let mut sums = vec![[f64::NAN; MAX_SUMS]; count as usize];
        let mut launch = storage.launch(&batches, &mut sharded.lists, firsts);
        launch.control = control.as_deref();
        backend.leaf_sums(&launch, &mut sums).unwrap();
        let mut sums = sums.into_iter();
        for record in records() {
            let first = (record.first_element / LEAF_ELEMENTS) as usize;
            let count = record.numel.div_ceil(LEAF_ELEMENTS) as usize;
            let places = &mut all[record.tensor as usize][first..first + count];
            places.fill_with(|| sums.next().unwrap());
        }
    }
    all.iter().map(|leaves| fold_tensor(leaves)).collect()
}

/// The sums over a tensor from those over its leaves, which fold to chunks.
fn fold_tensor(leaves: &[[f64; MAX_SUMS]]) -> [f64; MAX_SUMS] {
    let chunks: Vec<&[[f64; MAX_SUMS]]> = leaves.chunks(CHUNK_LEAVES).collect();
    tree_sum(chunks.len(), |at| {
        std::array::from_fn(|sum| {
            let mut of_chunk = [0.0; CHUNK_LEAVES];
            for (place, leaf) in of_chunk.iter_mut().zip(chunks[at]) {
                *place = leaf[sum];
            }
            fold(of_chunk)
        })
    })
}

/// One launch over everything, with this control block; returns the lists and the tensors skipped.
fn launch_whole(storage: &Storage, control: Option<&ControlBlock>) -> (Vec<Vec<u8>>, u64) {
    let backend = backend(1).at_level(Level::PORTABLE);
    let mut lists = storage.buffers();
    let batches = storage.batches(&(0..storage.elements));
    let control = control.map(|control| buffer(bytemuck::bytes_of(control)));
    let mut launch = storage.launch(&batches, &mut lists, &[]);
    launch.control = control.as_deref();
    backend.launch(launch).unwrap();
    (bytes(&lists), backend.take_skipped().unwrap())
}

fn check(storage: &Storage, control: Option<&ControlBlock>) {
    let (expected, _) = launch_whole(storage, control);
    assert_ne!(expected, storage.lists, "nothing was updated");
    let normed = storage.kernel.normed().is_some();
    for threads in [1, 3] {
        let backend = backend(threads);
        let of = if normed { LEAF_ELEMENTS } else { 777 };
        let mut sharded = Sharded::new(storage, shards(storage, of));
        let mut sums = Vec::new();
        if normed {
            sums = take_leaf_sums(storage, &mut sharded, control, &backend);
        }
        let control = control.map(|control| buffer(bytemuck::bytes_of(control)));
        for (shard, firsts) in sharded.shards.iter().zip(&sharded.firsts) {
            let batches = storage.batches(shard);
            let mut launch = storage.launch(&batches, &mut sharded.lists, firsts);
            launch.control = control.as_deref();
            launch.tensor_sums = normed.then_some(TensorSums::Host(&sums));
            let report = backend.launch(launch).unwrap();
            let elements: u64 = batches.iter().map(|batch| batch.elements()).sum();
            assert_eq!(report.elements, elements);
        }
        let found = sharded.whole(storage);
        let entry = storage.kernel.entry();
        for (list, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let differ = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(differ, None, "{entry}, {threads} threads, list {list}");
        }
    }
}

fn scaled() -> ControlBlock {
    ControlBlock { grad_factor: 0.37, ..ControlBlock::default() }
}

#[test]
fn shards_of_element_wise_rules_are_the_whole() {
    let (adam, sgd) = (Adam::default(), Sgd::with_momentum());
    let rules: [&dyn UpdateRule; 2] = [&adam, &sgd];
    for rule in rules {
        for kind in [
            F32,
            bf16(Master::F32, Rounding::Nearest),
            bf16(Master::Remainder, Rounding::Nearest),
            bf16(Master::None, STOCHASTIC),
        ] {
            let storage = Storage::new(rule, kind, &NUMELS);
            check(&storage, None);
            check(&storage, Some(&scaled()));
        }
    }
}

#[test]
fn shards_of_rules_with_sums_are_the_whole() {
    let (lars, lamb) = (Lars::default(), Lamb::default());
    let rules: [&dyn UpdateRule; 2] = [&lars, &lamb];
    for rule in rules {
        for kind in [F32, bf16(Master::F32, Rounding::Nearest)] {
            let storage = Storage::new(rule, kind, &NUMELS);
            check(&storage, None);
            check(&storage, Some(&scaled()));
        }
    }
}

#[test]
fn whole_tensors_of_rules_with_sums_lie_anywhere() {
    let storage = Storage::new(&Lars::default(), F32, &NUMELS);
    let (expected, _) = launch_whole(&storage, None);
    let ends = [0, 3, 5, 9].map(|tensor| storage.offsets.get(tensor).copied());
    let ends = ends.map(|end| end.unwrap_or(storage.elements));
    let shards = ends.windows(2).map(|ends| ends[0]..ends[1]).collect();
    let mut sharded = Sharded::new(&storage, shards);
    let backend = backend(3);
    for (shard, firsts) in sharded.shards.iter().zip(&sharded.firsts) {
        let batches = storage.batches(shard);
        let launch = storage.launch(&batches, &mut sharded.lists, firsts);
        backend.launch(launch).unwrap();
    }
    assert!(sharded.whole(&storage) == expected);
}

#[test]
fn a_tensor_whose_sums_are_not_finite_is_skipped_on_every_rank() {
    for rule in [&Lars::default() as &dyn UpdateRule, &Lamb::default()] {
        let mut storage = Storage::new(rule, F32, &NUMELS);
        let grad = storage.position(Role::Grad);
        let mut nan = Vec::new();
        push(DType::F32, f64::NAN, &mut nan);
        let at = (storage.offsets[3] as usize + 7) * 4;
        storage.lists[grad][at..at + 4].copy_from_slice(&nan);
        let (expected, skipped) = launch_whole(&storage, None);
        assert_eq!(skipped, 1);
        let backend = backend(2);
        let mut sharded = Sharded::new(&storage, shards(&storage, LEAF_ELEMENTS));
        let sums = take_leaf_sums(&storage, &mut sharded, None, &backend);
        for (shard, firsts) in sharded.shards.iter().zip(&sharded.firsts) {
            let batches = storage.batches(shard);
            let mut launch = storage.launch(&batches, &mut sharded.lists, firsts);
            launch.tensor_sums = Some(TensorSums::Host(&sums));
            backend.launch(launch).unwrap();
        }
        assert!(sharded.whole(&storage) == expected);
        // Tensor 3 lies in three shards and counts in the one where it begins.
        assert_eq!(backend.take_skipped().unwrap(), 1);
    }
}

#[test]
fn leaf_sums_fold_to_the_sums_of_chunks_in_every_format() {
    let numel = u64::from(CHUNK_ELEMENTS) - 1025;
    for rule in [&Lars::default() as &dyn UpdateRule, &Lamb::default()] {
        for (dtype, precision) in [
            F32,
            (DType::F64, Precision::default()),
            (DType::F16, Precision::default()),
            bf16(Master::None, Rounding::Nearest),
            bf16(Master::F32, Rounding::Nearest),
            bf16(Master::Remainder, Rounding::Nearest),
            bf16(Master::None, STOCHASTIC),
        ] {
            let storage = Storage::new(rule, (dtype, precision), &[numel]);
            let normed = storage.kernel.normed().unwrap();
            let mut lists: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
            for (index, (list, bytes)) in lists.iter_mut().zip(&storage.lists).enumerate() {
                *list = &bytes[..numel as usize * storage.width(index)];
            }
            let call = HostCall {
                level: Level::PORTABLE,
                scalars: &storage.scalars,
                grad_factor: 0.37,
                step_scalars: &storage.step_scalars,
                changes: None,
                squares: None,
            };
            let expected = normed.chunk_sums(call, 0, lists, [true; MAX_SUMS]);
            let mut sharded = Sharded::new(&storage, vec![0..5120, 5120..storage.elements]);
            let control = Some(&scaled());
            let found = take_leaf_sums(&storage, &mut sharded, control, &backend(2));
            let bits = |sums: [f64; MAX_SUMS]| sums.map(f64::to_bits);
            assert_eq!(bits(found[0]), bits(expected), "{dtype:?}, {precision:?}");
            assert!(expected[0] > 0.0);
        }
    }
}

#[test]
fn a_shut_gate_leaves_sums_of_zero() {
    let storage = Storage::new(&Lamb::default(), F32, &NUMELS);
    let mut sharded = Sharded::new(&storage, shards(&storage, LEAF_ELEMENTS));
    let shut = ControlBlock { found: 1, ..ControlBlock::default() };
    let sums = take_leaf_sums(&storage, &mut sharded, Some(&shut), &backend(1));
    assert_eq!(sums, [[0.0; MAX_SUMS]; NUMELS.len()]);
}

#[test]
fn squares_of_leaves_are_those_of_the_kernel_leaf_by_leaf() {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let storage = Storage::new(&Sgd::default(), (dtype, Precision::default()), &NUMELS);
        let kernel = norm_kernel(dtype).unwrap();
        let grad = storage.position(Role::Grad);
        let shard = storage.offsets[3] + 1024..storage.offsets[7] + 2048;
        let batches = storage.batches(&shard);
        let width = storage.width(grad);
        let window = shard.start as usize * width..shard.end as usize * width;
        let mut lists = storage.buffers();
        lists[grad].buffer = buffer(&storage.lists[grad][window]);
        let leaves = LeafSquares {
            kernel: kernel.as_ref(),
            batches: &batches,
            offsets: &storage.offsets,
            list: &lists[grad],
            first: shard.start,
        };
        let whole = &storage.lists[grad];
        let mut expected = Vec::new();
        for (place, numel) in leaves.places() {
            let at = (shard.start + place) as usize * width;
            let leaf = &whole[at..at + numel as usize * width];
            expected.push(kernel.run_host(Level::PORTABLE, leaf));
        }
        for threads in [1, 3] {
            let backend = backend(threads);
            let mut sums = vec![SquareSum::default(); expected.len()];
            backend.leaf_squares(leaves, &mut sums).unwrap();
            assert_eq!(sums, expected, "{dtype:?}, {threads} threads");
            sums.push(SquareSum::default());
            let refused = backend.leaf_squares(leaves, &mut sums).unwrap_err();
            assert!(matches!(refused, BackendError::OutOfBounds { .. }));
        }
    }
}

#[test]
fn sums_over_changes_of_shards_cut_at_chunks_are_those_of_the_whole() {
    let storage = Storage::new(&Adam::default(), F32, &NUMELS);
    let mut firsts = vec![0];
    for numel in &storage.numels {
        firsts.push(firsts.last().unwrap() + numel.div_ceil(u64::from(CHUNK_ELEMENTS)));
    }
    let count = *firsts.last().unwrap() as usize;
    let run = |cuts: &[u64], threads| {
        let shards = cuts.windows(2).map(|ends| ends[0]..ends[1]).collect();
        let mut sharded = Sharded::new(&storage, shards);
        let mut rows = buffer(&vec![0; count * size_of::<UnitSums>()]);
        let backend = backend(threads);
        for (shard, of_lists) in sharded.shards.iter().zip(&sharded.firsts) {
            let batches = storage.batches(shard);
            let mut launch = storage.launch(&batches, &mut sharded.lists, of_lists);
            launch.update_sums = Some(UpdateSums { rows: rows.as_mut(), firsts: &firsts });
            backend.launch(launch)?;
        }
        Ok::<_, BackendError>((sharded.whole(&storage), rows.host().unwrap().to_vec()))
    };
    let cut = storage.offsets[5] + u64::from(CHUNK_ELEMENTS);
    let expected = run(&[0, storage.elements], 1).unwrap();
    assert!(expected.1.iter().any(|&byte| byte != 0));
    for threads in [1, 3] {
        let found = run(&[0, storage.offsets[3], cut, storage.elements], threads);
        assert!(found.unwrap() == expected, "{threads} threads");
    }
    let refused = run(&[0, cut + 1024, storage.elements], 1).unwrap_err();
    assert!(refused.to_string().contains("begins with element 66560"));
}

#[test]
fn a_list_that_does_not_hold_its_shard_and_parts_without_sums_are_refused() {
    for rule in [&Adam::default() as &dyn UpdateRule, &Lamb::default()] {
        let storage = Storage::new(rule, F32, &[4096]);
        let mut lists = storage.buffers();
        let before = bytes(&lists);
        let batches = storage.batches(&(1024..4096));
        let sums = [[1.0; MAX_SUMS]];
        for firsts in [[0, 0, 1, 0], [0, 1025, 0, 0], [2000, 0, 0, 0]] {
            // What begins later than it should lacks the first element, what begins earlier the
            // last.
            let firsts = firsts.map(|first| match first {
                1 => 0u64.wrapping_sub(1),
                first => first,
            });
            let mut launch = storage.launch(&batches, &mut lists, &firsts);
            launch.tensor_sums = storage.kernel.normed().map(|_| TensorSums::Host(&sums));
            let refused = backend(1).launch(launch).unwrap_err();
            assert!(matches!(refused, BackendError::OutOfBounds { .. }));
        }
        assert!(bytes(&lists) == before);
        if storage.kernel.normed().is_some() {
            let launch = storage.launch(&batches, &mut lists, &[]);
            let refused = backend(1).launch(launch).unwrap_err();
            assert!(refused.to_string().contains("found tensor 0 from element 1024 on"));
        }
    }
}

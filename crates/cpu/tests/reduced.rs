//! Law of reduction and update in one pass: the bits of an all-reduce and a launch after it.

#[allow(dead_code, reason = "each suite uses what it needs")]
mod common;

use common::{Storage, backend, buffer, push, values};
use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Communicator, Options, ReduceOp, ReduceUpdate, Replica, reduce_slices, run_ranks,
};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_launch::{
    BackendError, ControlBlock, HostLaunches, Launches, ListBuffer, Master, Precision, Replicas,
    Replicated, Rounding, SumsOfRanks, UnitSums, UpdateRule, UpdateSums,
};
use fusestep_simd::Level;
use fusestep_tensor::{DType, Role};
use half::{bf16, f16};

/// Elements before the first one of a rank's memory, so that no cache line begins with it.
const LEAD: usize = 3;

/// The storage and every rank's gradients.
struct Case {
    storage: Storage,
    grads: Vec<Vec<u8>>,
    /// Elements of each rank's block.
    counts: Vec<usize>,
    control: Option<ControlBlock>,
}

/// What is left of a step: each list whole, NaN with one payload.
type Outcome = Vec<Vec<u8>>;

impl Case {
    fn new(rule: &dyn UpdateRule, kind: (DType, Precision), numels: &[u64], ranks: usize) -> Self {
        let storage = Storage::new(rule, kind, numels);
        let numel = storage.elements as usize;
        // No rank's block begins with a cache line, and some have a tensor's end within.
        let end = |rank: usize| match rank {
            0 => 0,
            rank if rank == ranks => numel,
            rank => (numel * rank / ranks + 13).min(numel),
        };
        let grads = (0..ranks).map(|rank| {
            let mut grads = values(kind.0, storage.elements, 100 + rank as u64, false);
            for (at, bad) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().enumerate() {
                // Infinities of both signs meet, and NaN stands on one rank alone.
                let element = (numel / 2 + 5 * at * usize::from(rank == 0)) % numel;
                if numel > 64 {
                    let mut bytes = Vec::new();
                    push(kind.0, bad, &mut bytes);
                    grads[element * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
                }
            }
            grads
        });
        Self {
            counts: (0..ranks).map(|rank| end(rank + 1) - end(rank)).collect(),
            grads: grads.collect(),
            storage,
            control: None,
        }
    }

    fn dtype(&self) -> DType {
        self.storage.kernel.lists()[self.storage.position(Role::Grad)].dtype
    }

    /// Averages first, then one launch of everything.
    fn sums_and_update(&self) -> Outcome {
        let storage = &self.storage;
        let grads: Vec<&[u8]> = self.grads.iter().map(Vec::as_slice).collect();
        let mut averages = vec![0; grads[0].len()];
        let op = ReduceOp::Average;
        reduce_slices(Level::PORTABLE, self.dtype(), op, &grads, &mut averages);
        let mut lists = storage.buffers();
        let grad = storage.position(Role::Grad);
        lists[grad].buffer = buffer(&averages);
        let batches = storage.batches(&(0..storage.elements));
        let control = self.control.map(|control| buffer(bytemuck::bytes_of(&control)));
        let mut launch = storage.launch(&batches, &mut lists, &[]);
        launch.control = control.as_deref();
        let backend = backend(1).at_level(Level::PORTABLE);
        backend.launch(launch).unwrap();
        let mut found = common::bytes(&lists);
        found[grad].clear();
        self.canonical(found)
    }

    /// Each rank's outcome; it has state of its own block, others have what they had.
    fn in_one_pass(&self, threads: usize, level: Level) -> Vec<Outcome> {
        let ranks = run_ranks(self.grads.len(), &Options::default(), |mut comm| {
            self.rank(&mut comm, backend(threads).at_level(level))
        });
        let ranks = ranks.unwrap().into_iter().map(Result::unwrap);
        ranks.map(|found| self.canonical(found)).collect()
    }

    fn rank(&self, comm: &mut dyn Communicator, backend: CpuBackend) -> Outcome {
        let (storage, rank) = (&self.storage, comm.rank());
        let (param, grad) = (storage.position(Role::Param), storage.position(Role::Grad));
        let first: usize = self.counts[..rank].iter().sum();
        let elements = first as u64..(first + self.counts[rank]) as u64;
        let mut lists = self.own_lists(first, self.counts[rank]);
        let batches = storage.batches(&elements);
        let mut params = behind_lead(&storage.lists[param], storage.width(param));
        let grads = behind_lead(&self.grads[rank], storage.width(grad));
        let control = self.control.map(|control| buffer(bytemuck::bytes_of(&control)));
        let firsts = [elements.start; 8];
        let call = ReduceUpdate {
            grad_dtype: self.dtype(),
            grads: &grads.bytes()[LEAD * storage.width(grad)..],
            replicas: fusestep_collective::Replicas::from_iter([Replica {
                dtype: storage.kernel.lists()[param].dtype,
                elements: 1,
                bytes: &mut params.bytes_mut()[LEAD * storage.width(param)..],
            }]),
            counts: &self.counts,
        };
        comm.reduce_update(call, &mut |mut memory| {
            let replicas = Replicas {
                sums: SumsOfRanks::Average,
                rank: memory.rank,
                first: elements.start,
                grads: &memory.grads,
                lists: &mut [Replicated { list: param, ranks: &mut memory.replicas[0] }],
            };
            let mut launch = storage.launch(&batches, &mut lists, &firsts[..]);
            launch.control = control.as_deref();
            let report = backend.launch_reduced(launch, replicas).unwrap();
            let covered = batches.iter().map(|batch| batch.elements()).sum::<u64>();
            assert_eq!(report.elements, covered);
        })
        .unwrap();
        let mut found = storage.lists.clone();
        found[grad].clear();
        found[param] = params.bytes()[LEAD * storage.width(param)..].to_vec();
        for (index, list) in lists.iter().enumerate() {
            if index != param && index != grad {
                let bytes = list.buffer.host().unwrap();
                let at = first * storage.width(index);
                found[index][at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
        found
    }

    /// State of a block; parameters and gradients have no memory.
    fn own_lists(&self, first: usize, numel: usize) -> Vec<ListBuffer> {
        let storage = &self.storage;
        let lists = storage.kernel.lists().iter().enumerate();
        let lists = lists.map(|(index, &list)| {
            let width = storage.width(index);
            let bytes = match list.role {
                Role::Param | Role::Grad => &[],
                _ => &storage.lists[index][first * width..(first + numel) * width],
            };
            ListBuffer { list, buffer: buffer(bytes) }
        });
        lists.collect()
    }

    fn canonical(&self, mut lists: Outcome) -> Outcome {
        for (bytes, list) in lists.iter_mut().zip(self.storage.kernel.lists()) {
            one_nan(bytes, list.dtype);
        }
        lists
    }

    /// Every rank's parameters and its own state are those of separate passes.
    fn check(&self, name: &str) {
        let expected = self.sums_and_update();
        let param = self.storage.position(Role::Param);
        let widest = Level::detect();
        for (threads, level) in [(1, widest), (3, widest), (2, Level::PORTABLE)] {
            let ranks = self.counts.len();
            let name = format!("{name}, {ranks} ranks of {threads} threads, {level}");
            for (rank, found) in self.in_one_pass(threads, level).iter().enumerate() {
                let first: usize = self.counts[..rank].iter().sum();
                for (list, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let width = self.storage.width(list);
                    let own = first * width..(first + self.counts[rank]) * width;
                    let of = if list == param || found.is_empty() { 0..found.len() } else { own };
                    let differ =
                        (found[of.clone()].iter()).zip(&expected[of]).position(|(a, b)| a != b);
                    assert_eq!(differ, None, "{name}: list {list} of rank {rank}");
                }
            }
        }
    }
}

/// Memory that begins with [`LEAD`] elements of nothing.
fn behind_lead(bytes: &[u8], width: usize) -> HostMemory {
    let mut memory = HostMemory::zeroed(LEAD * width + bytes.len()).unwrap();
    memory.bytes_mut()[LEAD * width..].copy_from_slice(bytes);
    memory
}

/// Gives every NaN the same payload: payloads are outside the numeric contract.
fn one_nan(bytes: &mut [u8], dtype: DType) {
    let width = dtype.len_bytes();
    for element in bytes.chunks_exact_mut(width) {
        let is_nan = match dtype {
            DType::F32 => f32::from_le_bytes(element.try_into().unwrap()).is_nan(),
            DType::F16 => f16::from_le_bytes(element.try_into().unwrap()).is_nan(),
            DType::BF16 => bf16::from_le_bytes(element.try_into().unwrap()).is_nan(),
            _ => false,
        };
        if is_nan {
            let mut nan = Vec::new();
            push(dtype, f64::NAN, &mut nan);
            element.copy_from_slice(&nan);
        }
    }
}

fn kinds() -> [(DType, Precision); 4] {
    let of = |master, rounding| Precision { master, rounding, ..Precision::default() };
    [
        (DType::F32, Precision::default()),
        (DType::F16, Precision::default()),
        (DType::BF16, of(Master::F32, Rounding::Nearest)),
        (DType::BF16, of(Master::None, Rounding::Stochastic { seed: 5 })),
    ]
}

#[test]
fn one_pass_is_an_all_reduce_and_a_launch() {
    for kind in kinds() {
        for ranks in 1..=4 {
            for numel in [1, 1023, 1024, 1025, 65_537] {
                let case = Case::new(&Adam::default(), kind, &[numel], ranks);
                case.check(&format!("{kind:?}, {numel}"));
            }
        }
    }
}

#[test]
fn many_tensors_and_parameters_past_the_caches() {
    let numels = [1, 1023, 0, 300_001, 64, 1025, 7, 900_000, 33];
    for kind in kinds() {
        for ranks in [1, 2, 3] {
            Case::new(&Sgd::with_momentum(), kind, &numels, ranks).check(&format!("{kind:?}"));
        }
    }
}

#[test]
fn the_control_block_scales_and_stops() {
    let mut case = Case::new(&Adam::default(), kinds()[0], &[5000, 70_000], 2);
    let plain = case.sums_and_update();
    case.control = Some(ControlBlock { grad_factor: 0.25, ..ControlBlock::default() });
    assert!(case.sums_and_update() != plain);
    case.check("scaled");
    case.control = Some(ControlBlock { found: 1, ..ControlBlock::default() });
    case.check("stopped");
    let mut untouched = case.storage.lists.clone();
    untouched[case.storage.position(Role::Grad)].clear();
    let untouched = case.canonical(untouched);
    assert!(case.in_one_pass(1, Level::detect()).iter().all(|found| *found == untouched));
}

#[test]
fn elements_between_those_of_the_batches_stay_as_they_are() {
    let storage = Storage::new(&Sgd::with_momentum(), kinds()[0], &[70, 200_000, 70]);
    let mut batches = storage.batches(&(0..storage.elements));
    batches[0].records.remove(1);
    let (mut own, mut other) = (storage.lists[0].clone(), storage.lists[0].clone());
    other[280..800_000].fill(9);
    let before = (own.clone(), other.clone());
    let mut lists = storage.buffers();
    let grads: &[u8] = &storage.lists[1];
    let replicas = Replicas {
        sums: SumsOfRanks::Average,
        rank: 0,
        first: 0,
        grads: &[grads, grads],
        lists: &mut [Replicated { list: 0, ranks: &mut [&mut own, &mut other] }],
    };
    let launch = storage.launch(&batches, &mut lists, &[]);
    let report = backend(1).launch_reduced(launch, replicas).unwrap();
    assert_eq!(report.elements, 140);
    let covered = storage.offsets[2] as usize * 4..storage.offsets[2] as usize * 4 + 280;
    assert!(own[..280] == other[..280] && own[..280] != before.0[..280]);
    assert!(own[covered.clone()] == other[covered.clone()]);
    assert!(own[280..covered.start] == before.0[280..covered.start]);
    assert!(other[280..covered.start] == before.1[280..covered.start]);
}

#[test]
fn several_sums_of_a_rank_are_added_along_the_tree() {
    let storage = Storage::new(&Adam::default(), kinds()[0], &[100]);
    let batches = storage.batches(&(0..100));
    let grads: &[u8] = &storage.lists[1];
    let stepped = |sums, grads: &[&[u8]]| {
        let mut lists = storage.buffers();
        let (mut own, mut other) = (storage.lists[0].clone(), storage.lists[0].clone());
        let ranks: &mut [&mut [u8]] = &mut [&mut own, &mut other];
        let lists_of_ranks = &mut [Replicated { list: 0, ranks }];
        let replicas = Replicas { sums, rank: 0, first: 0, grads, lists: lists_of_ranks };
        let launch = storage.launch(&batches, &mut lists, &[]);
        backend(1).launch_reduced(launch, replicas).map(|_| {
            assert!(own == other);
            own
        })
    };
    let along = |merges| SumsOfRanks::Along { divisor: 3.0, merges };
    let expected = stepped(SumsOfRanks::Average, &[grads, grads]).unwrap();
    let halves = SumsOfRanks::Along { divisor: 2.0, merges: &[0, 1] };
    assert!(stepped(halves, &[grads, grads]).unwrap() == expected);
    // Of four sums, whatever ranks bring them.
    let found = stepped(SumsOfRanks::Along { divisor: 4.0, merges: &[0, 1, 0, 2] }, &[grads; 4]);
    assert!(found.unwrap() == stepped(SumsOfRanks::Average, &[grads, grads]).unwrap());
    let plain = stepped(SumsOfRanks::Tree(2.0), &[grads, grads]).unwrap();
    assert!(plain == expected);
    for merges in [&[0, 1][..], &[1, 1, 0], &[0, 0, 1], &[0, 1, 2], &[]] {
        let error = stepped(along(merges), &[grads; 3]).unwrap_err().to_string();
        assert!(error.contains("after which one sum is left, found"), "{merges:?}: {error}");
    }
}

#[test]
fn what_has_no_place_in_one_pass_is_refused() {
    let refused = |rule: &dyn UpdateRule, of: &dyn Fn(&mut usize, &mut u64), sums: bool| {
        let storage = Storage::new(rule, kinds()[0], &[100]);
        let batches = storage.batches(&(0..100));
        let (mut rank, mut first) = (0, 0);
        of(&mut rank, &mut first);
        let mut params = storage.lists[0].clone();
        let mut lists = storage.buffers();
        let mut rows = buffer(&[0; size_of::<UnitSums>()]);
        let mut launch = storage.launch(&batches, &mut lists, &[]);
        launch.update_sums = sums.then_some(UpdateSums { rows: rows.as_mut(), firsts: &[0, 1] });
        let replicas = Replicas {
            sums: SumsOfRanks::Average,
            rank,
            first,
            grads: &[&storage.lists[1]],
            lists: &mut [Replicated { list: 0, ranks: &mut [&mut params] }],
        };
        let refused = backend(1).launch_reduced(launch, replicas).unwrap_err();
        assert!(params == storage.lists[0]);
        refused
    };
    let unavailable = |error| matches!(error, BackendError::Unavailable { .. });
    let adam = Adam::default();
    assert!(unavailable(refused(&Lamb::default(), &|_, _| {}, false)));
    assert!(unavailable(refused(&adam, &|_, _| {}, true)));
    assert!(unavailable(refused(&adam, &|rank, _| *rank = 1, false)));
    let error = refused(&adam, &|_, first| *first = 1, false);
    assert!(matches!(error, BackendError::OutOfBounds { .. }));
}

#[test]
fn lists_that_are_missing_are_counted_in_the_error() {
    let storage = Storage::new(&Adam::default(), kinds()[0], &[100]);
    let batches = storage.batches(&(0..100));
    let mut lists = storage.buffers();
    let whole = lists.len();
    lists.pop();
    let launch = storage.launch(&batches, &mut lists, &[]);
    let grads: &[&[u8]] = &[&storage.lists[1]];
    let replicas =
        Replicas { sums: SumsOfRanks::Average, rank: 0, first: 0, grads, lists: &mut [] };
    let error = backend(1).launch_reduced(launch, replicas).unwrap_err().to_string();
    let counts = format!("expected {whole} lists of tensors, found {}", whole - 1);
    assert!(error.contains(&counts), "{error}");
}

//! How long a step of two ranks takes: in one pass, and in passes of its own for each part.
//!
//! `cargo test --release -p fusestep-cpu --test reduce_update_speed -- --ignored --nocapture`

#[allow(dead_code, reason = "each suite uses what it needs")]
mod common;

use std::time::Instant;

use common::backend;
use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Buffers, Call, Collectives, Communicator, Operation, Options, ReduceOp, ReduceUpdate, Replica,
    ThreadCommunicator, run_ranks,
};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_launch::{
    Batch, HostLaunches, Launches, ListBuffer, Precision, Record, Replicas, Replicated, SumsOfRanks,
};
use fusestep_tensor::{DType, Role};

/// Those of ResNet-50, as tensors of a typical length.
const ELEMENTS: usize = 25_600_000;
const TENSORS: usize = 160;
const RANKS: usize = 2;
const STEPS: usize = 40;

/// What updates a rank's half: state of that half alone.
struct Rank {
    backend: CpuBackend,
    storage: common::Storage,
    batches: Vec<Batch>,
    lists: Vec<ListBuffer>,
    /// Element that the state's memory begins with.
    first: u64,
}

impl Rank {
    fn new(rank: usize) -> Self {
        let mut storage = common::Storage::new(&Adam::default(), kind(), &[64]);
        let numel = (ELEMENTS / TENSORS) as u64;
        storage.offsets = (0..TENSORS as u64).map(|tensor| tensor * numel).collect();
        storage.members = (0..TENSORS as u32).collect();
        let per_rank = TENSORS / RANKS;
        let records = (rank * per_rank..(rank + 1) * per_rank).map(|tensor| Record {
            tensor: tensor as u32,
            first_element: 0,
            numel,
            first_chunk: 0,
            group: 0,
        });
        let batch = Batch { records: records.collect(), groups: vec![0], chunks: 0 };
        let lists = storage.kernel.lists().iter().map(|&list| {
            let held = match list.role {
                Role::Param | Role::Grad => 0,
                _ => ELEMENTS / RANKS,
            };
            ListBuffer { list, buffer: Box::new(filled(held)) }
        });
        Self {
            backend: backend(1),
            lists: lists.collect(),
            batches: vec![batch],
            first: (rank * ELEMENTS / RANKS) as u64,
            storage,
        }
    }

    fn in_one_pass(&mut self, comm: &mut ThreadCommunicator, [grads, params]: [&mut [u8]; 2]) {
        let call = ReduceUpdate {
            grad_dtype: DType::F32,
            grads,
            replicas: fusestep_collective::Replicas::from_iter([Replica {
                dtype: DType::F32,
                elements: 1,
                bytes: params,
            }]),
            counts: &[ELEMENTS / RANKS; RANKS],
        };
        let firsts = [self.first; 4];
        let (storage, batches) = (&self.storage, &self.batches);
        let (backend, lists) = (&self.backend, &mut self.lists);
        comm.reduce_update(call, &mut |mut memory| {
            let replicas = Replicas {
                sums: SumsOfRanks::Average,
                rank: memory.rank,
                first: firsts[0],
                grads: &memory.grads,
                lists: &mut [Replicated { list: 0, ranks: &mut memory.replicas[0] }],
            };
            let launch = storage.launch(batches, lists, &firsts);
            backend.launch_reduced(launch, replicas).unwrap();
        })
        .unwrap();
    }

    /// `whole` are the lists of gradients and parameters, whole.
    fn separate(&mut self, comm: &mut ThreadCommunicator, whole: &mut [ListBuffer; 2]) {
        let grads = whole[1].buffer.host_mut().unwrap();
        let grads: &mut [f32] = bytemuck::cast_slice_mut(grads);
        comm.all_reduce(grads, ReduceOp::Average).unwrap();
        let firsts = [0, 0, self.first, self.first];
        for (own, whole) in self.lists.iter_mut().zip(whole.iter_mut()) {
            std::mem::swap(&mut own.buffer, &mut whole.buffer);
        }
        let launch = self.storage.launch(&self.batches, &mut self.lists, &firsts);
        self.backend.launch(launch).unwrap();
        for (own, whole) in self.lists.iter_mut().zip(whole.iter_mut()) {
            std::mem::swap(&mut own.buffer, &mut whole.buffer);
        }
        let params = whole[0].buffer.host_mut().unwrap();
        comm.execute(Call {
            operation: Operation::AllGather,
            dtype: DType::F32,
            counts: None,
            buffers: Buffers::InPlace(params),
        })
        .unwrap();
    }
}

fn kind() -> (DType, Precision) {
    (DType::F32, Precision::default())
}

fn filled(elements: usize) -> HostMemory {
    let mut memory = HostMemory::zeroed(4 * elements).unwrap();
    memory.elements_mut::<f32>().fill(0.01);
    memory
}

#[test]
#[ignore = "measures"]
fn a_step_of_two_ranks() {
    let took = run_ranks(RANKS, &Options::default(), |mut comm| {
        let mut rank = Rank::new(comm.rank());
        let (mut grads, mut params) = (filled(ELEMENTS), filled(ELEMENTS));
        let mut took = [f64::INFINITY; 2];
        for _ in 0..STEPS {
            comm.barrier().unwrap();
            let begun = Instant::now();
            rank.in_one_pass(&mut comm, [grads.bytes_mut(), params.bytes_mut()]);
            took[0] = took[0].min(begun.elapsed().as_secs_f64());
        }
        let list = |position: usize, memory| ListBuffer {
            list: rank.storage.kernel.lists()[position],
            buffer: Box::new(memory),
        };
        let mut whole = [list(0, params), list(1, grads)];
        for _ in 0..STEPS / 2 {
            comm.barrier().unwrap();
            let begun = Instant::now();
            rank.separate(&mut comm, &mut whole);
            took[1] = took[1].min(begun.elapsed().as_secs_f64());
        }
        took
    });
    for (rank, took) in took.unwrap().into_iter().enumerate() {
        let [fused, separate] = took.unwrap().map(|seconds| seconds * 1e3);
        println!("rank {rank}: {fused:.2} ms in one pass, {separate:.2} ms apart");
    }
}

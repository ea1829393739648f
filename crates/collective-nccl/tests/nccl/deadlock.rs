//! The driver's calls that wait for all work of a GPU: with two communication streams, a rank that
//! makes one within a call waits for the other stream's operation, which waits for another rank,
//! which does the same.

use std::time::Duration;

use fusestep_collective::{
    Collectives, Communicator, DeviceBuffers, DeviceCall, Operation, ReduceOp,
    communication_streams,
};
use fusestep_collective_nccl::NcclOptions;
use fusestep_tensor::DType;

use super::faults::COLLECTIVES;
use super::stand_in::counts;
use super::worlds::{group, options, sizes, turn, within};

/// Calls of each stream, each longer than the one before.
const CALLS: usize = 300;

#[test]
fn calls_that_grow_on_two_streams_end() {
    let _turn = turn();
    let ranks = sizes().len().min(2);
    let own = NcclOptions {
        timeout: Duration::from_secs(5),
        // The longer calls pass through it in segments.
        scratch_bytes: 64 << 10,
        ..options()
    };
    within(Duration::from_secs(60), move || {
        group(ranks, &own, |mut comm| {
            let two = communication_streams(&mut comm, 2).unwrap();
            comm.barrier().unwrap();
            let before = counts();
            comm.barrier().unwrap();
            let started: Vec<_> = (0..2 * CALLS)
                .map(|call| {
                    let buffer = vec![1.0f32; 100 + 50 * call];
                    let pending = two[call % 2].all_reduce(buffer, ReduceOp::Sum);
                    (100 + 50 * call, pending)
                })
                .collect();
            for (numel, pending) in started {
                let found = pending.wait().unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(found, vec![ranks as f32; numel]);
            }
            assert_eq!(counts(), before);
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn nothing_is_made_freed_or_loaded_within_a_call() {
    let _turn = turn();
    let Some(loaded) = counts() else {
        eprintln!("skipped: only the emulated driver counts");
        return;
    };
    let own = NcclOptions { scratch_bytes: 2000, ..options() };
    group(sizes().len(), &own, |mut comm| {
        let mut buffer = comm.device_buffer(8 * 1260).unwrap();
        buffer.upload(&[1; 8 * 1260]).unwrap();
        comm.barrier().unwrap();
        let before = counts().unwrap();
        assert!(
            before.made.iter().zip(&loaded.made).any(|(now, then)| now > then),
            "founding makes something: {before:?}"
        );
        comm.barrier().unwrap();
        for (name, job) in COLLECTIVES {
            job(&mut comm).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        for dtype in DType::ALL {
            for operation in [Operation::AllReduce(ReduceOp::Max), Operation::AllToAll] {
                let call = DeviceCall {
                    operation,
                    dtype,
                    counts: None,
                    buffers: DeviceBuffers::InPlace(buffer.slice_mut()),
                };
                comm.execute_on_device(call).unwrap();
            }
        }
        let (rank, ranks) = (comm.rank(), comm.world_size());
        for numel in [1, 1000, 10_000] {
            let mut all = vec![1.0f32; numel];
            comm.all_reduce(&mut all, ReduceOp::Sum).unwrap();
            assert!(all.iter().all(|&sum| sum == ranks as f32));
            if ranks > 1 && rank == 0 {
                comm.send(&all, 1).unwrap();
            }
            if rank == 1 {
                comm.receive(&mut all, 0).unwrap();
            }
        }
        comm.barrier().unwrap();
        assert_eq!(counts(), Some(before));
        comm.barrier().unwrap();
    });
}

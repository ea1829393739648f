//! All-reduce between threads, beside reduce and broadcast one after the other, and beside the same bytes without a word.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_collective::{Collectives, Options, ReduceOp, ThreadCommunicator, run_ranks};
use fusestep_simd::Level;

#[path = "support/timing.rs"]
mod timing;

use timing::group;

const RANKS: usize = 2;

/// Bytes of each rank's buffer: a latency, a cache, and two that leave the caches.
const LEN_BYTES: [usize; 4] = [4 << 10, 4 << 20, 64 << 20, 256 << 20];

/// What each rank does in one round.
type Work = fn(&mut ThreadCommunicator, &mut [f32]);

/// Time of `rounds` calls of `work` on all ranks, as rank 0 sees it.
fn time(numel: usize, rounds: u64, work: Work) -> Duration {
    let outcomes = run_ranks(RANKS, &Options::default(), |mut comm| {
        let mut buffer = vec![1.0f32; numel];
        work(&mut comm, &mut buffer);
        comm.barrier().expect("all ranks come");
        let start = Instant::now();
        for _ in 0..rounds {
            work(&mut comm, &mut buffer);
        }
        comm.barrier().expect("all ranks come");
        start.elapsed()
    });
    let mut outcomes = outcomes.expect("threads").into_iter();
    outcomes.next().expect("rank 0").expect("no panic")
}

fn fused(comm: &mut ThreadCommunicator, buffer: &mut [f32]) {
    comm.all_reduce(buffer, ReduceOp::Sum).expect("equal calls");
}

fn one_by_one(comm: &mut ThreadCommunicator, buffer: &mut [f32]) {
    comm.reduce(buffer, ReduceOp::Sum, 0).expect("equal calls");
    comm.broadcast(buffer, 0).expect("equal calls");
}

fn ceiling(_: &mut ThreadCommunicator, buffer: &mut [f32]) {
    Level::detect().run(
        #[inline(always)]
        || buffer.iter_mut().for_each(|x| *x = -*x),
    );
}

fn all_reduce(criterion: &mut Criterion) {
    let sums = run_ranks(RANKS, &Options::default(), |mut comm| {
        let mut buffer = vec![1.0f32; 100_003];
        fused(&mut comm, &mut buffer);
        buffer.iter().all(|&x| x == RANKS as f32)
    });
    let mut sums = sums.expect("threads").into_iter();
    assert!(sums.all(|sum| sum.expect("no panic")));
    let mut group = group(criterion, "all_reduce");
    for len_bytes in LEN_BYTES {
        let numel = len_bytes / size_of::<f32>();
        group.throughput(Throughput::Bytes((2 * RANKS * len_bytes) as u64));
        let subjects: [(&str, Work); 3] = [
            ("all_reduce", fused),
            ("reduce_and_broadcast", one_by_one),
            ("ceiling", ceiling),
        ];
        for (name, work) in subjects {
            group.bench_function(BenchmarkId::new(name, len_bytes), |b| {
                b.iter_custom(|rounds| time(numel, rounds, work));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, all_reduce);
criterion_main!(benches);

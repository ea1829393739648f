//! All-reduce between threads, beside reduce and broadcast one after the other, and beside the same
//! bytes without a word; and of every floating-point storage type.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_collective::{Collectives, Options, ReduceOp, ThreadCommunicator, run_ranks};
use fusestep_simd::Level;
use fusestep_tensor::Element;
use half::{bf16, f16};

#[path = "support/timing.rs"]
mod timing;

use timing::group;

const RANKS: usize = 2;

/// Bytes of each rank's buffer: a latency, a cache, and two that leave the caches.
const LEN_BYTES: [usize; 4] = [4 << 10, 4 << 20, 64 << 20, 256 << 20];

/// Elements of each rank's buffer where storage types are compared.
const DTYPE_NUMEL: usize = 16 << 20;

/// What each rank does in one round.
type Work<T> = fn(&mut ThreadCommunicator, &mut [T]);

/// Time of `rounds` calls of `work` on all ranks, as rank 0 sees it.
fn time<T: Element>(ranks: usize, ones: &[T], rounds: u64, work: Work<T>) -> Duration {
    let outcomes = run_ranks(ranks, &Options::default(), |mut comm| {
        let mut buffer = ones.to_vec();
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
        let ones = vec![1.0f32; len_bytes / size_of::<f32>()];
        group.throughput(Throughput::Bytes((2 * RANKS * len_bytes) as u64));
        let subjects: [(&str, Work<f32>); 3] =
            [("all_reduce", fused), ("reduce_and_broadcast", one_by_one), ("ceiling", ceiling)];
        for (name, work) in subjects {
            group.bench_function(BenchmarkId::new(name, len_bytes), |b| {
                b.iter_custom(|rounds| time(RANKS, &ones, rounds, work));
            });
        }
    }
    group.finish();
}

/// Greatest values stay what they are, so no type gets to its infinity.
fn greatest<T: Element>(criterion: &mut Criterion, one: T) {
    let mut group = group(criterion, "all_reduce_max");
    for ranks in [RANKS, RANKS + 1] {
        let ones = vec![one; DTYPE_NUMEL];
        group.throughput(Throughput::Elements(DTYPE_NUMEL as u64));
        group.bench_function(BenchmarkId::new(T::DTYPE.name(), ranks), |b| {
            b.iter_custom(|rounds| {
                time(ranks, &ones, rounds, |comm, buffer| {
                    comm.all_reduce(buffer, ReduceOp::Max).expect("equal calls");
                })
            });
        });
    }
    group.finish();
}

fn dtypes(criterion: &mut Criterion) {
    greatest(criterion, 1.0f32);
    greatest(criterion, bf16::ONE);
    greatest(criterion, f16::ONE);
}

criterion_group!(benches, all_reduce, dtypes);
criterion_main!(benches);

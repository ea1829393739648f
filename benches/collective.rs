//! All-reduce between threads, of every floating-point storage type. `fusestep bench --collective
//! all-reduce` times it by length, beside the memory bandwidth.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_collective::{Collectives, Options, ReduceOp, run_ranks};
use fusestep_tensor::Element;
use half::{bf16, f16};

#[path = "support/timing.rs"]
mod timing;

use timing::group;

const RANKS: usize = 2;

/// Elements of each rank's buffer.
const NUMEL: usize = 16 << 20;

/// Time of `rounds` calls on all ranks, as rank 0 sees it. Greatest values stay what they are, so
/// no type gets to its infinity.
fn time<T: Element>(ranks: usize, ones: &[T], rounds: u64) -> Duration {
    let outcomes = run_ranks(ranks, &Options::default(), |mut comm| {
        let mut buffer = ones.to_vec();
        comm.all_reduce(&mut buffer, ReduceOp::Max).expect("equal calls");
        assert!(buffer == ones);
        comm.barrier().expect("all ranks come");
        let start = Instant::now();
        for _ in 0..rounds {
            comm.all_reduce(&mut buffer, ReduceOp::Max).expect("equal calls");
        }
        comm.barrier().expect("all ranks come");
        start.elapsed()
    });
    let mut outcomes = outcomes.expect("threads").into_iter();
    outcomes.next().expect("rank 0").expect("no panic")
}

fn greatest<T: Element>(criterion: &mut Criterion, one: T) {
    let mut group = group(criterion, "all_reduce_max");
    for ranks in [RANKS, RANKS + 1] {
        let ones = vec![one; NUMEL];
        group.throughput(Throughput::Elements(NUMEL as u64));
        group.bench_function(BenchmarkId::new(T::DTYPE.name(), ranks), |b| {
            b.iter_custom(|rounds| time(ranks, &ones, rounds));
        });
    }
    group.finish();
}

fn dtypes(criterion: &mut Criterion) {
    greatest(criterion, 1.0f32);
    greatest(criterion, bf16::ONE);
    greatest(criterion, f16::ONE);
}

criterion_group!(benches, dtypes);
criterion_main!(benches);

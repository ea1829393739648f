//! The memory-bandwidth ceiling by prefetch distance and threads: four streams read, three written,
//! as in an Adam step.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_cpu::CpuBackend;
use fusestep_simd::PREFETCH_DISTANCES;

#[path = "support/memory.rs"]
mod memory;
#[path = "support/timing.rs"]
mod timing;

use memory::{Ceiling, thread_counts};
use timing::group;

/// Four arrays of 128 MiB: more than any cache of the machines this is meant for.
const NUMEL: usize = 32 << 20;

fn ceiling(criterion: &mut Criterion) {
    for threads in thread_counts() {
        let backend = CpuBackend::new(threads);
        let mut ceiling = Ceiling::new(NUMEL, &backend);
        let mut group = group(criterion, &format!("ceiling/t{threads}"));
        group.throughput(Throughput::Bytes(28 * NUMEL as u64));
        for distance in PREFETCH_DISTANCES {
            group.bench_function(BenchmarkId::new("prefetch_elements", distance), |b| {
                b.iter(|| ceiling.pass(&backend, distance));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, ceiling);
criterion_main!(benches);

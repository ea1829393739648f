//! Fused AdamW against the naive plan and against the memory traffic of the step alone, in turn.
//!
//! `cargo bench --bench fused_adam -- gpt2` runs the part whose names match. Times of different
//! runs differ with the machine's load; compare only within one run, where fused, naive and ceiling
//! take turns. Throughput counts the 28 bytes per element that a step must move. `ceiling / fused`
//! in one run is the share of the machine that fused AdamW reaches.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fusestep_fused_adam::Adam;
use fusestep_fused_adam::reference::{Element, update};

#[path = "support/asked.rs"]
mod asked;
#[path = "support/contest.rs"]
mod contest;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use contest::contest;
use shapes::tiny;
use timing::group;

/// The f64 reference, one element at a time: what the update costs without any care.
fn reference(criterion: &mut Criterion) {
    let (numel, adam) = (tiny().elements(), Adam::default());
    let start = Element { param: 0.5, ..Element::default() };
    let mut elements = vec![start; numel as usize];
    assert!((update(&adam, 1, start, 0.01).param - 0.498995).abs() < 1e-8);
    let mut group = group(criterion, "fused_adam/tiny_flat");
    group.throughput(Throughput::Bytes(28 * numel));
    group.bench_function("reference/t1", |b| {
        b.iter(|| {
            for element in &mut elements {
                *element = update(&adam, 10, *element, 0.01);
            }
        });
    });
    group.finish();
}

fn fused_adam(criterion: &mut Criterion) {
    // p·(1 − lr·λ) − lr
    let expected = 0.5 * (1.0 - 1e-3 * 0.01) - 1e-3;
    contest(criterion, "fused_adam", Adam::default().into(), expected);
}

criterion_group!(benches, reference, fused_adam);
criterion_main!(benches);

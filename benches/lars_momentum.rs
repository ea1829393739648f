//! LARS against the naive plan, against momentum's memory traffic and against the f64 reference, in
//! turn.
//!
//! `cargo bench --bench lars_momentum -- gpt2` runs the part whose names match; compare only within
//! one run. Throughput counts the 20 bytes per element that momentum must move: what LARS needs
//! beyond is the second read of parameter and gradient, from cache where a tensor fits. `ceiling`
//! is the memory stream over as many bytes as momentum moves.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fusestep_lars_momentum::{Lars, Trust, reference::update};

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

/// The f64 reference, one tensor at a time: what the update costs without any care.
fn reference(criterion: &mut Criterion) {
    let numel = tiny().elements() as usize;
    let (mut p, g, mut u) = (vec![0.5; numel], vec![0.01; numel], vec![0.0; numel]);
    let mut step = || update(&Lars::default(), Trust::Ratio, &mut p, &g, &mut u);
    // Checked apart from the timing, which a filter may leave out.
    step();
    let mut group = group(criterion, "lars_momentum/tiny_flat");
    group.throughput(Throughput::Bytes(20 * numel as u64));
    group.bench_function("reference/t1", |b| b.iter(&mut step));
    group.finish();
    assert!(p.iter().all(|p| p.is_finite() && *p < 0.5));
}

fn lars_momentum(criterion: &mut Criterion) {
    // P = 0.5·√n, G = 0.01·√n, so that the rate is the same for every tensor.
    let local = 0.1 * 0.001 * 0.5 / (0.01 + 0.0005 * 0.5);
    let expected = 0.5 - local * (0.01 + 0.0005 * 0.5);
    contest(criterion, "lars_momentum", Lars::default().into(), expected);
}

criterion_group!(benches, reference, lars_momentum);
criterion_main!(benches);

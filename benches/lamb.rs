//! LAMB against the naive plan, against the memory traffic of Adam and against the f64 reference,
//! in turn.
//!
//! `cargo bench --bench lamb -- gpt2` runs the part whose names match; compare only within one run.
//! Throughput counts the 28 bytes per element that a step must move: what LAMB needs beyond is the
//! second read of all four tensors, from cache where a tensor fits. `ceiling` is the memory stream
//! over as many bytes.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fusestep_lamb::reference::{Tensor, update};
use fusestep_lamb::{Lamb, Trust};

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
    let grad = vec![0.01; numel];
    let mut tensor =
        Tensor { param: vec![0.5; numel], moment1: vec![0.0; numel], moment2: vec![0.0; numel] };
    let mut step = || update(&Lamb::default(), Trust::Ratio, 10, &mut tensor, &grad);
    // Checked apart from the timing, which a filter may leave out.
    step();
    let mut group = group(criterion, "lamb/tiny_flat");
    group.throughput(Throughput::Bytes(28 * numel as u64));
    group.bench_function("reference/t1", |b| b.iter(&mut step));
    group.finish();
    assert!(tensor.param.iter().all(|p| p.is_finite() && *p < 0.5));
}

fn lamb(criterion: &mut Criterion) {
    // The direction is the same for all elements, so that φ·r is p.
    let expected = 0.5 - 1e-3 * 0.5;
    contest(criterion, "lamb", Lamb::default().into(), expected);
}

criterion_group!(benches, reference, lamb);
criterion_main!(benches);

//! Lion against the naive plan and against a stream of as many bytes, in turn.
//!
//! `cargo bench --bench lion -- gpt2` runs the part whose names match; compare only within one run.
//! `ceiling / fused` is the share of the machine's bandwidth that the step reaches; the stream
//! reads four and writes three arrays, whatever the rule.

use criterion::{Criterion, criterion_group, criterion_main};
use fusestep_lion::Lion;

#[path = "support/contest.rs"]
mod contest;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use contest::contest;

fn lion(criterion: &mut Criterion) {
    // The first step moves by lr.
    let lion = Lion { lr: 1e-3, ..Lion::default() };
    contest(criterion, "lion", lion.into(), 0.499);
}

criterion_group!(benches, lion);
criterion_main!(benches);

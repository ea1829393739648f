//! Adagrad against the naive plan and against a stream of as many bytes, in turn.
//!
//! `cargo bench --bench adagrad -- gpt2` runs the part whose names match; compare only within one
//! run. `ceiling / fused` is the share of the machine's bandwidth that the step reaches; the stream
//! reads four and writes three arrays, whatever the rule.

use criterion::{Criterion, criterion_group, criterion_main};
use fusestep_adagrad::Adagrad;

#[path = "support/contest.rs"]
mod contest;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use contest::contest;

fn adagrad(criterion: &mut Criterion) {
    // The first step divides the gradient by itself and moves by lr.
    contest(criterion, "adagrad", Adagrad::default().into(), 0.49);
}

criterion_group!(benches, adagrad);
criterion_main!(benches);

//! RMSprop against the naive plan and against a stream of as many bytes, in turn.
//!
//! `cargo bench --bench rmsprop -- gpt2` runs the part whose names match; compare only within one
//! run. `ceiling / fused` is the share of the machine's bandwidth that the step reaches; the stream
//! reads four and writes three arrays, whatever the rule.

use criterion::{Criterion, criterion_group, criterion_main};
use fusestep_rmsprop::RmsProp;

#[path = "support/contest.rs"]
mod contest;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use contest::contest;

fn rmsprop(criterion: &mut Criterion) {
    // The first step divides the gradient by a tenth of itself and moves by 10·lr.
    let rmsprop = RmsProp { lr: 1e-3, ..RmsProp::default() };
    contest(criterion, "rmsprop", rmsprop.into(), 0.49);
}

criterion_group!(benches, rmsprop);
criterion_main!(benches);

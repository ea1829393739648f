//! Schedule-Free AdamW against the naive plan and against a stream of as many bytes, in turn.
//!
//! `cargo bench --bench schedule_free -- gpt2` runs the part whose names match; compare only within
//! one run. `ceiling / fused` is the share of the machine's bandwidth that the step reaches; the
//! stream reads four and writes three arrays, whatever the rule.

use criterion::{Criterion, criterion_group, criterion_main};
use fusestep_schedule_free::ScheduleFree;

#[path = "support/contest.rs"]
mod contest;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use contest::contest;

fn schedule_free(criterion: &mut Criterion) {
    // The first step divides the gradient by itself and moves by lr.
    let schedule_free = ScheduleFree { lr: 1e-2, ..ScheduleFree::default() };
    contest(criterion, "schedule_free", schedule_free.into(), 0.49);
}

criterion_group!(benches, schedule_free);
criterion_main!(benches);

//! SGD and momentum against the naive plan and against a stream of as many bytes, in turn.
//!
//! `cargo bench --bench fused_sgd -- gpt2` runs the part whose names match; compare only within one
//! run. `ceiling / fused` is the share of the machine's bandwidth that the step reaches; the stream
//! reads four and writes three arrays, whatever the rule.

use criterion::{Criterion, criterion_group, criterion_main};
use fusestep_fused_sgd::Sgd;

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

fn fused_sgd(criterion: &mut Criterion) {
    // The first step moves by lr·g, with momentum and without.
    let sgd = Sgd { lr: 0.1, ..Sgd::default() };
    let momentum = Sgd { lr: 0.1, ..Sgd::with_momentum() };
    contest(criterion, "fused_sgd", sgd.into(), 0.499);
    contest(criterion, "fused_sgd_momentum", momentum.into(), 0.499);
}

criterion_group!(benches, fused_sgd);
criterion_main!(benches);

//! Every rule that updates each element on its own and has no bench of its name: against the naive
//! plan and against a stream of as many bytes, in turn.
//!
//! `cargo bench --bench rules -- lion/gpt2` runs the part whose names match; compare only within
//! one run. `ceiling / fused` is the share of the machine's bandwidth that the step reaches; the
//! stream reads four and writes three arrays, whatever the rule.

use criterion::{Criterion, criterion_group, criterion_main};
use fusestep_planner::Optimizer;
use fusestep_testkit::{ElementState, reference_step};

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

/// A rate that moves parameters by digits that f32 has.
const LR: f64 = 1e-3;

fn rules(criterion: &mut Criterion) {
    for rule in Optimizer::all() {
        let rule = match rule {
            Optimizer::Adam(_) | Optimizer::Sgd(_) | Optimizer::Lars(_) | Optimizer::Lamb(_) => {
                continue;
            }
            rule => rule.with_lr(LR),
        };
        let first = reference_step(&rule, 1, 0.5, &mut ElementState::default(), 0.01);
        contest(criterion, rule.name(), rule, first);
    }
}

criterion_group!(benches, rules);
criterion_main!(benches);

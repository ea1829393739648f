//! Spans of feature `tracing`, as a subscriber sees them.

#[path = "../examples/flame.rs"]
mod flame;

#[test]
fn a_rank_s_step_has_its_stages_below_it() {
    flame::main().unwrap();
}

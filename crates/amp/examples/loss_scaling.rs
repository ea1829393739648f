//! How a loss scale finds its value: halved at every overflow, doubled after a run of good steps.
//!
//! `cargo run --release -p fusestep-amp --example loss_scaling`

use fusestep_amp::{Finding, LossScale};

/// Gradients times the scale overflow above this.
const LARGEST: f64 = 4096.0;

fn main() {
    let mut scale = LossScale::dynamic();
    let mut skipped = 0;
    for step in 1..=2100 {
        let finding = if scale.scale() > LARGEST {
            skipped += 1;
            Finding::NonFinite
        } else {
            Finding::Finite
        };
        let after = scale.after(finding);
        if after.scale() != scale.scale() {
            println!("step {step}: {finding:?}, from {} to {}", scale.scale(), after.scale());
        }
        scale = after;
    }
    println!("{skipped} steps skipped");
    assert!(skipped < 10 && scale.scale() <= 2.0 * LARGEST);
}

//! A gradient that becomes a thousand times smaller: RMSprop forgets the large ones and its steps
//! are soon as long as before, which plain steps and sums that never forget are not.
//!
//! `cargo run --release -p fusestep-rmsprop --example changing_scale`

use fusestep_rmsprop::{RmsProp, RmsPropTensors, StepError};

fn main() -> Result<(), StepError> {
    let rmsprop = RmsProp { lr: 1e-3, alpha: 0.9, ..RmsProp::default() };
    let (mut param, mut moment2) = ([0.0f32], [0.0f32]);
    let mut last = 0.0;
    for step in 1..=400 {
        let grad = [if step <= 200 { 1.0 } else { 1e-3 }];
        let before = param[0];
        let tensor = RmsPropTensors {
            param: &mut param,
            grad: &grad,
            moment2: &mut moment2,
            moment1: None,
            velocity: None,
        };
        rmsprop.step(step, &mut [tensor])?;
        last = before - param[0];
        if [1, 200, 201, 250, 400].contains(&step) {
            println!("step {step}: gradient {}, moved by {last:.2e}", grad[0]);
        }
    }
    assert!((last / 1e-3 - 1.0).abs() < 0.01, "{last}");
    Ok(())
}

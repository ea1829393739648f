//! Lion takes the sign of its mean: gradients a million times apart move their parameters alike,
//! and a gradient whose sign is noise moves its own little.
//!
//! `cargo run --release -p fusestep-lion --example scales`

use fusestep_lion::{Lion, LionTensors, StepError};

fn main() -> Result<(), StepError> {
    let lion = Lion { lr: 0.01, ..Lion::default() };
    let (mut param, mut moment1) = ([0.0f32; 3], [0.0f32; 3]);
    for step in 1..=100 {
        let noise = if step % 2 == 0 { 1.0 } else { -1.0 };
        let tensor =
            LionTensors { param: &mut param, grad: &[1e-3, 1e3, noise], moment1: &mut moment1 };
        lion.step(step, &mut [tensor])?;
    }
    println!("after 100 steps of 0.01: {param:?}");
    assert!((param[0] + 1.0).abs() < 1e-4 && param[0] == param[1]);
    assert!(param[2].abs() < 0.05);
    Ok(())
}

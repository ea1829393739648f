//! A long valley, 100 times as steep across as along: how many steps SGD takes to its floor, plain,
//! with momentum and with Nesterov's.
//!
//! `cargo run --release -p fusestep-fused-sgd --example valley`

use fusestep_fused_sgd::{Nesterov, Sgd, SgdTensors, StepError};

/// Curvature of each direction.
const CURVATURE: [f64; 2] = [1.0, 100.0];

/// Steps until every direction is within a thousandth of the floor.
fn steps(sgd: &Sgd) -> Result<u64, StepError> {
    let (mut param, mut velocity) = ([1.0f64; 2], [0.0f64; 2]);
    for step in 1..=10_000 {
        let grad = [CURVATURE[0] * param[0], CURVATURE[1] * param[1]];
        let tensor = SgdTensors {
            param: &mut param,
            grad: &grad,
            velocity: sgd.has_velocity().then_some(&mut velocity[..]),
        };
        sgd.step(step, &mut [tensor])?;
        if param.iter().all(|value| value.abs() < 1e-3) {
            return Ok(step);
        }
    }
    Ok(10_000)
}

fn main() -> Result<(), StepError> {
    let plain = Sgd { lr: 0.01, ..Sgd::default() };
    let momentum = Sgd { lr: 0.01, ..Sgd::with_momentum() };
    let nesterov = Sgd { nesterov: Nesterov::Nesterov, ..momentum };
    let counts = [steps(&plain)?, steps(&momentum)?, steps(&nesterov)?];
    for (name, count) in ["plain", "momentum", "nesterov"].iter().zip(counts) {
        println!("{name}: {count} steps");
    }
    assert!(counts[1] < counts[0] && counts[2] < counts[0]);
    Ok(())
}

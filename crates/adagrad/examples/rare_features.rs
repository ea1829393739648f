//! Two features of equal weight, one in every example and one in every fiftieth: Adagrad gives the
//! rare one larger steps, because its sum of squares grows slowly.
//!
//! `cargo run --release -p fusestep-adagrad --example rare_features`

use fusestep_adagrad::{Adagrad, AdagradTensors, StepError};

fn main() -> Result<(), StepError> {
    let adagrad = Adagrad { lr: 0.5, ..Adagrad::default() };
    let (mut weight, mut sum) = ([0.0f32; 2], [0.0f32; 2]);
    for step in 1..=500 {
        let x = [1.0, if step % 50 == 0 { 1.0 } else { 0.0 }];
        // Both true weights are 1.
        let error = (weight[0] - 1.0) * x[0] + (weight[1] - 1.0) * x[1];
        let tensor = AdagradTensors {
            param: &mut weight,
            grad: &[error * x[0], error * x[1]],
            sum: &mut sum,
        };
        adagrad.step(step, &mut [tensor])?;
    }
    println!("weights {weight:?} after 500 examples, 10 of them with the rare feature");
    assert!(weight.iter().all(|w| (w - 1.0).abs() < 0.05), "{weight:?}");
    Ok(())
}

//! Linear regression with AdamW on slices: no plan, no backend.
//!
//! `cargo run --release -p fusestep-fused-adam --example regression`

use fusestep_fused_adam::{Adam, AdamTensors, StepError, WeightDecay};

/// What the points lie on.
const TRUTH: ([f32; 2], f32) = ([3.0, -2.0], 0.5);

fn main() -> Result<(), StepError> {
    let points: Vec<[f32; 2]> =
        (0..100).map(|i| [(i % 10) as f32 / 5.0 - 1.0, (i / 10) as f32 / 5.0 - 1.0]).collect();
    let adam = Adam { lr: 0.05, weight_decay: WeightDecay::Decoupled(0.0), ..Adam::default() };
    let (mut w, mut b) = (vec![0.0f32; 2], vec![0.0f32]);
    let (mut w_state, mut b_state) = ([vec![0.0; 2], vec![0.0; 2]], [vec![0.0], vec![0.0]]);
    let mut loss = 0.0;
    for step in 1..=400 {
        let (mut w_grad, mut b_grad) = ([0.0f32; 2], [0.0f32]);
        loss = 0.0;
        for [x, y] in &points {
            let expected = TRUTH.0[0] * x + TRUTH.0[1] * y + TRUTH.1;
            let error = w[0] * x + w[1] * y + b[0] - expected;
            loss += error * error / 100.0;
            w_grad[0] += error * x / 50.0;
            w_grad[1] += error * y / 50.0;
            b_grad[0] += error / 50.0;
        }
        // Both tensors in one call: one pass over all their memory.
        let ([w_mean, w_square], [b_mean, b_square]) = (&mut w_state, &mut b_state);
        let tensor = |param, grad, moment1, moment2| AdamTensors {
            param,
            grad,
            moment1,
            moment2,
            max_moment2: None,
        };
        let mut tensors = [
            tensor(&mut w[..], &w_grad[..], &mut w_mean[..], &mut w_square[..]),
            tensor(&mut b[..], &b_grad[..], &mut b_mean[..], &mut b_square[..]),
        ];
        adam.step(step, &mut tensors)?;
        if step % 100 == 0 {
            println!("step {step}: loss {loss:.6}, w {w:?}, b {b:?}");
        }
    }
    assert!(loss < 1e-4, "{loss}");
    Ok(())
}

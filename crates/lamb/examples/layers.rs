//! Two layers whose weights are a hundred times apart: LAMB moves both by the same share of their
//! norm, where Adam would move both by the same length.
//!
//! `cargo run --release -p fusestep-lamb --example layers`

use fusestep_lamb::{Lamb, LambTensors, StepError};

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

fn main() -> Result<(), StepError> {
    let lamb = Lamb { lr: 0.01, weight_decay: 0.0, ..Lamb::default() };
    let starts = [[0.01f64; 16], [1.0; 16]];
    let mut layers = starts;
    let mut state = [[[0.0; 16]; 2]; 2];
    let [[mean, square], [other_mean, other_square]] = &mut state;
    let [small, large] = &mut layers;
    let mut tensors = [
        LambTensors::new(small, &[1e-4; 16], mean, square),
        LambTensors::new(large, &[5.0; 16], other_mean, other_square),
    ];
    let skipped = lamb.step(1, &mut tensors)?;
    assert!(skipped.is_empty());
    for (layer, start) in layers.iter().zip(starts) {
        let moved: Vec<f64> = layer.iter().zip(start).map(|(new, old)| new - old).collect();
        let share = norm(&moved) / norm(&start);
        println!("a layer of norm {:.2} moved by {:.4} of it", norm(&start), share);
        assert!((share - 0.01).abs() < 1e-4, "{share}");
    }
    Ok(())
}

//! Two layers with gradients a thousand times apart: LARS moves both by the same share of their
//! norm, and a bias left out of it by the plain rate.
//!
//! `cargo run --release -p fusestep-lars-momentum --example shares`

use fusestep_lars_momentum::{Lars, LarsTensors, StepError, Trust};

fn main() -> Result<(), StepError> {
    let lars = Lars { lr: 1.0, trust_coefficient: 0.01, weight_decay: 0.0, ..Lars::default() };
    let (mut flat, mut steep, mut bias) = ([1.0f64; 16], [1.0f64; 16], [1.0f64; 4]);
    let (mut first, mut second, mut third) = ([0.0; 16], [0.0; 16], [0.0; 4]);
    let mut tensors = [
        LarsTensors::new(&mut flat, &[1e-3; 16], &mut first),
        LarsTensors::new(&mut steep, &[1.0; 16], &mut second),
        LarsTensors {
            trust: Some(Trust::Plain),
            lr_scale: 0.1,
            ..LarsTensors::new(&mut bias, &[0.5; 4], &mut third)
        },
    ];
    let skipped = lars.step(&mut tensors)?;
    assert!(skipped.is_empty());
    println!("flat {:.4}, steep {:.4}, bias {:.4}", flat[0], steep[0], bias[0]);
    assert!((flat[0] - 0.99).abs() < 1e-9 && (steep[0] - 0.99).abs() < 1e-9);
    assert!((bias[0] - 0.95).abs() < 1e-12);
    Ok(())
}

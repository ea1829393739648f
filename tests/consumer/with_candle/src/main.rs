//! candle's AdamW swapped for the planned one: as close as their roundings.
#![forbid(unsafe_code)]

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};

fn main() -> Result<()> {
    let params = ParamsAdamW {
        lr: 0.01,
        ..ParamsAdamW::default()
    };
    let var = || Var::from_tensor(&Tensor::arange(0f32, 4., &Device::Cpu)?);
    let (first, second) = (var()?, var()?);
    let theirs = candle_nn::AdamW::new(vec![first.clone()], params.clone())?;
    let ours = fusestep_candle::AdamW::new(vec![second.clone()], params)?;
    let expected = train(&first, theirs)?;
    let found = train(&second, ours)?;
    for (expected, found) in expected.iter().zip(&found) {
        assert!(
            (expected - found).abs() < 1e-5,
            "expected {expected}, found {found}"
        );
    }
    println!("candle: {found:?}");
    Ok(())
}

/// Ten steps on the squared distance from one.
fn train(var: &Var, mut optimizer: impl Optimizer) -> Result<Vec<f32>> {
    for _ in 0..10 {
        let distance = (var.as_tensor() - 1.0)?;
        optimizer.backward_step(&distance.sqr()?.sum_all()?)?;
    }
    var.to_vec1()
}

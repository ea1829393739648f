//! One loop, first with candle's AdamW, then with ours. One line differs.
//!
//! `cargo run --release -p fusestep-candle --example quickstart`

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};

pub(crate) fn main() -> Result<()> {
    let batches = vec![batch()?; 100];
    let params = ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() };
    let losses = [before(&batches, params.clone())?, after(&batches, params)?];
    println!("before {:.4}, after {:.4}", losses[0], losses[1]);
    if losses.iter().any(|loss| *loss > 0.5) {
        return Err(Error::Msg(format!("expected losses below 0.5, found {losses:?}")));
    }
    Ok(())
}

fn before(batches: &[(Tensor, Tensor)], params: ParamsAdamW) -> Result<f32> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let model = candle_nn::linear(64, 10, vb)?;
    let mut optimizer = candle_nn::AdamW::new(varmap.all_vars(), params)?;
    for (images, digits) in batches {
        let loss = candle_nn::loss::cross_entropy(&model.forward(images)?, digits)?;
        optimizer.backward_step(&loss)?;
    }
    last_loss(&model, batches)
}

fn after(batches: &[(Tensor, Tensor)], params: ParamsAdamW) -> Result<f32> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let model = candle_nn::linear(64, 10, vb)?;
    let mut optimizer = fusestep_candle::AdamW::new(&varmap, params)?;
    for (images, digits) in batches {
        let loss = candle_nn::loss::cross_entropy(&model.forward(images)?, digits)?;
        optimizer.backward_step(&loss)?;
    }
    last_loss(&model, batches)
}

fn last_loss(model: &impl Module, batches: &[(Tensor, Tensor)]) -> Result<f32> {
    let (images, digits) = &batches[batches.len() - 1];
    candle_nn::loss::cross_entropy(&model.forward(images)?, digits)?.to_scalar()
}

/// An image of each digit: six pixels of its own are lit.
fn batch() -> Result<(Tensor, Tensor)> {
    let mut pixels = [[0f32; 64]; 10];
    for (digit, image) in pixels.iter_mut().enumerate() {
        image[6 * digit..6 * digit + 6].fill(1.0);
    }
    let digits = Tensor::arange(0u32, 10, &Device::Cpu)?;
    Ok((Tensor::new(&pixels, &Device::Cpu)?, digits))
}

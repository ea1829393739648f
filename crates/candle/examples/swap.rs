//! candle's AdamW and ours on one model, in turn: the losses agree, and the gradients are read
//! where candle left them.
//!
//! `cargo run --release -p fusestep-candle --example swap`

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};

/// A model of two layers with equal starts, and its variables.
fn model() -> Result<(VarMap, impl Module)> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let hidden = candle_nn::linear(2, 16, vb.pp("hidden"))?;
    let out = candle_nn::linear(16, 1, vb.pp("out"))?;
    let mut vars: Vec<_> = varmap.data().lock().expect("no poison").clone().into_iter().collect();
    vars.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (_, var) in &vars {
        let numel = var.elem_count();
        let values: Vec<f32> = (0..numel).map(|at| (at as f32 * 0.7).sin() * 0.5).collect();
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
    }
    let model = candle_nn::seq().add(hidden).add_fn(|x| x.relu()).add(out);
    Ok((varmap, model))
}

fn train(model: &impl Module, optimizer: &mut impl Optimizer) -> Result<f32> {
    let x = Tensor::from_vec(vec![0f32, 0., 0., 1., 1., 0., 1., 1.], (4, 2), &Device::Cpu)?;
    let y = Tensor::from_vec(vec![0f32, 1., 1., 0.], (4, 1), &Device::Cpu)?;
    let mut last = 0.0;
    for _ in 0..200 {
        let loss = candle_nn::loss::mse(&model.forward(&x)?, &y)?;
        optimizer.backward_step(&loss)?;
        last = loss.to_scalar()?;
    }
    Ok(last)
}

fn main() -> Result<()> {
    let params = ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() };
    let (varmap, net) = model()?;
    let theirs = train(&net, &mut candle_nn::AdamW::new(varmap.all_vars(), params.clone())?)?;
    let (varmap, net) = model()?;
    let mut optimizer = fusestep_candle::AdamW::new(&varmap, params)?;
    let ours = train(&net, &mut optimizer)?;
    println!("loss after 200 steps: candle's AdamW {theirs:.6}, ours {ours:.6}");
    assert!(ours < 0.05 && (ours - theirs).abs() < 1e-3);
    assert_eq!(optimizer.report().copied_gradients, 0);
    Ok(())
}

//! candle's AdamW, and ours in its place.

use std::num::NonZeroUsize;

use anyhow::bail;
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::{Optimizer as _, ParamsAdamW};
use fusestep_planner::Optimizer;
use fusestep_tensor::{DType, ParamDesc};
use serde::Serialize;

use crate::options::{require_candle_threads, threads};
use crate::timer::Timer;

/// Times of candle's AdamW and of ours in its place.
#[derive(Debug, Serialize)]
pub(crate) struct CandleTimes {
    pub(crate) candle_ns_per_step: f64,
    pub(crate) candle_adapter_ns_per_step: f64,
    pub(crate) times_faster_than_candle: f64,
}

/// candle's AdamW and ours in its place, each on its own variables.
pub(crate) struct CandlePair {
    theirs: candle_nn::AdamW,
    their_grads: GradStore,
    their_timer: Timer,
    ours: fusestep_candle::AdamW,
    our_grads: GradStore,
    our_timer: Timer,
}

impl CandlePair {
    pub(crate) fn new(
        params: &[ParamDesc],
        rule: Optimizer,
        asked: Option<NonZeroUsize>,
    ) -> anyhow::Result<Self> {
        let Optimizer::Adam(adam) = rule else {
            bail!("--peer candle: expected adamw, found {}", rule.name());
        };
        let config = ParamsAdamW {
            lr: adam.lr,
            beta1: adam.beta1,
            beta2: adam.beta2,
            eps: adam.eps,
            weight_decay: adam.weight_decay.lambda(),
        };
        require_candle_threads()?;
        let (theirs, their_grads) = variables(params)?;
        let (ours, our_grads) = variables(params)?;
        Ok(Self {
            theirs: candle_nn::AdamW::new(theirs, config.clone())?,
            their_grads,
            their_timer: Timer::new(),
            ours: fusestep_candle::AdamW::with_threads(ours, config, threads(asked)?)?,
            our_grads,
            our_timer: Timer::new(),
        })
    }

    pub(crate) fn sample(&mut self) -> anyhow::Result<()> {
        let (theirs, grads) = (&mut self.theirs, &self.their_grads);
        self.their_timer.sample(|| theirs.step(grads))?;
        let (ours, grads) = (&mut self.ours, &self.our_grads);
        self.our_timer.sample(|| ours.step(grads))?;
        Ok(())
    }

    pub(crate) fn times(self) -> CandleTimes {
        CandleTimes {
            candle_ns_per_step: self.their_timer.best,
            candle_adapter_ns_per_step: self.our_timer.best,
            times_faster_than_candle: self.their_timer.best / self.our_timer.best,
        }
    }
}

/// Variables of these shapes with gradients.
fn variables(params: &[ParamDesc]) -> anyhow::Result<(Vec<Var>, GradStore)> {
    let (mut vars, mut grads) = (Vec::with_capacity(params.len()), GradStore::default());
    // Tensors without elements change nothing in either optimizer's step, and candle makes no
    // tensors of ones without elements.
    for param in params.iter().filter(|param| param.numel() > 0) {
        let dtype = match param.dtype {
            DType::F64 => candle_core::DType::F64,
            _ => candle_core::DType::F32,
        };
        let dims: Vec<usize> = param.shape.dims().iter().map(|&dim| dim as usize).collect();
        let full = |value: f64| {
            let ones = Tensor::ones(dims.as_slice(), dtype, &Device::Cpu)?;
            ones.affine(value, 0.0)
        };
        let var = Var::from_tensor(&full(0.1)?)?;
        grads.insert(&var, full(0.01)?);
        vars.push(var);
    }
    Ok((vars, grads))
}

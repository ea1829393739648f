//! A shadow of a run: candle's own AdamW on its gradients, to time candle's steps.

use std::time::Instant;

use candle_core::Var;
use candle_core::backprop::GradStore;
use candle_nn::{Optimizer as _, ParamsAdamW};
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_launch::{Objective, WeightDecay};
use fusestep_planner::Optimizer;

/// candle's AdamW on a copy of the parameters.
pub(crate) struct Shadow {
    vars: Vec<Var>,
    optimizer: candle_nn::AdamW,
    /// Time of all steps, in nanoseconds.
    pub(crate) ns: f64,
}

impl Shadow {
    /// A shadow of the run; `None` unless the rule is candle's AdamW too.
    pub(crate) fn new(vars: &[Var], rule: Optimizer) -> candle_core::Result<Option<Self>> {
        let Optimizer::Adam(Adam {
            weight_decay: WeightDecay::Decoupled(weight_decay),
            second_moment: SecondMoment::Running,
            objective: Objective::Minimize,
            lr,
            beta1,
            beta2,
            eps,
        }) = rule
        else {
            return Ok(None);
        };
        let params = ParamsAdamW { lr, beta1, beta2, eps, weight_decay };
        let copy = |var: &Var| Var::from_tensor(&var.as_tensor().copy()?.detach());
        let vars: candle_core::Result<Vec<Var>> = vars.iter().map(copy).collect();
        let vars = vars?;
        Ok(Some(Self { optimizer: candle_nn::AdamW::new(vars.clone(), params)?, vars, ns: 0.0 }))
    }

    /// Takes a step at this learning rate with the gradients of `vars`.
    pub(crate) fn step(
        &mut self,
        vars: &[Var],
        grads: &GradStore,
        lr: f64,
    ) -> candle_core::Result<()> {
        let mut own = GradStore::default();
        for (var, copy) in vars.iter().zip(&self.vars) {
            if let Some(grad) = grads.get(var) {
                own.insert(copy, grad.clone());
            }
        }
        let start = Instant::now();
        self.optimizer.set_learning_rate(lr);
        self.optimizer.step(&own)?;
        self.ns += start.elapsed().as_nanos() as f64;
        Ok(())
    }
}

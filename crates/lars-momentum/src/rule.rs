//! The rule of LARS: settings, scalars, the local rate, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{Compute, NormedEquation, ParamAndGradient, normed_rule};
use fusestep_launch::{Domain, Excluded, GroupValues, settings};

settings! {
    /// Hyper-parameters of one LARS optimizer.
    ///
    /// # Cost
    /// 20 bytes of memory traffic per f32 element (read p, g, u; write p, u). If a tensor does not
    /// fit into the cache, g and p are read again: 28. The second read of p is saved if the backend
    /// has a cached norm from the last update. The second read of g is saved if the step has summed
    /// g for the global norm. Twice all that for f64.
    pub struct Lars {
        /// Learning rate per step; 0.1 by default.
        pub lr: f64 = 0.1 => number(Domain::NotNegative);
        /// Decay of the velocity (μ), in [0, 1); 0.9 by default.
        pub momentum: f64 = 0.9 => number(Domain::BelowOne);
        /// Factor on the trust ratio (η), at least 0; 0.001 by default.
        pub trust_coefficient: f64 = 0.001 => number(Domain::NotNegative);
        /// λ, added to the gradient as λ·p; 0.0005 by default.
        pub weight_decay: f64 = 0.0005 => number(Domain::NotNegative);
        /// ε, added to the denominator of the trust ratio, at least 0; 0 by default.
        pub eps: f64 = 0.0 => number(Domain::NotNegative);
        /// Factor on every gradient, for example one over the loss scale; above 0, and 1 by
        /// default.
        pub rescale: f64 = 1.0 => number(Domain::Positive);
        /// Rate of tensors whose own weight decay is 0.
        pub excluded: Excluded = Excluded::PlainLr => hidden;
    }
}

normed_rule!(Lars is "lars" of "lars_momentum", with [Velocity]);

impl NormedEquation<1> for Lars {
    type Norms = ParamAndGradient;
    type RateScalars = [f64; 3];
    type Scalars<T: Compute> = [T; 2];
    type RateStepScalars = [f64; 1];
    type StepScalars<T: Compute> = [T; 0];
    type TensorScalars<T: Compute> = [T; 2];
    const CODINGS: [Coding; 1] = [Coding::Signed];

    fn rate_scalars(&self) -> [f64; 3] {
        [self.trust_coefficient, self.eps, self.rescale]
    }

    fn scalars(&self) -> [f64; 2] {
        [self.momentum, self.rescale]
    }

    // λ.
    fn rate_step_scalars(&self, values: GroupValues) -> [f64; 1] {
        [values.weight_decay.unwrap_or(self.weight_decay)]
    }

    fn step_scalars(&self, _values: GroupValues) -> [f64; 0] {
        []
    }

    fn derived_from(&self) -> Vec<f64> {
        vec![self.weight_decay, self.excluded.plain_scalar()]
    }

    fn second_norm(&[_, _, rescale]: &[f64; 3], grad_factor: f64, norm: f64) -> f64 {
        (rescale * grad_factor) * norm
    }

    fn rate(
        &[trust_coefficient, eps, _]: &[f64; 3],
        &[lambda]: &[f64; 1],
        lr: f64,
        [p, g]: [f64; 2],
    ) -> f64 {
        lr * trust_coefficient * p / (g + lambda * p + eps)
    }

    fn tensor_scalars<T: Compute>(rate: T, &[lambda]: &[f64; 1], _: &[T; 0]) -> [T; 2] {
        [rate, T::round(lambda)]
    }

    // The operations of `kernels/lars_momentum.cu`, in the same order.
    #[inline(always)]
    fn element<T: Compute>(
        &[momentum, rescale]: &[T; 2],
        &[local, lambda]: &[T; 2],
        p: T,
        g: T,
        [u]: [T; 1],
    ) -> (T, [T; 1]) {
        let d = rescale * g + lambda * p;
        let u = momentum * u + local * d;
        (p - u, [u])
    }
}

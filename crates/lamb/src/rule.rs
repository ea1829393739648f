//! The rule of LAMB: settings, scalars, the trust ratio, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{
    Compute, Directed, NormedEquation, ParamAndDirection, integer_power, normed_rule,
};
use fusestep_launch::{Domain, Excluded, GroupValues, settings};

settings! {
    /// Hyper-parameters of one LAMB optimizer.
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element (read p, g, m, v; write p, m, v). 44 if a tensor
    /// does not fit into the cache and all four lists are read again. Twice that for f64. The
    /// moments are computed twice and not written in between. Thus a skipped tensor keeps every
    /// bit, and only final values are written.
    pub struct Lamb {
        /// Learning rate per step; 1e-3 by default.
        pub lr: f64 = 1e-3 => number(Domain::NotNegative);
        /// Decay of the first moment, in [0, 1); 0.9 by default.
        pub beta1: f64 = 0.9 => number(Domain::BelowOne);
        /// Decay of the second moment, in [0, 1); 0.999 by default.
        pub beta2: f64 = 0.999 => number(Domain::BelowOne);
        /// ε, added to the root from outside, at least 0; 1e-6 by default.
        pub eps: f64 = 1e-6 => number(Domain::NotNegative);
        /// λ, added to the direction as λ·p; 0.01 by default.
        pub weight_decay: f64 = 0.01 => number(Domain::NotNegative);
        /// Rate of tensors whose own weight decay is 0.
        pub excluded: Excluded = Excluded::PlainLr => hidden;
    }
}

normed_rule!(Lamb is "lamb" of "lamb", with [Moment1, Moment2]);

impl NormedEquation<2> for Lamb {
    type Norms = ParamAndDirection;
    type RateScalars = [f64; 0];
    type Scalars<T: Compute> = [T; 4];
    type RateStepScalars = [f64; 0];
    type StepScalars<T: Compute> = [T; 3];
    type TensorScalars<T: Compute> = [T; 4];
    const CODINGS: [Coding; 2] = [Coding::Signed, Coding::Root];

    fn rate_scalars(&self) -> [f64; 0] {
        []
    }

    fn scalars(&self) -> [f64; 4] {
        [self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2]
    }

    fn rate_step_scalars(&self, _values: GroupValues) -> [f64; 0] {
        []
    }

    // m̂ / (√v̂ + ε) is computed as m·s / (√v + ε·b) with b = √(1 − β₂ᵗ) and s = b / (1 − β₁ᵗ).
    // Thus the bias corrections cost no division per element.
    fn step_scalars(&self, values: GroupValues) -> [f64; 3] {
        let bias2_sqrt = (1.0 - integer_power(self.beta2, values.step)).sqrt();
        [
            // s.
            bias2_sqrt / (1.0 - integer_power(self.beta1, values.step)),
            // ε·b.
            self.eps * bias2_sqrt,
            // λ.
            values.weight_decay.unwrap_or(self.weight_decay),
        ]
    }

    fn derived_from(&self) -> Vec<f64> {
        let plain = self.excluded.plain_scalar();
        vec![self.beta1, self.beta2, self.weight_decay, plain, self.eps]
    }

    // lr·φ.
    fn rate(_: &[f64; 0], _: &[f64; 0], lr: f64, [p, r]: [f64; 2]) -> f64 {
        lr * (p / r)
    }

    fn tensor_scalars<T: Compute>(rate: T, _: &[f64; 0], &[scale, eps, lambda]: &[T; 3]) -> [T; 4] {
        [rate, scale, eps, lambda]
    }

    // The operations of `kernels/lamb.cu`, in the same order.
    #[inline(always)]
    fn element<T: Compute>(
        scalars: &[T; 4],
        &[rate, scale, eps, lambda]: &[T; 4],
        p: T,
        g: T,
        state: [T; 2],
    ) -> (T, [T; 2]) {
        let (r, state) = moved(scalars, &[scale, eps, lambda], p, g, state);
        (p - rate * r, state)
    }
}

impl Directed<2> for Lamb {
    #[inline(always)]
    fn direction<T: Compute>(
        scalars: &[T; 4],
        step_scalars: &[T; 3],
        p: T,
        g: T,
        state: [T; 2],
    ) -> T {
        moved(scalars, step_scalars, p, g, state).0
    }
}

/// The direction of the step, and the new moments.
#[inline(always)]
fn moved<T: Compute>(
    &[beta1, one_minus_beta1, beta2, one_minus_beta2]: &[T; 4],
    &[scale, eps, lambda]: &[T; 3],
    p: T,
    g: T,
    [m, v]: [T; 2],
) -> (T, [T; 2]) {
    let m = beta1 * m + one_minus_beta1 * g;
    let v = beta2 * v + one_minus_beta2 * (g * g);
    let d = v.sqrt() + eps;
    (scale * (m / d) + lambda * p, [m, v])
}

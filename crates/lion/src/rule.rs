//! The rule of Lion: settings, scalars, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{Compute, Equation, equation_rule};
use fusestep_launch::{Domain, GroupValues, Objective, settings};

settings! {
    /// Hyper-parameters of one Lion optimizer.
    ///
    /// Every element moves by lr at each step, so lr is 3 to 10 times smaller than AdamW's, and λ
    /// as many times larger.
    ///
    /// # Cost
    /// 20 bytes of memory traffic per f32 element (read p, g, m; write p, m); twice that for f64.
    pub struct Lion {
        /// Learning rate per step; 1e-4 by default.
        pub lr: f64 = 1e-4 => number(Domain::NotNegative);
        /// Share of the moment in the direction of the step, in [0, 1); 0.9 by default.
        pub beta1: f64 = 0.9 => number(Domain::BelowOne);
        /// Decay of the moment, in [0, 1); 0.99 by default.
        pub beta2: f64 = 0.99 => number(Domain::BelowOne);
        /// λ: p is multiplied by 1 − lr·λ; 0 by default.
        pub weight_decay: f64 = 0.0 => number(Domain::NotNegative);
        /// Whether to step against or along the gradient.
        pub objective: Objective = Objective::Minimize => switch("maximize");
    }
}

equation_rule!(Lion is "lion", with [Moment1], 4, 2);

impl Equation<1, 4, 2> for Lion {
    const CODINGS: Option<[Coding; 1]> = Some([Coding::Signed]);

    fn scalars(&self) -> [f64; 4] {
        [self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2]
    }

    fn step_scalars(&self, values: GroupValues) -> [f64; 2] {
        let lr = values.lr * values.lr_scale;
        let lambda = values.weight_decay.unwrap_or(self.weight_decay);
        [
            // The learning rate times the tensor's own factor.
            lr,
            // 1 − lr·λ.
            1.0 - lr * lambda,
        ]
    }

    fn derived_from(&self) -> Vec<f64> {
        vec![self.weight_decay]
    }

    // The operations of `kernels/lion.cu`, in the same order.
    #[inline(always)]
    fn element<T: Compute>(
        &[beta1, one_minus_beta1, beta2, one_minus_beta2]: &[T; 4],
        &[lr, decay]: &[T; 2],
        p: T,
        g: T,
        [m]: [T; 1],
    ) -> (T, [T; 1]) {
        let c = beta1 * m + one_minus_beta1 * g;
        let m = beta2 * m + one_minus_beta2 * g;
        (p * decay - lr * sign(c), [m])
    }
}

/// 1, −1, or the value itself if it is zero or NaN.
#[inline(always)]
fn sign<T: Compute>(x: T) -> T {
    let negative = if x < T::ZERO { -T::ONE } else { x };
    if x > T::ZERO { T::ONE } else { negative }
}

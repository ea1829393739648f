//! The rule of Adamax: settings, scalars, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{Compute, Equation, equation_rule, integer_power};
use fusestep_launch::{Domain, GroupValues, Objective, settings};

settings! {
    /// Hyper-parameters of one Adamax optimizer.
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element (read p, g, m, u; write p, m, u); twice that for
    /// f64.
    pub struct Adamax {
        /// Learning rate per step; 2e-3 by default.
        pub lr: f64 = 2e-3 => number(Domain::NotNegative);
        /// Decay of the first moment, in [0, 1); 0.9 by default.
        pub beta1: f64 = 0.9 => number(Domain::BelowOne);
        /// Decay of the largest gradient, in [0, 1); 0.999 by default.
        pub beta2: f64 = 0.999 => number(Domain::BelowOne);
        /// ε, added to the gradient's magnitude, at least 0; 1e-8 by default.
        pub eps: f64 = 1e-8 => number(Domain::NotNegative);
        /// λ: λ·p is added to the gradient; 0 by default.
        pub weight_decay: f64 = 0.0 => number(Domain::NotNegative);
        /// Whether to step against or along the gradient.
        pub objective: Objective = Objective::Minimize => switch("maximize");
    }
}

equation_rule!(Adamax is "adamax", with [Moment1, MaxGrad], 4, 2);

impl Equation<2, 4, 2> for Adamax {
    const CODINGS: Option<[Coding; 2]> = Some([Coding::Signed, Coding::Positive]);

    fn scalars(&self) -> [f64; 4] {
        [self.beta1, 1.0 - self.beta1, self.beta2, self.eps]
    }

    fn step_scalars(&self, values: GroupValues) -> [f64; 2] {
        [
            // lr / (1 − β₁ᵗ).
            values.lr * values.lr_scale / (1.0 - integer_power(self.beta1, values.step)),
            // λ.
            values.weight_decay.unwrap_or(self.weight_decay),
        ]
    }

    fn derived_from(&self) -> Vec<f64> {
        vec![self.beta1, self.weight_decay]
    }

    // The operations of `kernels/adamax.cu`, in the same order.
    #[inline(always)]
    fn element<T: Compute>(
        &[beta1, one_minus_beta1, beta2, eps]: &[T; 4],
        &[step_size, l2]: &[T; 2],
        p: T,
        mut g: T,
        [m, u]: [T; 2],
    ) -> (T, [T; 2]) {
        if l2 != T::ZERO {
            g = g + l2 * p;
        }
        let m = beta1 * m + one_minus_beta1 * g;
        let magnitude = if g < T::ZERO { -g } else { g };
        let u = (beta2 * u).maximum(magnitude + eps);
        (p - step_size * (m / u), [m, u])
    }
}

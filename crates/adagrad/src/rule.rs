//! The rule of Adagrad: settings, scalars, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{Compute, Equation, equation_rule};
use fusestep_launch::{Domain, GroupValues, Objective, settings};

settings! {
    /// Hyper-parameters of one Adagrad optimizer.
    ///
    /// # Cost
    /// 20 bytes of memory traffic per f32 element (read p, g, s; write p, s); twice that for f64.
    pub struct Adagrad {
        /// Learning rate of the first step; 1e-2 by default.
        pub lr: f64 = 1e-2 => number(Domain::NotNegative);
        /// Decay of the learning rate, at least 0: step t uses lr / (1 + (t − 1)·lr_decay). 0 by
        /// default.
        pub lr_decay: f64 = 0.0 => number(Domain::NotNegative);
        /// Initial value of the sum of squared gradients, at least 0; 0 by default.
        pub initial_sum: f64 = 0.0 => number(Domain::NotNegative);
        /// ε, added to the root from outside, at least 0; 1e-10 by default.
        pub eps: f64 = 1e-10 => number(Domain::NotNegative);
        /// λ: λ·p is added to the gradient; 0 by default.
        pub weight_decay: f64 = 0.0 => number(Domain::NotNegative);
        /// Whether to step against or along the gradient.
        pub objective: Objective = Objective::Minimize => switch("maximize");
    }
}

equation_rule!(Adagrad is "adagrad", with [Sum], 1, 3);

impl Equation<1, 1, 3> for Adagrad {
    const CODINGS: Option<[Coding; 1]> = Some([Coding::Root]);

    fn scalars(&self) -> [f64; 1] {
        [self.eps]
    }

    fn step_scalars(&self, values: GroupValues) -> [f64; 3] {
        let steps_before = values.step.saturating_sub(1);
        let lr = values.lr * values.lr_scale;
        [
            // lr / (1 + (t − 1)·lr_decay).
            lr / (1.0 + steps_before as f64 * self.lr_decay),
            // λ.
            values.weight_decay.unwrap_or(self.weight_decay),
            // The initial value of the sum at the first step, else 0. State starts at 0 everywhere.
            // The first step adds the initial value to the square, and later steps find it in the
            // sum.
            match values.step {
                1 => self.initial_sum,
                _ => 0.0,
            },
        ]
    }

    fn derived_from(&self) -> Vec<f64> {
        vec![self.lr_decay, self.weight_decay, self.initial_sum]
    }

    // The operations of `kernels/adagrad.cu`, in the same order.
    #[inline(always)]
    fn element<T: Compute>(
        &[eps]: &[T; 1],
        &[step_size, l2, initial]: &[T; 3],
        p: T,
        mut g: T,
        [s]: [T; 1],
    ) -> (T, [T; 1]) {
        if l2 != T::ZERO {
            g = g + l2 * p;
        }
        let s = (s + initial) + g * g;
        let d = s.sqrt() + eps;
        (p - step_size * (g / d), [s])
    }
}

//! The rule: hyper-parameters, what a step takes of them, and the update of one element.

use fusestep_elementwise::{
    Compute, ElementRule, Entries, Update, UpdateVisitor, element_kernel, integer_power,
    padded_bytes, read_values,
};
use fusestep_launch::{
    Domain, Format, GroupValues, MultiTensorKernel, Precision, RuleError, Settings, UpdateRule,
    entry, settings, step_scalars_entry,
};
use fusestep_tensor::{DType, Role};

settings! {
    /// Hyper-parameters of one Schedule-Free AdamW optimizer.
    ///
    /// The learning rate stays as it is after the warm-up: the average takes the place of a
    /// schedule. A rate that is changed all the same changes the length of steps, not the weights
    /// of the average.
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element (read p, g, v, z; write p, v, z), twice that for
    /// f64.
    pub struct ScheduleFree {
        /// Learning rate per step, after the warm-up; 2.5e-3 by default.
        pub lr: f64 = 2.5e-3 => number(Domain::NotNegative);
        /// β₁: the share of the average in the point where gradients are taken, in (0, 1); 0.9 by
        /// default.
        pub beta1: f64 = 0.9 => number(Domain::BetweenZeroAndOne);
        /// β₂: decay of the second moment, in [0, 1); 0.999 by default.
        pub beta2: f64 = 0.999 => number(Domain::BelowOne);
        /// ε, added to the root outside of it, at least 0; 1e-8 by default.
        pub eps: f64 = 1e-8 => number(Domain::NotNegative);
        /// λ: lr·λ·y is taken off, as AdamW does; 0 by default.
        pub weight_decay: f64 = 0.0 => number(Domain::NotNegative);
        /// Steps over which the learning rate rises to `lr`; 0 by default.
        pub warmup_steps: u32 = 0 => count;
    }
}

impl ScheduleFree {
    /// The part of the learning rate that step t has, and the part of z that its average takes.
    ///
    /// The weight of a step is the square of its rate, so that the sum of all weights is that of
    /// squares up to the end of the warm-up and counts from there.
    fn warmed_and_share(&self, step: u64) -> (f64, f64) {
        let (t, w) = (step as f64, f64::from(self.warmup_steps));
        if t < w {
            (t / w, 6.0 * t / ((t + 1.0) * (2.0 * t + 1.0)))
        } else if w > 0.0 {
            let rising = (w + 1.0) * (2.0 * w + 1.0) / (6.0 * w);
            (1.0, 1.0 / (rising + (t - w)))
        } else {
            (1.0, 1.0 / t)
        }
    }
}

impl UpdateRule for ScheduleFree {
    fn name(&self) -> &'static str {
        "schedule-free"
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        self.numbers()
    }

    fn averaging(&self) -> Option<f64> {
        Some(1.0 - 1.0 / self.beta1)
    }

    /// The parameter is y, of which β₁ tells how far it is from the average x; and how much a step
    /// weighs in x follows from the length of the warm-up.
    fn settings_of_state(&self) -> Vec<(&'static str, String)> {
        vec![("beta1", self.beta1.to_string()), ("warmup_steps", self.warmup_steps.to_string())]
    }

    fn validate(&self) -> Result<(), RuleError> {
        self.check()
    }

    fn kernel(
        &self,
        dtype: DType,
        precision: Precision,
    ) -> Result<Box<dyn MultiTensorKernel>, RuleError> {
        element_kernel(self, dtype, precision)
    }
}

impl ElementRule<2, 6> for ScheduleFree {
    const STEM: &'static str = "schedule_free";

    fn entries(format: Format) -> Entries {
        Entries {
            update: entry!("schedule_free", format),
            step_scalars: step_scalars_entry!("schedule_free", format),
        }
    }

    fn state(&self) -> &'static [Role] {
        &[Role::Moment2, Role::Base]
    }

    fn flags(&self) -> u32 {
        0
    }

    fn scalars(&self) -> [f64; 2] {
        [self.beta2, 1.0 - self.beta2]
    }

    // g / (√(v / (1 − β₂ᵗ)) + ε) is b·g / (√v + ε·b) with b = √(1 − β₂ᵗ).
    fn step_scalars(&self, values: GroupValues) -> [f64; 6] {
        let (warmed, share) = self.warmed_and_share(values.step);
        let lr = values.lr * values.lr_scale * warmed;
        let bias2_sqrt = (1.0 - integer_power(self.beta2, values.step)).sqrt();
        [
            // The step of z.
            lr,
            // c, by which y goes towards z; 1 at the first step, where z starts at y, and no other.
            share,
            // The step of y besides.
            lr * (1.0 - self.beta1 * (1.0 - share)),
            bias2_sqrt,
            // ε·√(1 − β₂ᵗ).
            self.eps * bias2_sqrt,
            // λ.
            values.weight_decay.unwrap_or(self.weight_decay),
        ]
    }

    fn hyper_parameters_of_step_scalars(&self) -> Vec<f64> {
        let warmup_steps = f64::from(self.warmup_steps);
        vec![self.beta1, self.beta2, self.eps, self.weight_decay, warmup_steps]
    }

    fn with_update<T: Compute, V: UpdateVisitor<T>>(
        &self,
        scalars: [T; 2],
        visitor: V,
    ) -> V::Output {
        visitor.visit::<_, 2>(ScheduleFreeUpdate { scalars })
    }
}

/// The update of `kernels/schedule_free.cu`, operation for operation.
#[derive(Clone, Copy)]
struct ScheduleFreeUpdate<T> {
    scalars: [T; 2],
}

impl<T: Compute> Update<T, 2> for ScheduleFreeUpdate<T> {
    type StepScalars = [T; 6];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(6);

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> [T; 6] {
        read_values(bytes)
    }

    #[inline(always)]
    fn element(
        &self,
        &[lr, share, own_step, bias2_sqrt, eps, lambda]: &[T; 6],
        p: T,
        g: T,
        [v, z]: [T; 2],
    ) -> (T, [T; 2]) {
        let [beta2, one_minus_beta2] = self.scalars;
        let z = if share == T::ONE { p } else { z };
        let v = beta2 * v + one_minus_beta2 * (g * g);
        let mut n = bias2_sqrt * (g / (v.sqrt() + eps));
        if lambda != T::ZERO {
            n = n + lambda * p;
        }
        let y = p + share * (z - p) - own_step * n;
        (y, [v, z - lr * n])
    }
}

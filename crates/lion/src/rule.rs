//! The rule: hyper-parameters, what a step takes of them, and the update of one element.

use fusestep_elementwise::{
    Compute, ElementRule, Entries, Update, element_kernel, padded_bytes, read_values, run_format,
};
use fusestep_launch::{
    Domain, Format, GroupValues, HostRun, MultiTensorKernel, Objective, Precision, RuleError,
    UpdateRule, check_hyper, entry, step_scalars_entry,
};
use fusestep_tensor::{DType, Role};

/// Hyper-parameters of one Lion optimizer.
///
/// Every element moves by lr at each step, so lr is 3 to 10 times smaller than AdamW's, and λ as
/// many times larger.
///
/// # Cost
/// 20 bytes of memory traffic per f32 element (read p, g, m; write p, m); twice that for f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Learning rate per step; 1e-4 by default.
    pub lr: f64,
    /// Share of the moment in the direction of the step, in [0, 1); 0.9 by default.
    pub beta1: f64,
    /// Decay of the moment, in [0, 1); 0.99 by default.
    pub beta2: f64,
    /// λ: p is multiplied by 1 − lr·λ; 0 by default.
    pub weight_decay: f64,
    /// Whether to step against or along the gradient.
    pub objective: Objective,
}

impl Default for Lion {
    fn default() -> Self {
        Self {
            lr: 1e-4,
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.0,
            objective: Objective::Minimize,
        }
    }
}

impl UpdateRule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr", self.lr),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("weight_decay", self.weight_decay),
        ]
    }

    fn objective(&self) -> Option<Objective> {
        Some(self.objective)
    }

    fn validate(&self) -> Result<(), RuleError> {
        check_hyper(&[
            ("lr", self.lr, Domain::NotNegative),
            ("beta1", self.beta1, Domain::BelowOne),
            ("beta2", self.beta2, Domain::BelowOne),
            ("weight_decay", self.weight_decay, Domain::NotNegative),
        ])
    }

    fn kernel(
        &self,
        dtype: DType,
        precision: Precision,
    ) -> Result<Box<dyn MultiTensorKernel>, RuleError> {
        element_kernel(self, dtype, precision)
    }
}

/// Flag: the gradient's sign is turned (maximize).
const FLAG_MAXIMIZE: u32 = 1;

/// Lists of state in the order of a record's addresses.
const STATE: [Role; 1] = [Role::Moment1];

impl ElementRule<4, 2> for Lion {
    const STEM: &'static str = "lion";

    fn entries(format: Format) -> Entries {
        Entries {
            update: entry!("lion", format),
            step_scalars: step_scalars_entry!("lion", format),
        }
    }

    fn state(&self) -> &'static [Role] {
        &STATE
    }

    fn flags(&self) -> u32 {
        match self.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        }
    }

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

    fn hyper_parameters_of_step_scalars(&self) -> Vec<f64> {
        vec![self.weight_decay]
    }

    fn run<T: Compute>(&self, scalars: [T; 4], format: Format, run: HostRun<'_, '_>) {
        let update = LionUpdate { scalars, objective: self.objective };
        run_format::<T, _, 1>(&update, format, run);
    }
}

/// The update of `kernels/lion.cu`, operation for operation.
#[derive(Clone, Copy)]
struct LionUpdate<T> {
    scalars: [T; 4],
    objective: Objective,
}

impl<T: Compute> Update<T, 1> for LionUpdate<T> {
    type StepScalars = [T; 2];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(2);

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> [T; 2] {
        read_values(bytes)
    }

    #[inline(always)]
    fn element(&self, &[lr, decay]: &[T; 2], p: T, g: T, [m]: [T; 1]) -> (T, [T; 1]) {
        let [beta1, one_minus_beta1, beta2, one_minus_beta2] = self.scalars;
        let g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
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

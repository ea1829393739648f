//! The rule: hyper-parameters, what a step takes of them, and the update of one element.

use fusestep_elementwise::{
    Compute, ElementRule, Entries, Update, element_kernel, padded_bytes, read_values, run_format,
};
use fusestep_launch::{
    Domain, Format, GroupValues, HostRun, MultiTensorKernel, Objective, Precision, RuleError,
    UpdateRule, check_hyper, entry, step_scalars_entry,
};
use fusestep_tensor::{DType, Role};

/// Hyper-parameters of one Adagrad optimizer.
///
/// # Cost
/// 20 bytes of memory traffic per f32 element (read p, g, s; write p, s); twice that for f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// Learning rate of the first step; 1e-2 by default.
    pub lr: f64,
    /// How the learning rate falls, at least 0: step t uses lr / (1 + (t − 1)·lr_decay); 0 by
    /// default.
    pub lr_decay: f64,
    /// What the sum of squared gradients starts from, at least 0; 0 by default.
    pub initial_sum: f64,
    /// ε, added to the root outside of it, at least 0; 1e-10 by default.
    pub eps: f64,
    /// λ: λ·p is added to the gradient; 0 by default.
    pub weight_decay: f64,
    /// Whether to step against or along the gradient.
    pub objective: Objective,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            lr_decay: 0.0,
            initial_sum: 0.0,
            eps: 1e-10,
            weight_decay: 0.0,
            objective: Objective::Minimize,
        }
    }
}

impl UpdateRule for Adagrad {
    fn name(&self) -> &'static str {
        "adagrad"
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr", self.lr),
            ("lr_decay", self.lr_decay),
            ("initial_sum", self.initial_sum),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
        ]
    }

    fn objective(&self) -> Option<Objective> {
        Some(self.objective)
    }

    fn validate(&self) -> Result<(), RuleError> {
        let all = self.hyper_parameters();
        let all: Vec<_> = all.into_iter().map(|(what, v)| (what, v, Domain::NotNegative)).collect();
        check_hyper(&all)
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
const STATE: [Role; 1] = [Role::Sum];

impl ElementRule<1, 3> for Adagrad {
    const STEM: &'static str = "adagrad";

    fn entries(format: Format) -> Entries {
        Entries {
            update: entry!("adagrad", format),
            step_scalars: step_scalars_entry!("adagrad", format),
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
            // What the sum starts from at the first step, else 0.
            // State starts at 0 everywhere; the first step puts the initial value under the square,
            // later ones find it there.
            match values.step {
                1 => self.initial_sum,
                _ => 0.0,
            },
        ]
    }

    fn hyper_parameters_of_step_scalars(&self) -> Vec<f64> {
        vec![self.lr_decay, self.weight_decay, self.initial_sum]
    }

    fn run<T: Compute>(&self, scalars: [T; 1], format: Format, run: HostRun<'_, '_>) {
        let update = AdagradUpdate { eps: scalars[0], objective: self.objective };
        run_format::<T, _, 1>(&update, format, run);
    }
}

/// The update of `kernels/adagrad.cu`, operation for operation.
#[derive(Clone, Copy)]
struct AdagradUpdate<T> {
    eps: T,
    objective: Objective,
}

impl<T: Compute> Update<T, 1> for AdagradUpdate<T> {
    type StepScalars = [T; 3];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(3);

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> [T; 3] {
        read_values(bytes)
    }

    #[inline(always)]
    fn element(&self, &[step_size, l2, initial]: &[T; 3], p: T, g: T, [s]: [T; 1]) -> (T, [T; 1]) {
        let mut g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
        if l2 != T::ZERO {
            g = g + l2 * p;
        }
        let s = (s + initial) + g * g;
        let d = s.sqrt() + self.eps;
        (p - step_size * (g / d), [s])
    }
}

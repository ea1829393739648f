//! The rule: hyper-parameters, what a step takes of them, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{
    Compute, ElementRule, Entries, Update, UpdateVisitor, element_kernel, integer_power,
    padded_bytes, read_values,
};
use fusestep_launch::{
    Domain, Format, GroupValues, MultiTensorKernel, Objective, Precision, RuleError, Settings,
    UpdateRule, WeightDecay, entry, settings, step_scalars_entry, switch,
};
use fusestep_tensor::{DType, Role};

/// Which second moment scales the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SecondMoment {
    /// The running mean itself (Adam).
    #[default]
    Running,
    /// The largest one so far (AMSGrad).
    Largest,
}

switch!(SecondMoment: Running, Largest);

settings! {
    /// Hyper-parameters of one Adam or AdamW optimizer.
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element (read p, g, m, v; write p, m, v), 36 with
    /// AMSGrad; twice that for f64; from 14 on for 16-bit formats.
    pub struct Adam {
        /// Learning rate per step; 1e-3 by default.
        pub lr: f64 = 1e-3 => number(Domain::NotNegative);
        /// Decay of the first moment, in [0, 1); 0.9 by default.
        pub beta1: f64 = 0.9 => number(Domain::BelowOne);
        /// Decay of the second moment, in [0, 1); 0.999 by default.
        pub beta2: f64 = 0.999 => number(Domain::BelowOne);
        /// ε, added to the root outside of it, at least 0; 1e-8 by default.
        pub eps: f64 = 1e-8 => number(Domain::NotNegative);
        /// λ and how it enters; decoupled 0.01 by default, as in PyTorch's AdamW.
        pub weight_decay: WeightDecay = WeightDecay::Decoupled(0.01) => decay;
        /// Second moment that scales the step: the running one, or with AMSGrad its largest value
        /// so far.
        pub second_moment: SecondMoment = SecondMoment::Running => switch("amsgrad");
        /// Whether to step against or along the gradient.
        pub objective: Objective = Objective::Minimize => switch("maximize");
    }
}

impl UpdateRule for Adam {
    fn name(&self) -> &'static str {
        match self.weight_decay {
            WeightDecay::Decoupled(_) => "adamw",
            WeightDecay::L2(_) => "adam",
        }
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        self.numbers()
    }

    fn objective(&self) -> Option<Objective> {
        Some(self.objective)
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

/// Flag: a fifth list, `max_moment2`, replaces `moment2` in the root (AMSGrad).
const FLAG_AMSGRAD: u32 = 1;

/// Flag: the gradient's sign is turned (maximize).
const FLAG_MAXIMIZE: u32 = 2;

/// Lists of state in the order of a record's addresses; the last only with AMSGrad.
const STATE: [Role; 3] = [Role::Moment1, Role::Moment2, Role::MaxMoment2];

impl ElementRule<4, 4> for Adam {
    const STEM: &'static str = "fused_adam";

    fn entries(format: Format) -> Entries {
        Entries {
            update: entry!("fused_adam", format),
            step_scalars: step_scalars_entry!("fused_adam", format),
        }
    }

    fn state(&self) -> &'static [Role] {
        match self.second_moment {
            SecondMoment::Running => &STATE[..2],
            SecondMoment::Largest => &STATE,
        }
    }

    fn flags(&self) -> u32 {
        let amsgrad = match self.second_moment {
            SecondMoment::Running => 0,
            SecondMoment::Largest => FLAG_AMSGRAD,
        };
        let maximize = match self.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        };
        amsgrad | maximize
    }

    fn scalars(&self) -> [f64; 4] {
        [self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2]
    }

    // m̂ / (√v̂ + ε) is m·s / (√v + ε·b) with b = √(1 − β₂ᵗ) and s = b / (1 − β₁ᵗ): the bias
    // corrections cost no division per element.
    fn step_scalars(&self, values: GroupValues) -> [f64; 4] {
        let lr = values.lr * values.lr_scale;
        let lambda = values.weight_decay.unwrap_or_else(|| self.weight_decay.lambda());
        let (decay, l2) = match self.weight_decay {
            WeightDecay::L2(_) => (1.0, lambda),
            WeightDecay::Decoupled(_) => (1.0 - lr * lambda, 0.0),
        };
        let bias2_sqrt = (1.0 - integer_power(self.beta2, values.step)).sqrt();
        [
            // lr·√(1 − β₂ᵗ) / (1 − β₁ᵗ).
            lr * bias2_sqrt / (1.0 - integer_power(self.beta1, values.step)),
            // ε·√(1 − β₂ᵗ).
            self.eps * bias2_sqrt,
            // 1 − lr·λ if decay is decoupled, else 1.
            decay,
            // λ if decay is L2, else 0.
            l2,
        ]
    }

    fn hyper_parameters_of_step_scalars(&self) -> Vec<f64> {
        let (decoupled, lambda) =
            (self.weight_decay.decoupled_scalar(), self.weight_decay.lambda());
        vec![self.beta1, self.beta2, lambda, decoupled, self.eps]
    }

    fn with_update<T: Compute, V: UpdateVisitor<T>>(
        &self,
        scalars: [T; 4],
        visitor: V,
    ) -> V::Output {
        let objective = self.objective;
        // What the compiler knows to be so it does not test for in the loop: 5 % of the arithmetic
        // of Adam all in bf16.
        let as_it_is = objective == Objective::Minimize
            && matches!(self.weight_decay, WeightDecay::Decoupled(_));
        match (self.second_moment, as_it_is) {
            (SecondMoment::Running, true) => {
                visitor.visit::<_, 2>(AdamUpdate::<T, true> { scalars, objective })
            }
            (SecondMoment::Running, false) => {
                visitor.visit::<_, 2>(AdamUpdate::<T, false> { scalars, objective })
            }
            (SecondMoment::Largest, _) => {
                visitor.visit::<_, 3>(AdamUpdate::<T, false> { scalars, objective })
            }
        }
    }
}

/// The update of `kernels/fused_adam.cu`, operation for operation. With `AS_IT_IS` gradients are
/// minimized along and weight decay is no part of them.
#[derive(Clone, Copy)]
struct AdamUpdate<T, const AS_IT_IS: bool> {
    scalars: [T; 4],
    objective: Objective,
}

/// With 2 state tensors Adam, with 3 AMSGrad, whose last is the largest second moment so far.
impl<T: Compute, const N: usize, const AS_IT_IS: bool> Update<T, N> for AdamUpdate<T, AS_IT_IS> {
    type StepScalars = [T; 4];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(4);
    const CODINGS: Option<[Coding; N]> = Some(codings());

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> [T; 4] {
        read_values(bytes)
    }

    const FOLLOWS: bool = true;

    #[inline(always)]
    fn follow(&self, &[step_size, eps, decay, _]: &[T; 4], p: T, values: [T; N]) -> T {
        let d = values[N - 1] + eps;
        p * decay - step_size * (values[0] / d)
    }

    #[inline(always)]
    fn element(&self, step_scalars: &[T; 4], p: T, g: T, state: [T; N]) -> (T, [T; N]) {
        let [beta1, one_minus_beta1, beta2, one_minus_beta2] = self.scalars;
        let [_, _, _, l2] = *step_scalars;
        let mut g = match self.objective {
            Objective::Maximize if !AS_IT_IS => -g,
            _ => g,
        };
        if !AS_IT_IS && l2 != T::ZERO {
            g = g + l2 * p;
        }
        let mut new = state;
        let m = beta1 * state[0] + one_minus_beta1 * g;
        let v = beta2 * state[1] + one_minus_beta2 * (g * g);
        (new[0], new[1]) = (m, v);
        let mut w = v;
        if N > 2 {
            w = if state[N - 1] > v { state[N - 1] } else { v };
            new[N - 1] = w;
        }
        let mut values = new;
        values[N - 1] = w.sqrt();
        (self.follow(step_scalars, p, values), new)
    }
}

/// The moment by its sign, and the rest by its root.
const fn codings<const N: usize>() -> [Coding; N] {
    let mut codings = [Coding::Root; N];
    codings[0] = Coding::Signed;
    codings
}

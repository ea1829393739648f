//! The rule of SGD: hyper-parameters, step scalars, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{
    Compute, ElementRule, Entries, Update, UpdateVisitor, element_kernel, padded_bytes, read_values,
};
use fusestep_launch::{
    Domain, Format, GroupValues, MultiTensorKernel, Objective, Precision, RuleError, Settings,
    UpdateRule, WeightDecay, entry, settings, step_scalars_entry, switch,
};
use fusestep_tensor::{DType, Role};

/// Direction in which a parameter moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Nesterov {
    /// The velocity.
    #[default]
    Plain,
    /// The gradient plus the next step's share of the velocity (Nesterov's).
    Nesterov,
}

switch!(Nesterov: Plain, Nesterov);

settings! {
    /// Hyper-parameters of SGD, with a velocity if momentum is above 0.
    ///
    /// # Cost
    /// 12 bytes of memory traffic per f32 element (read p, g; write p), 20 with a velocity; twice
    /// that for f64.
    pub struct Sgd {
        /// Learning rate per step; 1e-3 by default.
        pub lr: f64 = 1e-3 => number(Domain::NotNegative);
        /// μ, the share of the velocity that remains after a step, in [0, 1). 0 by default, which
        /// keeps no velocity.
        pub momentum: f64 = 0.0 => number(Domain::BelowOne);
        /// τ, the share of the gradient that does not reach the velocity after the first step, in
        /// [0, 1). 0 by default.
        pub dampening: f64 = 0.0 => number(Domain::BelowOne);
        /// Direction of the update: the velocity's or, with Nesterov's momentum, the one a step
        /// ahead of it, which needs momentum and no dampening.
        pub nesterov: Nesterov = Nesterov::Plain => switch("nesterov");
        /// Weight decay λ, and how it enters; L2 0 by default. `rescale` does not apply to λ·p.
        pub weight_decay: WeightDecay = WeightDecay::L2(0.0) => decay;
        /// Factor on the gradient, finite and above 0; 1 by default. 1/n turns a sum over n into a
        /// mean.
        pub rescale: f64 = 1.0 => number(Domain::Positive);
        /// Whether to step against or along the gradient.
        pub objective: Objective = Objective::Minimize => switch("maximize");
    }
}

impl UpdateRule for Sgd {
    fn name(&self) -> &'static str {
        if self.has_velocity() { "momentum" } else { "sgd" }
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        let mut all = vec![("lr", self.lr)];
        if self.has_velocity() {
            all.extend([("momentum", self.momentum), ("dampening", self.dampening)]);
        }
        if self.nesterov == Nesterov::Nesterov {
            all.push(("nesterov", 1.0));
        }
        all.push(match self.weight_decay {
            WeightDecay::L2(lambda) => ("weight_decay", lambda),
            WeightDecay::Decoupled(lambda) => ("decoupled_weight_decay", lambda),
        });
        all.push(("rescale", self.rescale));
        all
    }

    fn objective(&self) -> Option<Objective> {
        Some(self.objective)
    }

    /// The velocity contains λ·p with L2, but not with decoupled decay. The velocity is one of
    /// rescaled gradients, so another `rescale` goes with gradients of another scale.
    fn settings_of_state(&self) -> Vec<(&'static str, String)> {
        let decay = ("weight_decay", self.weight_decay.name().to_owned());
        let with_velocity = self.has_velocity().then_some(decay);
        with_velocity.into_iter().collect()
    }

    fn validate(&self) -> Result<(), RuleError> {
        self.check()?;
        let refuse = |what, expected, found| Err(RuleError::Hyper { what, expected, found });
        if self.nesterov == Nesterov::Nesterov && !self.has_velocity() {
            return refuse("momentum", "a value in (0, 1) with nesterov", self.momentum);
        }
        if self.nesterov == Nesterov::Nesterov && self.dampening != 0.0 {
            return refuse("dampening", "0 with nesterov", self.dampening);
        }
        if !self.has_velocity() && self.dampening != 0.0 {
            return refuse("dampening", "0 without momentum", self.dampening);
        }
        Ok(())
    }

    fn kernel(
        &self,
        dtype: DType,
        precision: Precision,
    ) -> Result<Box<dyn MultiTensorKernel>, RuleError> {
        element_kernel(self, dtype, precision)
    }
}

impl Sgd {
    /// SGD with the usual momentum: μ is 0.9, and the rest is the default.
    pub fn with_momentum() -> Self {
        Self { momentum: 0.9, ..Self::default() }
    }

    /// Whether the rule has a velocity, because momentum is above 0.
    pub fn has_velocity(&self) -> bool {
        self.momentum != 0.0
    }
}

/// Flag of a third list, the velocity.
const FLAG_VELOCITY: u32 = 1;

/// Flag of Nesterov's direction along gradient and velocity; only with [`FLAG_VELOCITY`].
const FLAG_NESTEROV: u32 = 2;

/// Flag that turns the gradient's sign (maximize).
const FLAG_MAXIMIZE: u32 = 4;

/// Lists of state in the order of a record's addresses; only with momentum.
const STATE: [Role; 1] = [Role::Velocity];

impl ElementRule<2, 4> for Sgd {
    const STEM: &'static str = "fused_sgd";

    fn entries(format: Format) -> Entries {
        Entries {
            update: entry!("fused_sgd", format),
            step_scalars: step_scalars_entry!("fused_sgd", format),
        }
    }

    fn state(&self) -> &'static [Role] {
        if self.has_velocity() { &STATE } else { &[] }
    }

    fn flags(&self) -> u32 {
        let velocity = if self.has_velocity() { FLAG_VELOCITY } else { 0 };
        let nesterov = match self.nesterov {
            Nesterov::Plain => 0,
            Nesterov::Nesterov => FLAG_NESTEROV,
        };
        let maximize = match self.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        };
        velocity | nesterov | maximize
    }

    fn scalars(&self) -> [f64; 2] {
        [self.rescale, self.momentum]
    }

    fn step_scalars(&self, values: GroupValues) -> [f64; 4] {
        let lr = values.lr * values.lr_scale;
        let own = values.weight_decay;
        let (decay, l2) = match self.weight_decay {
            WeightDecay::L2(lambda) => (1.0, own.unwrap_or(lambda)),
            WeightDecay::Decoupled(lambda) => (1.0 - lr * own.unwrap_or(lambda), 0.0),
        };
        [
            // The learning rate times the tensor's own factor.
            lr,
            // 1 − lr·λ if decay is decoupled, else 1.
            decay,
            // λ if decay is L2, else 0.
            l2,
            // 1 − τ, and 1 at the first step.
            // The velocity's first value is the whole gradient, as in PyTorch.
            match values.step {
                1 => 1.0,
                _ => 1.0 - self.dampening,
            },
        ]
    }

    fn hyper_parameters_of_step_scalars(&self) -> Vec<f64> {
        vec![self.dampening, self.weight_decay.lambda(), self.weight_decay.decoupled_scalar()]
    }

    fn with_update<T: Compute, V: UpdateVisitor<T>>(
        &self,
        scalars: [T; 2],
        visitor: V,
    ) -> V::Output {
        let update = SgdUpdate { scalars, nesterov: self.nesterov, objective: self.objective };
        if self.has_velocity() {
            visitor.visit::<_, 1>(update)
        } else {
            visitor.visit::<_, 0>(update)
        }
    }
}

/// Update of one element. The operations are those of `kernels/fused_sgd.cu`, in the same order.
#[derive(Clone, Copy)]
struct SgdUpdate<T> {
    scalars: [T; 2],
    nesterov: Nesterov,
    objective: Objective,
}

/// An element with a state tensor takes momentum; without one, plain SGD.
impl<T: Compute, const N: usize> Update<T, N> for SgdUpdate<T> {
    type StepScalars = [T; 4];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(4);
    const CODINGS: Option<[Coding; N]> = Some([Coding::Signed; N]);

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> [T; 4] {
        read_values(bytes)
    }

    #[inline(always)]
    fn element(
        &self,
        &[lr, decay, l2, one_minus_dampening]: &[T; 4],
        p: T,
        g: T,
        state: [T; N],
    ) -> (T, [T; N]) {
        let [rescale, momentum] = self.scalars;
        let mut g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
        g = rescale * g;
        if l2 != T::ZERO {
            g = g + l2 * p;
        }
        let (mut new, mut step) = (state, g);
        if let Some(u) = new.first_mut() {
            *u = momentum * *u + one_minus_dampening * g;
            step = match self.nesterov {
                Nesterov::Plain => *u,
                Nesterov::Nesterov => g + momentum * *u,
            };
        }
        (p * decay - lr * step, new)
    }
}

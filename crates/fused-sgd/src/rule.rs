//! The rule: hyper-parameters, what a step takes of them, and the update of one element.

use fusestep_elementwise::{
    Compute, ElementRule, Entries, Update, element_kernel, padded_bytes, read_values, run_format,
};
use fusestep_launch::{
    Domain, Format, GroupValues, HostRun, MultiTensorKernel, Objective, Precision, RuleError,
    UpdateRule, WeightDecay, check_hyper, entry, step_scalars_entry,
};
use fusestep_tensor::{DType, Role};

/// Where along its velocity a parameter goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Nesterov {
    /// Along the velocity.
    #[default]
    Plain,
    /// Along the gradient and the next step's share of the velocity.
    Nesterov,
}

/// Hyper-parameters of SGD, with a velocity if momentum is above 0.
///
/// # Cost
/// 12 bytes of memory traffic per f32 element (read p, g; write p), 20 with a velocity; twice that
/// for f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate per step; 1e-3 by default.
    pub lr: f64,
    /// μ, what is left of the velocity after a step, in [0, 1); 0 by default, which keeps no
    /// velocity.
    pub momentum: f64,
    /// τ, the share of the gradient that does not reach the velocity after the first step, in [0,
    /// 1); 0 by default.
    pub dampening: f64,
    /// Where along the velocity to go; needs momentum and no dampening.
    pub nesterov: Nesterov,
    /// λ and how it enters; L2 0 by default. It is not rescaled.
    pub weight_decay: WeightDecay,
    /// Factor on the gradient, finite and above 0: 1/n turns a sum over n into a mean; 1 by
    /// default.
    pub rescale: f64,
    /// Whether to step against or along the gradient.
    pub objective: Objective,
}

impl Default for Sgd {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: Nesterov::Plain,
            weight_decay: WeightDecay::L2(0.0),
            rescale: 1.0,
            objective: Objective::Minimize,
        }
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

    /// The velocity has λ·p in it with L2 and not with decoupled decay. It is one of rescaled
    /// gradients, so that another `rescale` goes with gradients of another scale.
    fn settings_of_state(&self) -> Vec<(&'static str, String)> {
        let decay = ("weight_decay", self.weight_decay.name().to_owned());
        let with_velocity = self.has_velocity().then_some(decay);
        with_velocity.into_iter().collect()
    }

    fn validate(&self) -> Result<(), RuleError> {
        let lambda = self.weight_decay.lambda();
        check_hyper(&[
            ("lr", self.lr, Domain::NotNegative),
            ("momentum", self.momentum, Domain::BelowOne),
            ("dampening", self.dampening, Domain::BelowOne),
            ("weight_decay", lambda, Domain::NotNegative),
            ("rescale", self.rescale, Domain::Positive),
        ])?;
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
    /// Momentum as most use it: μ 0.9, the rest as by default.
    pub fn with_momentum() -> Self {
        Self { momentum: 0.9, ..Self::default() }
    }

    /// Whether there is a velocity: momentum is above 0.
    pub fn has_velocity(&self) -> bool {
        self.momentum != 0.0
    }
}

/// Flag: there is a third list, the velocity.
const FLAG_VELOCITY: u32 = 1;

/// Flag: the parameter goes along gradient and velocity (Nesterov); only with [`FLAG_VELOCITY`].
const FLAG_NESTEROV: u32 = 2;

/// Flag: the gradient's sign is turned (maximize).
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

    fn run<T: Compute>(&self, scalars: [T; 2], format: Format, run: HostRun<'_, '_>) {
        let update = SgdUpdate { scalars, nesterov: self.nesterov, objective: self.objective };
        if self.has_velocity() {
            run_format::<T, _, 1>(&update, format, run)
        } else {
            run_format::<T, _, 0>(&update, format, run)
        }
    }
}

/// The update of `kernels/fused_sgd.cu`, operation for operation.
#[derive(Clone, Copy)]
struct SgdUpdate<T> {
    scalars: [T; 2],
    nesterov: Nesterov,
    objective: Objective,
}

/// With a state tensor momentum, without one plain SGD.
impl<T: Compute, const N: usize> Update<T, N> for SgdUpdate<T> {
    type StepScalars = [T; 4];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(4);

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

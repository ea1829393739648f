//! The rule of NAdam: settings, scalars, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{Compute, Equation, Pair, equation_rule, integer_power};
use fusestep_launch::{Domain, GroupValues, Objective, WeightDecay, settings};

settings! {
    /// Hyper-parameters of one NAdam optimizer.
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element (read p, g, m, v; write p, m, v); twice that for
    /// f64.
    pub struct NAdam {
        /// Learning rate per step; 2e-3 by default.
        pub lr: f64 = 2e-3 => number(Domain::NotNegative);
        /// Decay of the first moment, in [0, 1); 0.9 by default.
        pub beta1: f64 = 0.9 => number(Domain::BelowOne);
        /// Decay of the second moment, in [0, 1); 0.999 by default.
        pub beta2: f64 = 0.999 => number(Domain::BelowOne);
        /// ε, added to the root from outside, at least 0; 1e-8 by default.
        pub eps: f64 = 1e-8 => number(Domain::NotNegative);
        /// λ and how it enters; L2 0 by default.
        pub weight_decay: WeightDecay = WeightDecay::L2(0.0) => decay;
        /// ψ, at least 0: β₁'s share of step t is 1 − 0.96^(t·ψ) / 2; 4e-3 by default.
        pub momentum_decay: f64 = 4e-3 => number(Domain::NotNegative);
        /// Whether to step against or along the gradient.
        pub objective: Objective = Objective::Minimize => switch("maximize");
    }
}

/// The logarithm of the f64 nearest to 0.96.
const LN_096: Pair = Pair { high: -0.040821994520255166, low: -8.893492737632459e-19 };

/// Product of momenta below which taking it from 1 leaves 1.
const NEGLIGIBLE: f64 = 1.0 / (1u128 << 64) as f64;

impl NAdam {
    /// 0.96^ψ.
    fn base(&self) -> Pair {
        LN_096.times(Pair::of(self.momentum_decay)).exponential()
    }

    /// μ, the momentum of a step, from 0.96^(t·ψ).
    fn momentum(&self, power: Pair) -> f64 {
        self.beta1 * (1.0 - 0.5 * power.rounded())
    }

    /// The product of the momenta of steps 1 to t, or less than 2⁻⁶⁴ once it is below that.
    ///
    /// It follows from t alone, so that a run that is resumed has the same bits. PyTorch's
    /// `mu_product` is it, as long as β₁ and ψ stay.
    ///
    /// # Cost
    /// At most t turns of a loop of some 20 operations: 62 with the defaults, 421 where ψ is large.
    pub fn momentum_product(&self, step: u64) -> f64 {
        let (base, mut power, mut product) = (self.base(), Pair::ONE, 1.0);
        for _ in 0..step {
            power = power.times(base);
            product *= self.momentum(power);
            if product < NEGLIGIBLE {
                break;
            }
        }
        product
    }
}

equation_rule!(NAdam is "nadam", with [Moment1, Moment2], 4, 5);

impl Equation<2, 4, 5> for NAdam {
    const CODINGS: Option<[Coding; 2]> = Some([Coding::Signed, Coding::Root]);

    fn scalars(&self) -> [f64; 4] {
        [self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2]
    }

    fn step_scalars(&self, values: GroupValues) -> [f64; 5] {
        let lr = values.lr * values.lr_scale;
        let lambda = values.weight_decay.unwrap_or_else(|| self.weight_decay.lambda());
        let (decay, l2) = match self.weight_decay {
            WeightDecay::L2(_) => (1.0, lambda),
            WeightDecay::Decoupled(_) => (1.0 - lr * lambda, 0.0),
        };
        let power = self.base().power(values.step);
        let momentum = self.momentum(power);
        let next = self.momentum(power.times(self.base()));
        let product = self.momentum_product(values.step);
        let bias2_sqrt = (1.0 - integer_power(self.beta2, values.step)).sqrt();
        [
            // What the gradient's step is multiplied with.
            lr * bias2_sqrt * (1.0 - momentum) / (1.0 - product),
            // What that of the first moment is multiplied with.
            lr * bias2_sqrt * next / (1.0 - product * next),
            // ε·√(1 − β₂ᵗ).
            self.eps * bias2_sqrt,
            // 1 − lr·λ if decay is decoupled, else 1.
            decay,
            // λ if decay is L2, else 0.
            l2,
        ]
    }

    fn derived_from(&self) -> Vec<f64> {
        let (lambda, base) = (self.weight_decay.lambda(), self.base());
        let decoupled = self.weight_decay.decoupled_scalar();
        vec![self.beta1, self.beta2, self.eps, lambda, decoupled, base.high, base.low]
    }

    // The operations of `kernels/nadam.cu`, in the same order.
    #[inline(always)]
    fn element<T: Compute>(
        &[beta1, one_minus_beta1, beta2, one_minus_beta2]: &[T; 4],
        &[grad_size, moment_size, eps, decay, l2]: &[T; 5],
        p: T,
        mut g: T,
        [m, v]: [T; 2],
    ) -> (T, [T; 2]) {
        if l2 != T::ZERO {
            g = g + l2 * p;
        }
        let m = beta1 * m + one_minus_beta1 * g;
        let v = beta2 * v + one_minus_beta2 * (g * g);
        let d = v.sqrt() + eps;
        (p * decay - (grad_size * g + moment_size * m) / d, [m, v])
    }
}

//! The rule of RMSprop: hyper-parameters, step scalars, and the update of one element.

use fusestep_elementwise::coded::Coding;
use fusestep_elementwise::{
    Compute, ElementRule, Entries, Update, UpdateVisitor, element_kernel, padded_bytes, read_values,
};
use fusestep_launch::{
    Domain, Format, GroupValues, MultiTensorKernel, Objective, Precision, RuleError, Settings,
    UpdateRule, entry, settings, step_scalars_entry, switch,
};
use fusestep_tensor::{DType, Role};

/// Divisor of the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Centering {
    /// The root of the mean square.
    #[default]
    MeanSquare,
    /// The root of the variance, which is the mean square less the square of the mean (Graves
    /// 2013).
    Centered,
}

switch!(Centering: MeanSquare, Centered);

settings! {
    /// Hyper-parameters of one RMSprop optimizer.
    ///
    /// # Cost
    /// 20 bytes of memory traffic per f32 element (read p, g, v; write p, v), 8 more with momentum
    /// and 8 more if centered; twice that for f64.
    pub struct RmsProp {
        /// Learning rate per step; 1e-2 by default.
        pub lr: f64 = 1e-2 => number(Domain::NotNegative);
        /// α: decay of the mean square, in [0, 1); 0.99 by default.
        pub alpha: f64 = 0.99 => number(Domain::BelowOne);
        /// ε, added to the root from outside, at least 0; 1e-8 by default.
        pub eps: f64 = 1e-8 => number(Domain::NotNegative);
        /// μ, in [0, 1); 0 by default, which means no momentum and keeps no velocity.
        pub momentum: f64 = 0.0 => number(Domain::BelowOne);
        /// λ: λ·p is added to the gradient; 0 by default.
        pub weight_decay: f64 = 0.0 => number(Domain::NotNegative);
        /// Divisor of the gradient: the root of its mean square or, centered, of its variance.
        pub centering: Centering = Centering::MeanSquare => switch("centered");
        /// Whether to step against or along the gradient.
        pub objective: Objective = Objective::Minimize => switch("maximize");
    }
}

impl RmsProp {
    /// Whether the rule has a velocity, because momentum is above 0.
    pub fn has_velocity(&self) -> bool {
        self.momentum != 0.0
    }
}

impl UpdateRule for RmsProp {
    fn name(&self) -> &'static str {
        "rmsprop"
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        let mut all = vec![("lr", self.lr), ("alpha", self.alpha), ("eps", self.eps)];
        if self.has_velocity() {
            all.push(("momentum", self.momentum));
        }
        if self.centering == Centering::Centered {
            all.push(("centered", 1.0));
        }
        all.push(("weight_decay", self.weight_decay));
        all
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

/// Flag that turns the gradient's sign (maximize).
const FLAG_MAXIMIZE: u32 = 1;

/// Flag of the centered form: the mean follows the mean square, and its square is subtracted.
const FLAG_CENTERED: u32 = 2;

/// Flag of a velocity as the last list of state.
const FLAG_VELOCITY: u32 = 4;

impl ElementRule<4, 2> for RmsProp {
    const STEM: &'static str = "rmsprop";

    fn entries(format: Format) -> Entries {
        Entries {
            update: entry!("rmsprop", format),
            step_scalars: step_scalars_entry!("rmsprop", format),
        }
    }

    fn state(&self) -> &'static [Role] {
        match (self.centering, self.has_velocity()) {
            (Centering::MeanSquare, false) => &[Role::Moment2],
            (Centering::MeanSquare, true) => &[Role::Moment2, Role::Velocity],
            (Centering::Centered, false) => &[Role::Moment2, Role::Moment1],
            (Centering::Centered, true) => &[Role::Moment2, Role::Moment1, Role::Velocity],
        }
    }

    fn flags(&self) -> u32 {
        let maximize = match self.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        };
        let centered = match self.centering {
            Centering::MeanSquare => 0,
            Centering::Centered => FLAG_CENTERED,
        };
        let velocity = if self.has_velocity() { FLAG_VELOCITY } else { 0 };
        maximize | centered | velocity
    }

    fn scalars(&self) -> [f64; 4] {
        [self.alpha, 1.0 - self.alpha, self.eps, self.momentum]
    }

    fn step_scalars(&self, values: GroupValues) -> [f64; 2] {
        [
            // The learning rate times the tensor's own factor.
            values.lr * values.lr_scale,
            // λ.
            values.weight_decay.unwrap_or(self.weight_decay),
        ]
    }

    fn hyper_parameters_of_step_scalars(&self) -> Vec<f64> {
        vec![self.weight_decay]
    }

    fn with_update<T: Compute, V: UpdateVisitor<T>>(
        &self,
        scalars: [T; 4],
        visitor: V,
    ) -> V::Output {
        let objective = self.objective;
        match (self.centering, self.has_velocity()) {
            (Centering::MeanSquare, false) => {
                visitor.visit::<_, 1>(RmsPropUpdate::<T, false> { scalars, objective })
            }
            (Centering::MeanSquare, true) => {
                visitor.visit::<_, 2>(RmsPropUpdate::<T, false> { scalars, objective })
            }
            (Centering::Centered, false) => {
                visitor.visit::<_, 2>(RmsPropUpdate::<T, true> { scalars, objective })
            }
            (Centering::Centered, true) => {
                visitor.visit::<_, 3>(RmsPropUpdate::<T, true> { scalars, objective })
            }
        }
    }
}

/// Update of one element. The operations are those of `kernels/rmsprop.cu`, in the same order.
#[derive(Clone, Copy)]
struct RmsPropUpdate<T, const CENTERED: bool> {
    scalars: [T; 4],
    objective: Objective,
}

/// The state is the mean square, then the mean if centered, then the velocity if there is one.
impl<T: Compute, const N: usize, const CENTERED: bool> Update<T, N> for RmsPropUpdate<T, CENTERED> {
    type StepScalars = [T; 2];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(2);
    // A variance is the small difference of two numbers, of which 8 bits leave nothing.
    const CODINGS: Option<[Coding; N]> = if CENTERED { None } else { Some(codings()) };

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> [T; 2] {
        read_values(bytes)
    }

    #[inline(always)]
    fn element(&self, &[lr, l2]: &[T; 2], p: T, g: T, state: [T; N]) -> (T, [T; N]) {
        let [alpha, one_minus_alpha, eps, momentum] = self.scalars;
        let mut g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
        if l2 != T::ZERO {
            g = g + l2 * p;
        }
        let mut new = state;
        let v = alpha * state[0] + one_minus_alpha * (g * g);
        new[0] = v;
        let mut s = v;
        if CENTERED {
            let a = alpha * state[1] + one_minus_alpha * g;
            new[1] = a;
            s = v - a * a;
            // Rounding may leave a variance below 0; NaN stays NaN.
            s = if s < T::ZERO { T::ZERO } else { s };
        }
        let mut step = g / (s.sqrt() + eps);
        if N > 1 + usize::from(CENTERED) {
            step = momentum * state[N - 1] + step;
            new[N - 1] = step;
        }
        (p - lr * step, new)
    }
}

/// The mean square by its root, and the velocity by its sign.
const fn codings<const N: usize>() -> [Coding; N] {
    let mut codings = [Coding::Signed; N];
    codings[0] = Coding::Root;
    codings
}

//! Hyper-parameters of LAMB.

use fusestep_elementwise::integer_power;
use fusestep_launch::{
    Domain, Excluded, Format, GroupValues, MultiTensorKernel, Precision, RuleError, Settings,
    UpdateRule, check_width, settings, tuned,
};
use fusestep_tensor::{DType, Trust};

use crate::{LambKernel, device};

settings! {
    /// Hyper-parameters of one LAMB optimizer.
    pub struct Lamb {
        /// Learning rate per step; 1e-3 by default.
        pub lr: f64 = 1e-3 => number(Domain::NotNegative);
        /// Decay of the first moment, in [0, 1); 0.9 by default.
        pub beta1: f64 = 0.9 => number(Domain::BelowOne);
        /// Decay of the second moment, in [0, 1); 0.999 by default.
        pub beta2: f64 = 0.999 => number(Domain::BelowOne);
        /// ε, added to the root from outside, at least 0; 1e-6 by default.
        pub eps: f64 = 1e-6 => number(Domain::NotNegative);
        /// λ, added to the direction as λ·p; 0.01 by default.
        pub weight_decay: f64 = 0.01 => number(Domain::NotNegative);
        /// Rate of tensors whose own weight decay is 0.
        pub excluded: Excluded = Excluded::PlainLr => hidden;
    }
}

impl UpdateRule for Lamb {
    fn name(&self) -> &'static str {
        "lamb"
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        self.numbers()
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut all = tuned(self.hyper_parameters());
        all.push(("excluded", self.excluded.name().to_owned()));
        all
    }

    fn validate(&self) -> Result<(), RuleError> {
        self.check()
    }

    fn kernel(
        &self,
        dtype: DType,
        precision: Precision,
    ) -> Result<Box<dyn MultiTensorKernel>, RuleError> {
        self.validate()?;
        check_width(self, dtype)?;
        let format = Format::new(self.name(), dtype, precision)?;
        Ok(match dtype {
            DType::F64 => Box::new(LambKernel::<f64>::new(*self, format)),
            _ => Box::new(LambKernel::<f32>::new(*self, format)),
        })
    }
}

impl Lamb {
    /// The step scalars of a group of tensors at one step, in f64.
    ///
    /// m̂ / (√v̂ + ε) is computed as m·s / (√v + ε·b) with b = √(1 − β₂ᵗ) and s = b / (1 − β₁ᵗ).
    /// Thus the bias corrections cost no division per element.
    pub(crate) fn step_scalars(&self, values: GroupValues) -> device::StepScalars<f64> {
        let bias2_sqrt = (1.0 - integer_power(self.beta2, values.step)).sqrt();
        device::StepScalars {
            lr: values.lr * values.lr_scale,
            trust: match self.excluded.trust(&values) {
                Trust::Ratio => 1.0,
                Trust::Plain => 0.0,
            },
            direction: device::Direction {
                scale: bias2_sqrt / (1.0 - integer_power(self.beta1, values.step)),
                eps: self.eps * bias2_sqrt,
                lambda: values.weight_decay.unwrap_or(self.weight_decay),
            },
        }
    }
}

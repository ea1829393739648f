//! Hyper-parameters of LARS.

use fusestep_launch::{
    Domain, Excluded, Format, GroupValues, MultiTensorKernel, Precision, RuleError, Settings,
    UpdateRule, check_width, settings, tuned,
};
use fusestep_tensor::{DType, Trust};

use crate::{LarsKernel, device};

settings! {
    /// Hyper-parameters of one LARS optimizer.
    pub struct Lars {
        /// Learning rate per step; 0.1 by default.
        pub lr: f64 = 0.1 => number(Domain::NotNegative);
        /// Decay of the velocity (μ), in [0, 1); 0.9 by default.
        pub momentum: f64 = 0.9 => number(Domain::BelowOne);
        /// Factor on the trust ratio (η), at least 0; 0.001 by default.
        pub trust_coefficient: f64 = 0.001 => number(Domain::NotNegative);
        /// λ, added to the gradient as λ·p; 0.0005 by default.
        pub weight_decay: f64 = 0.0005 => number(Domain::NotNegative);
        /// ε, added to the denominator of the trust ratio, at least 0; 0 by default.
        pub eps: f64 = 0.0 => number(Domain::NotNegative);
        /// Factor on every gradient, for example one over the loss scale; above 0, and 1 by
        /// default.
        pub rescale: f64 = 1.0 => number(Domain::Positive);
        /// Rate of tensors whose own weight decay is 0.
        pub excluded: Excluded = Excluded::PlainLr => hidden;
    }
}

impl UpdateRule for Lars {
    fn name(&self) -> &'static str {
        "lars"
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
            DType::F64 => Box::new(LarsKernel::<f64>::new(*self, format)),
            _ => Box::new(LarsKernel::<f32>::new(*self, format)),
        })
    }
}

impl Lars {
    /// The scalars of the local rate of a group of tensors.
    pub(crate) fn step_scalars(&self, values: GroupValues) -> device::StepScalars {
        device::StepScalars {
            lr: values.lr * values.lr_scale,
            lambda: values.weight_decay.unwrap_or(self.weight_decay),
            trust: match self.excluded.trust(&values) {
                Trust::Ratio => 1.0,
                Trust::Plain => 0.0,
            },
        }
    }
}

//! Hyper-parameters of LARS.

use fusestep_launch::{
    Domain, Excluded, Format, GroupValues, MultiTensorKernel, Precision, RuleError, UpdateRule,
    check_hyper, check_width,
};
use fusestep_tensor::{DType, Trust};

use crate::{LarsKernel, device};

/// Hyper-parameters of one LARS optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lars {
    /// Learning rate per step; 0.1 by default.
    pub lr: f64,
    /// Decay of the velocity (μ), in [0, 1); 0.9 by default.
    pub momentum: f64,
    /// Factor on the trust ratio (η), at least 0; 0.001 by default.
    pub trust_coefficient: f64,
    /// λ, added to the gradient as λ·p; 0.0005 by default.
    pub weight_decay: f64,
    /// ε, added to the denominator of the trust ratio, at least 0; 0 by default.
    pub eps: f64,
    /// Factor on every gradient, such as one over the loss scale, above 0; 1 by default.
    pub rescale: f64,
    /// Which rate tensors take whose own weight decay is set to 0.
    pub excluded: Excluded,
}

impl Default for Lars {
    fn default() -> Self {
        Self {
            lr: 0.1,
            momentum: 0.9,
            trust_coefficient: 0.001,
            weight_decay: 0.0005,
            eps: 0.0,
            rescale: 1.0,
            excluded: Excluded::PlainLr,
        }
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
        vec![
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("trust_coefficient", self.trust_coefficient),
            ("weight_decay", self.weight_decay),
            ("eps", self.eps),
            ("rescale", self.rescale),
        ]
    }

    fn validate(&self) -> Result<(), RuleError> {
        check_hyper(&[
            ("lr", self.lr, Domain::NotNegative),
            ("momentum", self.momentum, Domain::BelowOne),
            ("trust_coefficient", self.trust_coefficient, Domain::NotNegative),
            ("weight_decay", self.weight_decay, Domain::NotNegative),
            ("eps", self.eps, Domain::NotNegative),
            ("rescale", self.rescale, Domain::Positive),
        ])
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
    /// What the local rate of a group of tensors is made of.
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

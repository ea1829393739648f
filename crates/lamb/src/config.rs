//! Hyper-parameters of LAMB.

use fusestep_elementwise::integer_power;
use fusestep_launch::{
    Domain, Excluded, Format, GroupValues, MultiTensorKernel, Precision, RuleError, UpdateRule,
    check_hyper, check_width,
};
use fusestep_tensor::{DType, Trust};

use crate::{LambKernel, device};

/// Hyper-parameters of one LAMB optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    /// Learning rate per step; 1e-3 by default.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1); 0.9 by default.
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1); 0.999 by default.
    pub beta2: f64,
    /// ε, added to the root outside of it, at least 0; 1e-6 by default.
    pub eps: f64,
    /// λ, added to the direction as λ·p; 0.01 by default.
    pub weight_decay: f64,
    /// Which rate tensors take whose own weight decay is set to 0.
    pub excluded: Excluded,
}

impl Default for Lamb {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-6,
            weight_decay: 0.01,
            excluded: Excluded::PlainLr,
        }
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
        vec![
            ("lr", self.lr),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
        ]
    }

    fn validate(&self) -> Result<(), RuleError> {
        check_hyper(&[
            ("lr", self.lr, Domain::NotNegative),
            ("beta1", self.beta1, Domain::BelowOne),
            ("beta2", self.beta2, Domain::BelowOne),
            ("eps", self.eps, Domain::NotNegative),
            ("weight_decay", self.weight_decay, Domain::NotNegative),
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
            DType::F64 => Box::new(LambKernel::<f64>::new(*self, format)),
            _ => Box::new(LambKernel::<f32>::new(*self, format)),
        })
    }
}

impl Lamb {
    /// What the update of a group of tensors is made of at one step, in f64.
    ///
    /// m̂ / (√v̂ + ε) is m·s / (√v + ε·b) with b = √(1 − β₂ᵗ) and s = b / (1 − β₁ᵗ): the bias
    /// corrections cost no division per element.
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

//! Hyper-parameters of Lion.

use fusestep_launch::{
    Domain, Format, MultiTensorKernel, Objective, Precision, RuleError, SetValues, UpdateRule,
    check_hyper,
};
use fusestep_tensor::DType;

use crate::{LionKernel, device};

/// Hyper-parameters of one Lion optimizer.
///
/// Every element moves by lr at each step, so lr is 3 to 10 times smaller than AdamW's, and λ as
/// many times larger.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Learning rate per step; 1e-4 by default.
    pub lr: f64,
    /// Share of the moment in the direction of the step, in [0, 1); 0.9 by default.
    pub beta1: f64,
    /// Decay of the moment, in [0, 1); 0.99 by default.
    pub beta2: f64,
    /// λ: p is multiplied by 1 − lr·λ; 0 by default.
    pub weight_decay: f64,
    /// Whether to step against or along the gradient.
    pub objective: Objective,
}

impl Default for Lion {
    fn default() -> Self {
        Self {
            lr: 1e-4,
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.0,
            objective: Objective::Minimize,
        }
    }
}

impl UpdateRule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr", self.lr),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("weight_decay", self.weight_decay),
        ]
    }

    fn validate(&self) -> Result<(), RuleError> {
        check_hyper(&[
            ("lr", self.lr, Domain::NotNegative),
            ("beta1", self.beta1, Domain::BelowOne),
            ("beta2", self.beta2, Domain::BelowOne),
            ("weight_decay", self.weight_decay, Domain::NotNegative),
        ])
    }

    fn kernel(
        &self,
        dtype: DType,
        precision: Precision,
    ) -> Result<Box<dyn MultiTensorKernel>, RuleError> {
        self.validate()?;
        let format = Format::new(self.name(), dtype, precision)?;
        Ok(match dtype {
            DType::F64 => Box::new(LionKernel::<f64>::new(*self, format)),
            _ => Box::new(LionKernel::<f32>::new(*self, format)),
        })
    }
}

impl Lion {
    /// The set of scalars for one tensor at one step, in f64.
    pub(crate) fn set(&self, values: SetValues) -> device::Set<f64> {
        let lr = values.lr * values.lr_scale;
        let lambda = values.weight_decay.unwrap_or(self.weight_decay);
        device::Set {
            lr,
            decay: 1.0 - lr * lambda,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyper_parameters_out_of_range_are_named() {
        let good = Lion::default();
        let bad = Lion { beta2: 1.0, ..good };
        assert_eq!(
            bad.validate().unwrap_err().to_string(),
            "beta2: expected a value in [0, 1), found 1"
        );
        assert_eq!(good.validate(), Ok(()));
        assert!(good.kernel(DType::I32, Precision::default()).is_err());
    }
}

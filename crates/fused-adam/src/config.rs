//! Hyper-parameters of Adam and AdamW.

use fusestep_elementwise::integer_power;
use fusestep_launch::{
    Domain, Format, MultiTensorKernel, Objective, Precision, RuleError, SetValues, UpdateRule,
    WeightDecay, check_hyper,
};
use fusestep_tensor::DType;

use crate::{AdamKernel, device};

/// Which second moment scales the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SecondMoment {
    /// The running mean itself (Adam).
    #[default]
    Running,
    /// The largest one so far (AMSGrad).
    Largest,
}

/// Hyper-parameters of one Adam or AdamW optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Learning rate per step; 1e-3 by default.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1); 0.9 by default.
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1); 0.999 by default.
    pub beta2: f64,
    /// ε, added to the root outside of it, at least 0; 1e-8 by default.
    pub eps: f64,
    /// λ and how it enters; decoupled 0.01 by default, as in PyTorch's AdamW.
    pub weight_decay: WeightDecay,
    /// Which second moment scales the step.
    pub second_moment: SecondMoment,
    /// Whether to step against or along the gradient.
    pub objective: Objective,
}

impl Default for Adam {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: WeightDecay::Decoupled(0.01),
            second_moment: SecondMoment::Running,
            objective: Objective::Minimize,
        }
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
        vec![
            ("lr", self.lr),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay.lambda()),
        ]
    }

    fn validate(&self) -> Result<(), RuleError> {
        check_hyper(&[
            ("lr", self.lr, Domain::NotNegative),
            ("beta1", self.beta1, Domain::BelowOne),
            ("beta2", self.beta2, Domain::BelowOne),
            ("eps", self.eps, Domain::NotNegative),
            (
                "weight_decay",
                self.weight_decay.lambda(),
                Domain::NotNegative,
            ),
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
            DType::F64 => Box::new(AdamKernel::<f64>::new(*self, format)),
            _ => Box::new(AdamKernel::<f32>::new(*self, format)),
        })
    }
}

impl Adam {
    /// The set of scalars for one tensor at one step, in f64.
    ///
    /// m̂ / (√v̂ + ε) is m·s / (√v + ε·b) with b = √(1 − β₂ᵗ) and s = b / (1 − β₁ᵗ): the bias
    /// corrections cost no division per element.
    pub(crate) fn set(&self, values: SetValues) -> device::Set<f64> {
        let lr = values.lr * values.lr_scale;
        let lambda = values
            .weight_decay
            .unwrap_or_else(|| self.weight_decay.lambda());
        let (decay, l2) = match self.weight_decay {
            WeightDecay::L2(_) => (1.0, lambda),
            WeightDecay::Decoupled(_) => (1.0 - lr * lambda, 0.0),
        };
        let bias2_sqrt = (1.0 - integer_power(self.beta2, values.step)).sqrt();
        device::Set {
            step_size: lr * bias2_sqrt / (1.0 - integer_power(self.beta1, values.step)),
            eps: self.eps * bias2_sqrt,
            decay,
            l2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyper_parameters_out_of_range_are_named() {
        let good = Adam::default();
        for (bad, message) in [
            (
                Adam {
                    lr: f64::NAN,
                    ..good
                },
                "lr: expected a finite value of at least 0, found NaN",
            ),
            (
                Adam { lr: -1.0, ..good },
                "lr: expected a finite value of at least 0, found -1",
            ),
            (
                Adam { beta1: 1.0, ..good },
                "beta1: expected a value in [0, 1), found 1",
            ),
            (
                Adam {
                    beta2: -0.1,
                    ..good
                },
                "beta2: expected a value in [0, 1), found -0.1",
            ),
            (
                Adam { eps: -1e-8, ..good },
                "eps: expected a finite value of at least 0, found -0.00000001",
            ),
            (
                Adam {
                    weight_decay: WeightDecay::L2(f64::INFINITY),
                    ..good
                },
                "weight_decay: expected a finite value of at least 0, found inf",
            ),
        ] {
            assert_eq!(bad.validate().unwrap_err().to_string(), message);
        }
        assert_eq!(good.validate(), Ok(()));
        assert!(good.kernel(DType::I32, Precision::default()).is_err());
    }
}

//! Hyper-parameters of Adagrad.

use fusestep_launch::{
    Domain, Format, MultiTensorKernel, Objective, Precision, RuleError, SetValues, UpdateRule,
    check_hyper,
};
use fusestep_tensor::DType;

use crate::{AdagradKernel, device};

/// Hyper-parameters of one Adagrad optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// Learning rate of the first step; 1e-2 by default.
    pub lr: f64,
    /// How the learning rate falls, at least 0: step t uses lr / (1 + (t − 1)·lr_decay); 0 by
    /// default.
    pub lr_decay: f64,
    /// What the sum of squared gradients starts from, at least 0; 0 by default.
    pub initial_sum: f64,
    /// ε, added to the root outside of it, at least 0; 1e-10 by default.
    pub eps: f64,
    /// λ: λ·p is added to the gradient; 0 by default.
    pub weight_decay: f64,
    /// Whether to step against or along the gradient.
    pub objective: Objective,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            lr_decay: 0.0,
            initial_sum: 0.0,
            eps: 1e-10,
            weight_decay: 0.0,
            objective: Objective::Minimize,
        }
    }
}

impl UpdateRule for Adagrad {
    fn name(&self) -> &'static str {
        "adagrad"
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr", self.lr),
            ("lr_decay", self.lr_decay),
            ("initial_sum", self.initial_sum),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
        ]
    }

    fn validate(&self) -> Result<(), RuleError> {
        let all = self.hyper_parameters();
        let all: Vec<_> = all
            .into_iter()
            .map(|(what, v)| (what, v, Domain::NotNegative))
            .collect();
        check_hyper(&all)
    }

    fn kernel(
        &self,
        dtype: DType,
        precision: Precision,
    ) -> Result<Box<dyn MultiTensorKernel>, RuleError> {
        self.validate()?;
        let format = Format::new(self.name(), dtype, precision)?;
        Ok(match dtype {
            DType::F64 => Box::new(AdagradKernel::<f64>::new(*self, format)),
            _ => Box::new(AdagradKernel::<f32>::new(*self, format)),
        })
    }
}

impl Adagrad {
    /// The set of scalars for one tensor at one step, in f64.
    pub(crate) fn set(&self, values: SetValues) -> device::Set<f64> {
        let steps_before = values.step.saturating_sub(1);
        let lr = values.lr * values.lr_scale;
        device::Set {
            step_size: lr / (1.0 + steps_before as f64 * self.lr_decay),
            l2: values.weight_decay.unwrap_or(self.weight_decay),
            // State starts at 0 everywhere; the first step puts the initial value under the square,
            // later ones find it there.
            initial: match values.step {
                1 => self.initial_sum,
                _ => 0.0,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyper_parameters_out_of_range_are_named() {
        let good = Adagrad::default();
        for (bad, message) in [
            (
                Adagrad {
                    lr_decay: -0.5,
                    ..good
                },
                "lr_decay: expected a finite value of at least 0, found -0.5",
            ),
            (
                Adagrad {
                    initial_sum: f64::NAN,
                    ..good
                },
                "initial_sum: expected a finite value of at least 0, found NaN",
            ),
        ] {
            assert_eq!(bad.validate().unwrap_err().to_string(), message);
        }
        assert_eq!(good.validate(), Ok(()));
        assert!(good.kernel(DType::I32, Precision::default()).is_err());
    }
}

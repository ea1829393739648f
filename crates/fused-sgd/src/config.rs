//! Hyper-parameters of SGD and momentum.

use fusestep_launch::{
    Domain, Format, MultiTensorKernel, Objective, Precision, RuleError, SetValues, UpdateRule,
    WeightDecay, check_hyper,
};
use fusestep_tensor::DType;

use crate::{SgdKernel, device};

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
        if self.has_velocity() {
            "momentum"
        } else {
            "sgd"
        }
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

    fn validate(&self) -> Result<(), RuleError> {
        let lambda = self.weight_decay.lambda();
        check_hyper(&[
            ("lr", self.lr, Domain::NotNegative),
            ("momentum", self.momentum, Domain::BelowOne),
            ("dampening", self.dampening, Domain::BelowOne),
            ("weight_decay", lambda, Domain::NotNegative),
            ("rescale", self.rescale, Domain::Positive),
        ])?;
        let refuse = |what, expected, found| {
            Err(RuleError::Hyper {
                what,
                expected,
                found,
            })
        };
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
        self.validate()?;
        let format = Format::new(self.name(), dtype, precision)?;
        Ok(match dtype {
            DType::F64 => Box::new(SgdKernel::<f64>::new(*self, format)),
            _ => Box::new(SgdKernel::<f32>::new(*self, format)),
        })
    }
}

impl Sgd {
    /// Momentum as most use it: μ 0.9, the rest as by default.
    pub fn with_momentum() -> Self {
        Self {
            momentum: 0.9,
            ..Self::default()
        }
    }

    /// Whether there is a velocity: momentum is above 0.
    pub fn has_velocity(&self) -> bool {
        self.momentum != 0.0
    }

    /// The set of scalars for one tensor at one step, in f64.
    pub(crate) fn set(&self, values: SetValues) -> device::Set<f64> {
        let lr = values.lr * values.lr_scale;
        let own = values.weight_decay;
        let (decay, l2) = match self.weight_decay {
            WeightDecay::L2(lambda) => (1.0, own.unwrap_or(lambda)),
            WeightDecay::Decoupled(lambda) => (1.0 - lr * own.unwrap_or(lambda), 0.0),
        };
        device::Set {
            lr,
            decay,
            l2,
            // The velocity's first value is the whole gradient, as in PyTorch.
            one_minus_dampening: match values.step {
                1 => 1.0,
                _ => 1.0 - self.dampening,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_do_not_go_together_are_named() {
        let good = Sgd::with_momentum();
        for (bad, message) in [
            (
                Sgd {
                    momentum: 1.0,
                    ..good
                },
                "momentum: expected a value in [0, 1), found 1",
            ),
            (
                Sgd {
                    rescale: 0.0,
                    ..good
                },
                "rescale: expected a finite value above 0, found 0",
            ),
            (
                Sgd {
                    nesterov: Nesterov::Nesterov,
                    ..Sgd::default()
                },
                "momentum: expected a value in (0, 1) with nesterov, found 0",
            ),
            (
                Sgd {
                    nesterov: Nesterov::Nesterov,
                    dampening: 0.5,
                    ..good
                },
                "dampening: expected 0 with nesterov, found 0.5",
            ),
            (
                Sgd {
                    dampening: 0.5,
                    ..Sgd::default()
                },
                "dampening: expected 0 without momentum, found 0.5",
            ),
        ] {
            assert_eq!(bad.validate().unwrap_err().to_string(), message);
        }
        assert_eq!(good.validate(), Ok(()));
        assert!(good.kernel(DType::I32, Precision::default()).is_err());
    }
}

//! Rules and options as Python gives them.

use fusestep::planner::{LossScaling, Optimizer, Planner};
use fusestep::{
    Centering, ClipByGlobalNorm, DType, Excluded, LossScale, Master, Nesterov, Objective,
    Precision, SecondMoment, StateDType, Tensors, Trust, UpdateNorms, WeightDecay,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Settings by name.
pub(crate) struct Settings<'a, 'py>(pub(crate) &'a Bound<'py, PyDict>);

impl Settings<'_, '_> {
    /// The setting of this name, which is `expected`.
    pub(crate) fn get<T>(&self, name: &str, expected: &str) -> PyResult<T>
    where
        T: for<'py> FromPyObject<'py>,
    {
        let value = self.0.get_item(name)?.ok_or_else(|| {
            PyValueError::new_err(format!("`{name}`: expected {expected}, found none"))
        })?;
        value.extract().map_err(|_| {
            let found = value.repr().map_or_else(|_| "what has no text".into(), |r| r.to_string());
            PyTypeError::new_err(format!("{name}: expected {expected}, found {found}"))
        })
    }

    fn number(&self, name: &str) -> PyResult<f64> {
        self.get(name, "a number")
    }

    fn is_set(&self, name: &str) -> PyResult<bool> {
        self.get(name, "True or False")
    }

    fn objective(&self) -> PyResult<Objective> {
        Ok(if self.is_set("maximize")? { Objective::Maximize } else { Objective::Minimize })
    }

    fn decay(&self) -> PyResult<WeightDecay> {
        let lambda = self.number("weight_decay")?;
        Ok(if self.is_set("decoupled")? {
            WeightDecay::Decoupled(lambda)
        } else {
            WeightDecay::L2(lambda)
        })
    }

    /// Whether a layer-wise rule scales the rate of the group's parameters; `None` for others.
    pub(crate) fn trust(&self) -> PyResult<Option<Trust>> {
        let has = self.0.contains("trust_ratio")?;
        let asked = has.then(|| self.is_set("trust_ratio")).transpose()?;
        let trust = |scaled| {
            if scaled { Trust::Ratio } else { Trust::Plain }
        };
        Ok(asked.map(trust))
    }

    /// The rule that `rule` names.
    ///
    /// # Errors
    /// `ValueError` for a rule that there is not, or a setting that is missing or out of range.
    pub(crate) fn rule(&self) -> PyResult<Optimizer> {
        let name: String = self.get("rule", "a name")?;
        let lr = self.number("lr")?;
        let rule = match name.as_str() {
            "adam" => self.adam(lr)?.into(),
            "sgd" => self.sgd(lr)?.into(),
            "rmsprop" => self.rmsprop(lr)?.into(),
            "adagrad" => fusestep::adagrad::Adagrad {
                lr,
                lr_decay: self.number("lr_decay")?,
                // What PyTorch starts from, it writes into the sum itself.
                initial_sum: 0.0,
                eps: self.number("eps")?,
                weight_decay: self.number("weight_decay")?,
                objective: self.objective()?,
            }
            .into(),
            "lion" => fusestep::lion::Lion {
                lr,
                beta1: self.number("beta1")?,
                beta2: self.number("beta2")?,
                weight_decay: self.number("weight_decay")?,
                objective: self.objective()?,
            }
            .into(),
            "schedule_free" => fusestep::schedule_free::ScheduleFree {
                lr,
                beta1: self.number("beta1")?,
                beta2: self.number("beta2")?,
                eps: self.number("eps")?,
                weight_decay: self.number("weight_decay")?,
                warmup_steps: self.get("warmup_steps", "a whole number from 0 on")?,
            }
            .into(),
            "lars" => fusestep::lars_momentum::Lars {
                lr,
                momentum: self.number("momentum")?,
                trust_coefficient: self.number("trust_coefficient")?,
                weight_decay: self.number("weight_decay")?,
                eps: self.number("eps")?,
                rescale: 1.0,
                excluded: Excluded::default(),
            }
            .into(),
            "lamb" => fusestep::lamb::Lamb {
                lr,
                beta1: self.number("beta1")?,
                beta2: self.number("beta2")?,
                eps: self.number("eps")?,
                weight_decay: self.number("weight_decay")?,
                excluded: Excluded::default(),
            }
            .into(),
            other => {
                return Err(PyValueError::new_err(format!(
                    "rule: expected adam, sgd, adagrad, rmsprop, lion, lars, lamb or \
                     schedule_free, found {other}"
                )));
            }
        };
        Optimizer::validate(&rule).map_err(refused)?;
        Ok(rule)
    }

    fn adam(&self, lr: f64) -> PyResult<fusestep::fused_adam::Adam> {
        Ok(fusestep::fused_adam::Adam {
            lr,
            beta1: self.number("beta1")?,
            beta2: self.number("beta2")?,
            eps: self.number("eps")?,
            weight_decay: self.decay()?,
            second_moment: if self.is_set("amsgrad")? {
                SecondMoment::Largest
            } else {
                SecondMoment::Running
            },
            objective: self.objective()?,
        })
    }

    fn sgd(&self, lr: f64) -> PyResult<fusestep::fused_sgd::Sgd> {
        Ok(fusestep::fused_sgd::Sgd {
            lr,
            momentum: self.number("momentum")?,
            dampening: self.number("dampening")?,
            nesterov: if self.is_set("nesterov")? { Nesterov::Nesterov } else { Nesterov::Plain },
            weight_decay: WeightDecay::L2(self.number("weight_decay")?),
            rescale: 1.0,
            objective: self.objective()?,
        })
    }

    fn rmsprop(&self, lr: f64) -> PyResult<fusestep::rmsprop::RmsProp> {
        Ok(fusestep::rmsprop::RmsProp {
            lr,
            alpha: self.number("alpha")?,
            eps: self.number("eps")?,
            momentum: self.number("momentum")?,
            weight_decay: self.number("weight_decay")?,
            centering: if self.is_set("centered")? {
                Centering::Centered
            } else {
                Centering::MeanSquare
            },
            objective: self.objective()?,
        })
    }

    /// How parameters of a dtype are kept.
    pub(crate) fn precision(&self, dtype: DType) -> PyResult<Precision> {
        let narrow = matches!(dtype, DType::F16 | DType::BF16);
        let mut precision = Precision::default();
        if narrow && self.is_set("master_weights")? {
            precision.master = Master::F32;
        }
        if dtype == DType::BF16 && self.is_set("state_16")? {
            precision.state = StateDType::Bf16;
        }
        Ok(precision)
    }

    /// The planner with the passes asked for.
    pub(crate) fn planner(&self, rule: Optimizer, tensors: Tensors) -> PyResult<Planner> {
        let mut planner = Planner::new(rule).tensors(tensors);
        for dtype in [DType::F16, DType::BF16] {
            planner = planner.precision_of(dtype, self.precision(dtype)?);
        }
        if let Some(scaling) = self.loss_scaling()? {
            planner = planner.with(scaling);
        }
        if let Some(norm) = self.get::<Option<f64>>("clip_norm", "a number")? {
            planner = planner.with(ClipByGlobalNorm::new(norm));
        }
        if self.is_set("update_norms")? {
            planner = planner.with(UpdateNorms);
        }
        Ok(planner)
    }

    /// The loss scale asked for: a number, `dynamic`, or one that was saved.
    fn loss_scaling(&self) -> PyResult<Option<LossScaling>> {
        let scale = match self.0.get_item("loss_scale")? {
            Some(scale) if !scale.is_none() => scale,
            _ => return Ok(None),
        };
        if let Ok(name) = scale.extract::<String>() {
            if name == "dynamic" {
                return Ok(Some(LossScaling::dynamic()));
            }
            return Err(PyValueError::new_err(format!(
                "loss_scale: expected a number or \"dynamic\", found \"{name}\""
            )));
        }
        if let Ok((scale, good, bad)) = scale.extract::<(f64, u32, u32)>() {
            let restored = LossScale::dynamic().restored(scale, good, bad);
            return Ok(Some(restored.map_err(refused)?.into()));
        }
        Ok(Some(LossScaling::fixed(scale.extract()?)))
    }
}

/// A refusal in PyTorch's kind.
pub(crate) fn refused(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The rules of the groups.
pub(crate) fn parse(rules: &[Bound<'_, PyDict>]) -> PyResult<Vec<Optimizer>> {
    rules.iter().map(|rule| Settings(rule).rule()).collect()
}

/// Whether the rates of each group are scaled.
pub(crate) fn trusts(rules: &[Bound<'_, PyDict>]) -> PyResult<Vec<Option<Trust>>> {
    rules.iter().map(|rule| Settings(rule).trust()).collect()
}

/// The distinct rules of groups that train, and which each group has, numbered as the planner does.
pub(crate) fn number(
    rules: &[Optimizer],
    trains: impl Fn(usize) -> bool,
) -> (Vec<Optimizer>, Vec<Option<usize>>) {
    let mut distinct: Vec<Optimizer> = Vec::new();
    let numbers = rules.iter().enumerate().map(|(group, rule)| {
        trains(group).then(|| {
            let known = distinct.iter().position(|known| known == rule);
            known.unwrap_or_else(|| {
                distinct.push(*rule);
                distinct.len() - 1
            })
        })
    });
    let numbers = numbers.collect();
    (distinct, numbers)
}

//! Rules and options, read from Python's settings.

use fusestep::launch::{Setting, SettingValue};
use fusestep::planner::Optimizer;
use fusestep::{DType, OwnRule, Precision, StepOptions, Trust};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::errors::refused;
use crate::settings::{Texts, of_rule};

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
        self.counted(name, "a number")
    }

    /// A setting that is a number; Python's `True` is no number.
    fn counted<T>(&self, name: &str, expected: &str) -> PyResult<T>
    where
        T: for<'py> FromPyObject<'py>,
    {
        if self.0.get_item(name)?.is_some_and(|value| value.is_instance_of::<PyBool>()) {
            return Err(PyTypeError::new_err(format!(
                "{name}: expected {expected}, found True or False"
            )));
        }
        self.get(name, expected)
    }

    fn is_set(&self, name: &str) -> PyResult<bool> {
        self.get(name, "True or False")
    }

    /// Whether a layer-wise rule scales the rate of the group's parameters; `None` for other rules.
    pub(crate) fn trust(&self) -> PyResult<Option<Trust>> {
        let has = self.0.contains("trust_ratio")?;
        let asked = has.then(|| self.is_set("trust_ratio")).transpose()?;
        let trust = |scaled| {
            if scaled { Trust::Ratio } else { Trust::Plain }
        };
        Ok(asked.map(trust))
    }

    /// The rule that the setting `rule` names.
    ///
    /// # Errors
    /// `ValueError` for an unknown rule, or for a setting that is missing or out of range.
    pub(crate) fn rule(&self) -> PyResult<Optimizer> {
        let name: String = self.get("rule", "a name")?;
        let mut rule = named(&name)?;
        let mut failed = Ok(());
        rule.each(&mut |setting| {
            if failed.is_ok() && !is_kept(&name, setting.name) {
                failed = self.read(setting);
            }
        });
        failed?;
        Optimizer::validate(&rule).map_err(refused)?;
        Ok(rule)
    }

    /// Sets a setting of a rule to Python's value.
    fn read(&self, setting: Setting<'_>) -> PyResult<()> {
        match setting.value {
            SettingValue::Number(value, _) => *value = self.number(setting.name)?,
            SettingValue::Count(value) => {
                *value = self.counted(setting.name, "a whole number from 0 on")?;
            }
            SettingValue::Switch(switch) => switch.turn(self.is_set(setting.name)?),
        }
        Ok(())
    }

    /// The settings of a step around this rule.
    pub(crate) fn options(&self, rule: Optimizer) -> PyResult<StepOptions> {
        let texts: Texts = self.get("settings", "texts by name")?;
        let mut step = of_rule(rule, &texts)?;
        let at: Option<(f64, u32, u32)> = self.get("loss_scale_at", "a scale and two counts")?;
        if let (Some((scale, good, bad)), Some(own)) = (at, step.loss_scale) {
            step.loss_scale = Some(own.restored(scale, good, bad).map_err(refused)?);
        }
        Ok(step)
    }
}

/// The rule of a name of Python's, with its defaults.
fn named(name: &str) -> PyResult<Optimizer> {
    let mut all = Optimizer::all().into_iter();
    all.find(|rule| python_name(rule) == name).ok_or_else(|| unknown(name))
}

/// Rules that are features of cargo, and whether this build has them.
const FEATURES: &[(&str, bool)] = &[
    ("sgd", cfg!(feature = "sgd")),
    ("lion", cfg!(feature = "lion")),
    ("adagrad", cfg!(feature = "adagrad")),
    ("rmsprop", cfg!(feature = "rmsprop")),
    ("schedule-free", cfg!(feature = "schedule-free")),
    ("lars", cfg!(feature = "lars")),
    ("lamb", cfg!(feature = "lamb")),
    ("adamax", cfg!(feature = "adamax")),
    ("nadam", cfg!(feature = "nadam")),
];

/// The error for a rule that this build does not have.
pub(crate) fn unknown(name: &str) -> PyErr {
    let names: Vec<String> = Optimizer::all().iter().map(python_name).collect();
    let expected = match &names[..] {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        names => names.concat(),
    };
    let feature = name.replace('_', "-");
    let is_left_out = FEATURES.iter().any(|&(of, is_on)| of == feature && !is_on);
    let remedy = if is_left_out {
        format!("; this build is without cargo's feature `{feature}`, which adds it")
    } else {
        String::new()
    };
    PyValueError::new_err(format!("rule: expected {expected}, found {name}{remedy}"))
}

/// A rule's name in Python, which says of Adam by a setting how decay enters.
fn python_name(rule: &Optimizer) -> String {
    match rule {
        Optimizer::Adam(_) => "adam".to_owned(),
        rule => rule.name().replace('-', "_"),
    }
}

/// Whether a setting keeps its default: PyTorch scales no gradients, has no decoupled decay of SGD,
/// and writes Adagrad's initial value into the sum itself.
fn is_kept(rule: &str, setting: &str) -> bool {
    matches!((rule, setting), (_, "rescale") | ("sgd", "decoupled") | ("adagrad", "initial_sum"))
}

/// The settings of every rule with their defaults, by the rules' names.
pub(crate) fn defaults(python: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(python);
    for mut rule in Optimizer::all() {
        let (name, own) = (python_name(&rule), PyDict::new(python));
        let mut failed = Ok(());
        rule.each(&mut |setting| {
            if failed.is_ok() && !is_kept(&name, setting.name) {
                failed = match setting.value {
                    SettingValue::Number(value, _) => own.set_item(setting.name, *value),
                    SettingValue::Count(value) => own.set_item(setting.name, *value),
                    SettingValue::Switch(switch) => own.set_item(setting.name, switch.is_on()),
                };
            }
        });
        failed?;
        if rule.has_trust() {
            own.set_item("trust_ratio", true)?;
        }
        all.set_item(name, own)?;
    }
    Ok(all)
}

/// Names of the tensors of state of a rule.
pub(crate) fn state_lists(rule: &Optimizer) -> PyResult<Vec<&'static str>> {
    let kernel = rule.rule().kernel(DType::F32, Precision::default()).map_err(refused)?;
    let roles = kernel.lists().iter().map(|list| list.role);
    Ok(roles.filter(|role| role.is_state()).map(|role| role.name()).collect())
}

/// The rules of the groups.
pub(crate) fn parse(rules: &[Bound<'_, PyDict>]) -> PyResult<Vec<Optimizer>> {
    rules.iter().map(|rule| Settings(rule).rule()).collect()
}

/// Whether the rates of each group are scaled by the trust ratio.
pub(crate) fn trusts(rules: &[Bound<'_, PyDict>]) -> PyResult<Vec<Option<Trust>>> {
    rules.iter().map(|rule| Settings(rule).trust()).collect()
}

/// The address of each group's learning rate, where a device has it.
pub(crate) fn rates(rules: &[Bound<'_, PyDict>]) -> PyResult<Vec<Option<usize>>> {
    let rate = |rule: &Bound<'_, PyDict>| {
        rule.get_item("rate")?.map_or(Ok(None), |rate| rate.extract::<usize>().map(Some))
    };
    rules.iter().map(rate).collect()
}

/// Groups of the planner: the parameters of every distinct rule but the first, which is the step's.
pub(crate) fn own_rules(names: Vec<Vec<String>>, distinct: &[Optimizer]) -> Vec<OwnRule> {
    let of_groups = names.into_iter().zip(distinct).skip(1);
    of_groups.map(|(names, rule)| OwnRule::of(names, *rule)).collect()
}

/// The distinct rules of groups that train, and the number of each group's rule, in the planner's
/// order. Rules with learning rates at different addresses are different.
pub(crate) fn number(
    rules: &[Optimizer],
    rates: &[Option<usize>],
    trains: impl Fn(usize) -> bool,
) -> (Vec<Optimizer>, Vec<Option<usize>>) {
    let mut distinct: Vec<Optimizer> = Vec::new();
    let mut their_rates: Vec<Option<usize>> = Vec::new();
    let numbers = rules.iter().enumerate().map(|(group, rule)| {
        trains(group).then(|| {
            let rate = rates.get(group).copied().flatten();
            let mut all = distinct.iter().zip(&their_rates);
            let known = all.position(|(known, own)| known == rule && *own == rate);
            known.unwrap_or_else(|| {
                distinct.push(*rule);
                their_rates.push(rate);
                distinct.len() - 1
            })
        })
    });
    let numbers = numbers.collect();
    (distinct, numbers)
}

//! The table of settings for Python: its rows, and values that Python gives by name as texts.

use std::collections::HashMap;

use fusestep::planner::{Accumulated, Optimizer};
use fusestep::{
    Alone, DType, OptionError, Precision, PrecisionOf, Row, Section, StateDType, StepOptions, Visit,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::refused;

/// Texts of settings by name; a list has several.
pub(crate) type Texts = HashMap<String, Vec<String>>;

/// Rows of the table of settings, each as a dict; `_fusestep.pyi` names the entries.
///
/// # Errors
/// Those of Python's memory.
#[pyfunction]
pub(crate) fn settings(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let mut rows = Rows { py, list: PyList::empty(py), outcome: Ok(()) };
    StepOptions::default().each(&mut rows).map_err(refused)?;
    rows.outcome?;
    Ok(rows.list)
}

/// Raises `ValueError` for texts out of range, for settings without effect, and for settings that
/// contradict each other on any number of ranks.
#[pyfunction]
pub(crate) fn check_settings(texts: Texts) -> PyResult<()> {
    with_texts(StepOptions::default(), &texts)?.check(1).map_err(refused)
}

/// The settings with these texts in the rows of their names.
///
/// # Errors
/// `ValueError` for a text out of range and for a name that no row has.
pub(crate) fn with_texts(mut step: StepOptions, texts: &Texts) -> PyResult<StepOptions> {
    let mut given = Given { texts, known: 0 };
    step.each(&mut given).map_err(refused)?;
    if given.known == texts.len() {
        return Ok(step);
    }
    let mut names: Vec<&str> = texts.keys().map(String::as_str).collect();
    names.sort_unstable();
    Err(PyValueError::new_err(format!(
        "settings: expected names of the table, found another among {}",
        names.join(", ")
    )))
}

/// The settings of a step with this rule. Precisions count for 16-bit parameters alone, as
/// PyTorch's programs mix dtypes: f16 parameters have no state in 16 bits and no random rounding.
///
/// # Errors
/// As [`with_texts`].
pub(crate) fn of_rule(rule: Optimizer, texts: &Texts) -> PyResult<StepOptions> {
    let mut step = with_texts(StepOptions::of(rule), texts)?;
    let asked = std::mem::take(&mut step.precision);
    // State in int8 is asked for of all parameters, and refused where a dtype has none.
    if asked.state == StateDType::Int8 {
        step.precision.state = asked.state;
    }
    let half = Precision { master: asked.master, ..step.precision };
    step.precision_of = vec![
        PrecisionOf { dtype: DType::F16, precision: half },
        PrecisionOf { dtype: DType::BF16, precision: asked },
    ];
    Ok(step)
}

/// The settings of a step on tensors that PyTorch keeps. Sums over micro-steps are Python's there
/// (`_micro.py`), whose means and sums have the planner's bits.
///
/// # Errors
/// `ValueError` names the first setting that takes ranks.
pub(crate) fn of_one_process(step: StepOptions) -> PyResult<StepOptions> {
    let kept = "expected `DataParallel`, found one process, whose tensors PyTorch keeps";
    let borrowed = StepOptions { accumulate: 1, accumulated: Accumulated::default(), ..step };
    match borrowed.check_borrowed() {
        Err(OptionError::NeedsRanks { name, found }) => {
            Err(refused(format!("{name} of {found}: {kept}; leave it out")))
        }
        checked => checked.map_err(refused),
    }?;
    Ok(borrowed.borrowing())
}

/// Values that Python gives.
struct Given<'a> {
    texts: &'a Texts,
    /// The number of rows that have a text.
    known: usize,
}

impl Visit for Given<'_> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        let Some(texts) = self.texts.get(row.name) else {
            return Ok(());
        };
        self.known += 1;
        texts.iter().try_for_each(|text| (row.set)(text))
    }
}

/// Rows as dicts.
struct Rows<'py> {
    py: Python<'py>,
    list: Bound<'py, PyList>,
    outcome: PyResult<()>,
}

impl Rows<'_> {
    fn add(&self, row: &Row<'_>) -> PyResult<()> {
        let told = PyDict::new(self.py);
        told.set_item("name", row.name)?;
        told.set_item("says", row.says)?;
        told.set_item("range", row.range.as_ref())?;
        told.set_item("default", row.value.as_deref())?;
        let choices = PyDict::new(self.py);
        for choice in &row.choices {
            choices.set_item(choice.name, choice.says)?;
        }
        told.set_item("choices", choices)?;
        told.set_item("is_switch", row.is_switch)?;
        told.set_item("is_list", row.is_list)?;
        told.set_item("section", name_of(row.section))?;
        told.set_item(
            "alone",
            match row.alone {
                Alone::Acts => Some(row.name),
                Alone::ActsWith(other) => Some(other),
                Alone::Idle => None,
            },
        )?;
        told.set_item("needs", row.needs.map(|need| need.with))?;
        self.list.append(told)
    }
}

impl Visit for Rows<'_> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if self.outcome.is_ok() {
            self.outcome = self.add(&row);
        }
        Ok(())
    }
}

fn name_of(section: Section) -> &'static str {
    match section {
        Section::Parameters => "parameters",
        Section::Rate => "rate",
        Section::Precision => "precision",
        Section::Gradients => "gradients",
        Section::MicroSteps => "micro_steps",
        Section::Shares => "shares",
        Section::Calls => "calls",
        Section::Backward => "backward",
        Section::Averages => "averages",
        Section::Start => "start",
        Section::Launches => "launches",
    }
}

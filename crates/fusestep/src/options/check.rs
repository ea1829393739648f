//! Refusals: values out of range, settings without effect, settings that contradict each other.

use std::collections::HashMap;

use fusestep_launch::StateDType;
use fusestep_planner::Optimizer;

use super::{Alone, Conflict, Need, OptionError, Row, Section, StepOptions, Visit};

impl StepOptions {
    /// Settings that differ from their defaults, in the table's order. The rule, groups and
    /// precisions of single dtypes are no rows of the table.
    ///
    /// # Errors
    /// A value out of range.
    pub fn changed(&self) -> Result<Vec<Changed>, OptionError> {
        let (given, usual) = (Given::of(self)?, Given::of(&StepOptions::of(self.rule))?);
        let told = given.told.iter();
        let told = told.filter(|told| given.values.get(told.name) != usual.values.get(told.name));
        Ok(told
            .map(|told| Changed { name: told.name, section: told.section, alone: told.alone })
            .collect())
    }

    /// Text of a setting's value; `None` where nothing is set.
    ///
    /// # Errors
    /// A value out of range.
    pub(super) fn value_of(&self, name: &str) -> Result<Option<String>, OptionError> {
        Ok(Given::of(self)?.values.remove(name).flatten())
    }

    /// Names and texts of settings that differ in `other`, the texts being the other's.
    pub(super) fn differences(&self, other: &Self) -> Result<Vec<(String, String)>, OptionError> {
        let (own, theirs) = (Given::of(self)?, Given::of(other)?);
        let differ = theirs.told.iter().filter_map(|told| {
            let text = theirs.values.get(told.name)?.clone()?;
            (own.values.get(told.name) != Some(&Some(text.clone()))).then_some((told.name, text))
        });
        Ok(differ.map(|(name, text)| (name.to_owned(), text)).collect())
    }

    /// Refuses values out of range, settings that have no effect without another, and settings
    /// that contradict each other on so many ranks.
    ///
    /// # Errors
    /// The first of them, by name.
    pub fn check(&self, ranks: usize) -> Result<(), OptionError> {
        let (given, usual) = (Given::of(self)?, Given::of(&StepOptions::of(self.rule))?);
        let value = |name: &str| given.values.get(name).and_then(Option::as_deref);
        let is_set = |name: &str| given.values.get(name) != usual.values.get(name);
        for told in given.told.iter().filter(|told| is_set(told.name)) {
            if let Some(need) = told.needs {
                let found = value(need.with);
                if !is_set(need.with) || need.at.is_some_and(|at| found != Some(at)) {
                    let found = found.unwrap_or("none").to_owned();
                    return Err(OptionError::needs(told.name, need, found));
                }
            }
            for conflict in told.conflicts {
                let other = value(conflict.with);
                let contradicts = conflict.at.is_none_or(|at| other == Some(at))
                    && conflict.except.is_none_or(|except| other != Some(except))
                    && !conflict.unless.is_some_and(is_set);
                if ranks >= conflict.from_ranks && is_set(conflict.with) && contradicts {
                    return Err(OptionError::Conflict {
                        first: told.name,
                        second: conflict.with,
                        why: conflict.why,
                    });
                }
            }
        }
        self.check_kept_state()
    }

    /// Refuses a type of state where no rule keeps any.
    fn check_kept_state(&self) -> Result<(), OptionError> {
        let of_dtypes = self.precision_of.iter().map(|of| of.precision);
        let mut precisions = std::iter::once(self.precision).chain(of_dtypes);
        let asked = precisions.find(|precision| precision.state != StateDType::Compute);
        let mut rules = std::iter::once(&self.rule).chain(self.groups.iter().map(|own| &own.rule));
        match asked {
            Some(_) if !rules.any(Optimizer::keeps_state) => {
                Err(OptionError::NoState { rule: self.rule.name() })
            }
            _ => Ok(()),
        }
    }

    /// Refuses settings of many ranks, for a process that trains alone.
    ///
    /// # Errors
    /// [`OptionError::NeedsRanks`] names the first.
    pub fn check_alone(&self) -> Result<(), OptionError> {
        let Some(&name) = self.idle_alone()?.first() else {
            return Ok(());
        };
        let found = self.value_of(name)?.unwrap_or_default();
        Err(OptionError::NeedsRanks { name, found })
    }

    /// Settings of many ranks, which have no effect in a process that trains alone.
    ///
    /// # Errors
    /// A value out of range.
    pub fn idle_alone(&self) -> Result<Vec<&'static str>, OptionError> {
        let (given, usual) = (Given::of(self)?, Given::of(&StepOptions::of(self.rule))?);
        let is_set = |name: &str| given.values.get(name) != usual.values.get(name);
        let idle = given.told.iter().filter(|told| {
            is_set(told.name)
                && match told.alone {
                    Alone::Acts => false,
                    Alone::ActsWith(other) => !is_set(other),
                    Alone::Idle => true,
                }
        });
        Ok(idle.map(|told| told.name).collect())
    }
}

/// A setting that differs from its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The setting.
    pub name: &'static str,
    /// The part of the table that it stands in.
    pub section: Section,
    /// Its effect in a process that trains alone.
    pub alone: Alone,
}

/// Texts of all values, which have been read back as a face would give them.
#[derive(Default)]
struct Given {
    values: HashMap<&'static str, Option<String>>,
    told: Vec<Told>,
}

impl Given {
    /// Reads every row, and refuses values out of range.
    fn of(options: &StepOptions) -> Result<Self, OptionError> {
        let mut given = Self::default();
        options.clone().each(&mut given)?;
        Ok(given)
    }
}

/// A row's word on other settings.
struct Told {
    name: &'static str,
    section: Section,
    alone: Alone,
    needs: Option<Need>,
    conflicts: &'static [Conflict],
}

impl Visit for Given {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if let Some(value) = row.value.as_ref().filter(|_| !row.is_list) {
            (row.set)(value)?;
        }
        self.values.insert(row.name, row.value);
        self.told.push(Told {
            name: row.name,
            section: row.section,
            alone: row.alone,
            needs: row.needs,
            conflicts: row.conflicts,
        });
        Ok(())
    }
}

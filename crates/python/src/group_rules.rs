//! Rules of parameter groups, which may change between steps.

use fusestep::Trust;
use fusestep::planner::{Optimizer, State};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::rules::{parse, rates, trusts};

/// Rules of the groups of a plan.
pub(crate) struct GroupRules {
    pub(crate) rules: Vec<Optimizer>,
    /// The plan's number of each group's rule; `None` for a group without a parameter that trains.
    pub(crate) numbers: Vec<Option<usize>>,
    /// Whether the trust ratio scales the rates of each group, under a rule that has one.
    pub(crate) trusts: Vec<Option<Trust>>,
    /// Address of each group's learning rate, where the device has it.
    pub(crate) rates: Vec<Option<usize>>,
}

/// Outcome of taking settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// They are those of the next step.
    All,
    /// They need another plan, and nothing has changed.
    Nothing,
    /// Some of them were taken, and no step is possible.
    InPart,
}

impl GroupRules {
    /// Takes the settings of the next step, as Python has them.
    pub(crate) fn take(
        &mut self,
        rules: &[Bound<'_, PyDict>],
        state: &mut State,
    ) -> PyResult<Taken> {
        if self.trusts != trusts(rules)? {
            return Ok(Taken::Nothing);
        }
        let rates = rates(rules)?;
        // Groups that share a number must keep the same rate.
        let numbered = || self.numbers.iter().zip(&rates).filter(|(number, _)| number.is_some());
        let mut firsts = numbered();
        let is_shared = firsts.all(|(number, rate)| {
            numbered().find(|(other, _)| *other == number).is_some_and(|(_, first)| first == rate)
        });
        if !is_shared {
            return Ok(Taken::Nothing);
        }
        self.rates = rates;
        Ok(self.take_rules(parse(rules)?, state))
    }

    /// The address of each numbered rule's learning rate, where the device has it.
    pub(crate) fn rates_by_number(&self) -> Vec<Option<usize>> {
        let count = self.numbers.iter().flatten().max().map_or(0, |most| most + 1);
        let mut by_number = vec![None; count];
        for (number, rate) in self.numbers.iter().zip(&self.rates) {
            if let Some(number) = number {
                by_number[*number] = *rate;
            }
        }
        by_number
    }

    fn take_rules(&mut self, rules: Vec<Optimizer>, state: &mut State) -> Taken {
        if rules == self.rules {
            return Taken::All;
        }
        if rules.len() != self.rules.len() {
            return Taken::Nothing;
        }
        // Groups that share a number must keep the same settings.
        let numbered = || rules.iter().zip(self.numbers.iter().copied());
        for (rule, number) in numbered().filter(|(_, number)| number.is_some()) {
            let first = self.numbers.iter().position(|&other| other == number);
            if first.is_some_and(|first| rules[first] != *rule) {
                return Taken::Nothing;
            }
        }
        for (rule, number) in numbered() {
            let Some(number) = number else { continue };
            if state.rules()[number] != *rule && state.set_optimizer_of(number, *rule).is_err() {
                // Rules before this one may have been taken already.
                return Taken::InPart;
            }
        }
        self.rules = rules;
        Taken::All
    }
}

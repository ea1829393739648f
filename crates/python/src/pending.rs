//! Steps on a device whose outcome the host has not seen.

use pyo3::prelude::*;

use crate::collect::{Collector, Found};
use crate::parameter::Parameter;

/// Counts of steps that a step has counted on, since it may have been skipped.
pub(crate) struct Pending(Vec<Counted>);

/// A parameter, by position, and the steps that it had taken before.
struct Counted {
    parameter: usize,
    before: u64,
}

impl Pending {
    /// Counts that a step has written to the state of these parameters.
    pub(crate) fn of(found: &Found<'_>, parameters: &[Parameter]) -> Self {
        let looked = found.updated.iter().filter_map(|&parameter| {
            let member = parameters[parameter].member?;
            let before = *found.steps.get(member)?;
            found.looked.contains(&member).then_some(Counted { parameter, before })
        });
        Self(if found.counts.is_empty() { Vec::new() } else { looked.collect() })
    }

    /// Writes the counts of before, since the step was skipped.
    pub(crate) fn take_back(self, py: Python<'_>, collector: &Collector, parameters: &[Parameter]) {
        for Counted { parameter, before } in self.0 {
            if let Some(own) = parameters.get(parameter) {
                collector.write_steps(py, own, before);
            }
        }
    }
}

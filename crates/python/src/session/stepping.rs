//! The inside of a step: its tensors are found, its launches run or recorded, its outcome heard of.

use std::sync::Mutex;

use fusestep::Report;
use fusestep::planner::{Optimizer, PlanError, StepReport};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::ran::{Around, Ran, Recorded};
use super::{Session, Steps, state_of, unlocked};
use crate::collect::{Collected, Found, Gradients};
use crate::cuda::ContextBefore;
use crate::errors::failed;
use crate::getter::Getter;
use crate::handle::Handles;
use crate::loan::{Loan, Places};
use crate::parameter::overlapping;
use crate::sharing::Shares;
use crate::stream::Asked;
use crate::written::Written;

impl Session {
    /// Makes everything ready for a step over these parameters; `false` if they or settings are no
    /// longer as planned.
    pub(super) fn begin<'py>(
        &mut self,
        py: Python<'py>,
        parameters: &[Bound<'py, PyList>],
        rules: Option<&[Bound<'py, PyDict>]>,
        owner: &Bound<'py, PyAny>,
        private: bool,
    ) -> PyResult<bool> {
        self.conclude(py)?;
        if self.broken || !self.is_of(parameters) {
            return Ok(false);
        }
        if let Some(rules) = rules
            && !self.takes(rules)?
        {
            return Ok(false);
        }
        if !private {
            self.private.forget();
        }
        if !private || self.known.is_empty() {
            self.known.look_through(owner, &mut self.parameters)?;
        }
        Ok(true)
    }

    /// Waits for the outcome of the step that is enqueued, if one is, and hears of replays.
    pub(super) fn conclude(&mut self, py: Python<'_>) -> PyResult<()> {
        if let Some(pending) = self.pending.take() {
            let _before = ContextBefore::remember();
            let (steps, device) = (unlocked(&mut self.steps), &self.device);
            let concluded = py.detach(|| device.waiting(|| steps.conclude()));
            let concluded = concluded.map_err(|error| {
                self.broken = true;
                failed(error)
            })?;
            self.report = steps.report().copied();
            if concluded.is_some_and(|report| report.skipped) {
                unlocked(&mut self.tables).skipped();
                pending.take_back(py, &self.collector, &self.parameters);
            }
        }
        self.follow_replays(py)
    }

    /// Hears of the steps that replays of a recorded step have taken, if one was recorded.
    fn follow_replays(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(recorded) = &self.recorded else {
            return Ok(());
        };
        let place = self.device.place(1, self.collector.library.bind(py))?;
        if place.records() {
            // Nobody can wait now; what is recorded goes on from whatever the device has counted.
            return Ok(());
        }
        let _before = ContextBefore::remember();
        let (tables, steps) = (unlocked(&mut self.tables), unlocked(&mut self.steps));
        let (skipped_before, lr) = (steps.state().skipped(), steps.state().lr());
        let mut counts: Vec<u64> = steps.state().steps().collect();
        let followed = py.detach(|| {
            place.ordered(|| {
                let taken = tables.steps_taken()?;
                let stepped = counts.iter_mut().zip(&recorded.has_gradient);
                stepped.for_each(|(count, has)| *count += if *has { taken } else { 0 });
                let report = steps.run().alone().follow_replays(counts.iter().copied())?;
                Ok::<_, PlanError>((taken > 0, report))
            })
        });
        let (has_stepped, report) = followed.map_err(|error| {
            self.broken = true;
            failed(error)
        })?;
        if has_stepped || steps.state().skipped() > skipped_before {
            self.report = Some(of_replays(report, lr));
        }
        for parameter in self.parameters.iter().filter(|_| has_stepped) {
            let shown = parameter.member.filter(|&member| !self.private.has(member));
            if let Some(member) = shown {
                self.collector.write_steps(py, parameter, counts[member]);
            }
        }
        Ok(())
    }

    /// Refuses a step unlike the one that was recorded.
    pub(super) fn refuse_unlike_recorded(&self) -> PyResult<()> {
        let Some(recorded) = &self.recorded else {
            return Ok(());
        };
        const WORKS: &str = "replays count steps of all of them together; make a new optimizer, \
                             which takes this one's state dict, and record its step";
        let now = self.places.has_gradient();
        let other = recorded.has_gradient.iter().zip(now).position(|(before, now)| before != now);
        if let Some(member) = other {
            let mut own = self.parameters.iter();
            let name = own.find(|own| own.member == Some(member)).map_or("", |own| &own.name);
            let texts = ["no gradient", "a gradient"];
            let [before, now] = [!now[member], now[member]].map(|has| texts[usize::from(has)]);
            return Err(PyRuntimeError::new_err(format!(
                "`{name}`: expected {before}, as in the step that was recorded, found {now}; \
                 {WORKS}"
            )));
        }
        if without_rates(&self.rules.rules) != recorded.rules {
            return Err(PyRuntimeError::new_err(format!(
                "settings: expected those of the step that was recorded, but for `lr`, found \
                 others; {WORKS}"
            )));
        }
        Ok(())
    }

    /// The report of a step without gradients.
    pub(super) fn of_no_gradients(&mut self) -> Report {
        let state = state_of(&mut self.steps);
        let (step, lr) = (state.step(), state.lr());
        let without_gradient = self.members.len() as u64;
        Report { step, lr, without_gradient, ..Report::default() }
    }

    /// Finds the tensors of all parameters; `None` if one is no longer as planned.
    pub(super) fn collect<'py>(
        &mut self,
        py: Python<'py>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Option<Found<'py>>> {
        let steps = state_of(&mut self.steps).steps();
        let (places, ahead) = (&mut self.places, &mut self.ahead);
        let mut collected = Collected::new(places, ahead, &self.private, steps);
        let gradients = match (gradients, self.parameters.first()) {
            (Some(gradients), _) => Gradients::Given(gradients),
            (None, None) => return Ok(Some(collected.found)),
            (None, Some(first)) => {
                let direct = self.collector.handles.as_ref().and_then(Handles::direct);
                Gradients::Own(Getter::of(first.tensor.bind(py), intern!(py, "grad"), direct))
            }
        };
        for (index, parameter) in self.parameters.iter_mut().enumerate() {
            let owner = (owner, index);
            let collector = &self.collector;
            if !collector.collect(py, parameter, owner, &gradients, &mut collected)? {
                return Ok(None);
            }
        }
        Ok(Some(collected.found))
    }

    /// Sums of squares over the gradients of all planned parameters, and elements that are not
    /// finite, in the order of the plan.
    pub(super) fn squares_of(
        &mut self,
        py: Python<'_>,
        threads: usize,
        asked: Asked,
    ) -> PyResult<Vec<(f64, u64)>> {
        let place = self.device.place(threads, self.collector.library.bind(py))?;
        leave_out(&self.places, &mut self.steps);
        let (places, members, checked) = (&self.places, &self.members, &mut self.checked);
        let tables = &mut **unlocked(&mut self.tables);
        // SAFETY: as in `Session::run`.
        let loan = unsafe { Loan::new(places, members, &place, tables, checked) };
        let mut loan = loan.map_err(|overlap| overlapping(&self.parameters, overlap))?;
        loan.tables.begin(checked.number(), asked, &[], false);
        let steps = unlocked(&mut self.steps);
        let squares = || steps.run().alone().squares_borrowed(&mut loan);
        let squares = py.detach(|| place.ordered(squares)).map_err(failed)?;
        Ok(squares.iter().map(|own| (own.sum, own.non_finite)).collect())
    }

    /// Runs the step on the collected tensors, or records it, without the interpreter's lock. Then
    /// reports the written parameters, unless the step was skipped.
    pub(super) fn run(
        &mut self,
        py: Python<'_>,
        threads: usize,
        asked: Asked,
        around: Around<'_>,
        found: &Found<'_>,
    ) -> PyResult<Ran> {
        let place = self.device.place(threads, self.collector.library.bind(py))?;
        self.refuse_unlike_recorded()?;
        refuse_to_record(place.records() && found.made_state)?;
        leave_out(&self.places, &mut self.steps);
        let (places, members, checked) = (&self.places, &self.members, &mut self.checked);
        let tables = &mut **unlocked(&mut self.tables);
        // SAFETY: `Collector::collect` has found these places in this call, in tensors to which
        // the caller, `Session::step`, keeps references until it returns, or in an earlier one, in
        // state to which the optimizer keeps references and nobody else has any. Other threads
        // that write to them meanwhile race, as they would with PyTorch's own kernels, which say
        // so.
        let loan = unsafe { Loan::new(places, members, &place, tables, checked) };
        let mut loan = loan.map_err(|overlap| overlapping(&self.parameters, overlap))?;
        loan.shares = around.share.map(|call| Shares { call, raised: None });
        loan.asked = asked;
        let rates = self.rules.rates_by_number();
        loan.tables.begin(checked.number(), asked, &rates, place.records());
        let steps = unlocked(&mut self.steps);
        let written = around.written.map(|call| Written {
            call,
            direct: self.collector.handles.as_ref().and_then(Handles::direct),
            parameters: &self.parameters,
            updated: &found.updated,
        });
        if place.records() {
            let recorded =
                py.detach(|| place.recorded(|| steps.run().alone().record_borrowed(&mut loan)));
            recorded.map_err(failed)?;
            let has_gradient = self.places.has_gradient().to_vec();
            let rules = without_rates(&self.rules.rules);
            self.recorded.get_or_insert(Recorded { has_gradient, rules });
            return Ok(Ran::Recorded(written.map_or(Ok(()), |written| written.tell(py))));
        }
        // State that a step has made is taken back where it is skipped, which its caller must know;
        // and replays count on from this step.
        let waits = found.made_state || self.recorded.is_some();
        let run = || {
            if !place.is_device() {
                return steps.step_borrowed(&mut loan).map(Some);
            }
            match steps.enqueue_borrowed(&mut loan)? {
                None if waits => steps.conclude(),
                report => Ok(report),
            }
        };
        let report = py.detach(|| place.ordered(run)).map_err(|error| {
            self.broken = true;
            let raised = loan.shares.take().and_then(|shares| shares.raised);
            raised.unwrap_or_else(|| failed(error))
        })?;
        if report.is_some_and(|report| report.skipped) {
            unlocked(&mut self.tables).skipped();
        }
        let written = written.filter(|_| report.is_none_or(|report| !report.skipped));
        Ok(Ran::Taken(report, written.map_or(Ok(()), |written| written.tell(py))))
    }
}

/// Leaves planned parameters without a gradient out of the next step.
fn leave_out(places: &Places, steps: &mut Mutex<Steps>) {
    let without = places.has_gradient().iter().enumerate();
    for (member, _) in without.filter(|(_, has)| !**has) {
        state_of(steps).set_without_gradient_at(member);
    }
}

/// Refuses to record a step that `makes_state`, which each replay would make anew.
fn refuse_to_record(makes_state: bool) -> PyResult<()> {
    if !makes_state {
        return Ok(());
    }
    Err(PyRuntimeError::new_err(
        "step: expected one before the first that is recorded, which makes the state of its \
         parameters, found none; run one step outside of `torch.cuda.graph`",
    ))
}

/// The report of the last replay.
fn of_replays(report: StepReport, lr: f64) -> Report {
    let StepReport { step, grad_norm, non_finite, skipped, loss_scale, .. } = report;
    Report { step, lr, grad_norm, non_finite, skipped, loss_scale, ..Report::default() }
}

/// Rules with a rate of 0, which is no part of what a recorded step keeps.
fn without_rates(rules: &[Optimizer]) -> Vec<Optimizer> {
    rules.iter().map(|rule| rule.with_lr(0.0)).collect()
}

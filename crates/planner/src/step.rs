//! One step of a rank: micro-steps, the update that ends them, and what ranks agree on.

use fusestep_coalesce::HostMemory;
use fusestep_launch::Backend;

use crate::absorb::{Absorb, Divisor, absorb};
use crate::arena::{Given, keeps_segments, sum_width};
use crate::comms::Comms;
use crate::in_backward::{check_between_steps, update_rest};
use crate::run::Executor;
use crate::{MicroStepReport, Plan, PlanError, State, StepReport, Topology};

impl Plan {
    /// Ends a micro-step, and at the last one reduces, updates and gathers: the stages of the plan,
    /// in order.
    ///
    /// All ranks call it, whether they have given gradients or not. Sums across ranks are formed in
    /// rank order and norms in the fixed tree, so parameters get the same bits at every ZeRO
    /// stage and with any buckets, streams and fused stages. A parameter that no rank has given
    /// a gradient, by [`Plan::push_grad`] or [`State::grad_mut`], is left out of the step.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::Topology`]: nothing has been written.
    /// [`PlanError::Collective`], [`PlanError::Backend`]: the state refuses further steps
    /// ([`PlanError::Poisoned`]).
    pub fn step(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<MicroStepReport, PlanError> {
        self.check_comms(state, comms)?;
        let weight = state.arena.weight.unwrap_or(1.0);
        let last = state.arena.micro_steps + 1 == self.micro_steps();
        let done = if last {
            let divisor = self.divisor(state, weight);
            self.update(state, backend, comms, (divisor, Pending::MicroStep))
        } else {
            self.end_micro_step(state, backend, comms, weight)
                .map(|()| MicroStepReport::default())
        };
        state.arena.weight = None;
        if done.is_err() {
            self.poison(state);
        }
        done
    }

    /// Updates from fewer micro-steps than planned: what the last ones before an epoch's end have
    /// added. Does nothing if there are none; gradients of a micro-step under way have to be
    /// ended by [`Plan::step`] first.
    ///
    /// # Errors
    /// As [`Plan::step`]; [`PlanError::StepUnderWay`].
    pub fn flush(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<MicroStepReport, PlanError> {
        self.check_comms(state, comms)?;
        check_between_steps(state, "flush")?;
        if state.arena.micro_steps == 0 {
            return Ok(MicroStepReport::default());
        }
        let divisor = self.divisor(state, 0.0);
        let done = self.update(state, backend, comms, (divisor, Pending::Nothing));
        if done.is_err() {
            self.poison(state);
        }
        done
    }

    pub(crate) fn check_comms(&self, state: &State, comms: &Comms<'_>) -> Result<(), PlanError> {
        self.check_state(state)?;
        let (expected, found) = (self.topology(), (comms.rank(), comms.world()));
        let text = |rank: usize, world: usize| format!("rank {rank} of {world}");
        if (expected.rank, expected.world) != found {
            return Err(PlanError::Topology {
                expected: text(expected.rank, expected.world),
                found: text(found.0, found.1),
            });
        }
        let (group, found) = (self.shard_group, comms.group_size());
        if group == found {
            return Ok(());
        }
        Err(PlanError::Topology {
            expected: format!(
                "calls within shard groups of {group} ranks; make them by `Comms::in_groups`"
            ),
            found: format!("groups of {found}"),
        })
    }

    /// Ends a micro-step that is not the last.
    fn end_micro_step(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        weight: f64,
    ) -> Result<(), PlanError> {
        comms.set_plan(self.hash());
        if self.reduces_each() {
            let given_weight = state.arena.weight;
            self.complete_gradients(state, backend, Divisor(1.0))?;
            self.reduce_and_add(state, backend, comms, given_weight)?;
        } else {
            self.add_views(state, backend)?;
        }
        let arena = &mut state.arena;
        arena.micro_steps += 1;
        arena.weights += weight;
        arena.now.fill(Given::No);
        arena.ready.again();
        Ok(())
    }

    /// Reduces the gradients of one micro-step and adds them to the sums of all.
    fn reduce_and_add(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        weight: Option<f64>,
    ) -> Result<(), PlanError> {
        if self.reduces() {
            self.reduce_all(state, backend, comms)?;
        }
        let how = Absorb {
            first: state.arena.micro_steps == 0,
            weight,
            last: None,
        };
        self.each_reduced(state, backend, how)?;
        let mut bytes = state.arena.weights_hash.to_le_bytes().to_vec();
        bytes.extend(weight.unwrap_or(1.0).to_le_bytes());
        state.arena.weights_hash = xxhash_rust::xxh3::xxh3_64(&bytes);
        if self.reduces() {
            let peak = state.arena.settle(keeps_segments(self));
            state.arena.seen_peak(peak);
        }
        Ok(())
    }

    /// Adds the reduced gradients of this rank's shard to their sums, or puts what the sums come to
    /// in their place.
    fn each_reduced(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        how: Absorb,
    ) -> Result<(), PlanError> {
        for (storage, spec) in self.storages.iter().enumerate() {
            let dtype = spec.grad_dtype();
            let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
            let Some(mut sums) = state.arena.reduced_sums[storage].take() else {
                continue;
            };
            for part in &spec.shard {
                let numel = (part.elements.end - part.elements.start) as usize;
                let at = part.at as usize * sum_width;
                let place = (storage, part);
                let Some(all) = sums.host_mut() else {
                    state.add_reduced(self, backend, place, (sums.as_mut(), at, how))?;
                    continue;
                };
                let sums = &mut all[at..at + numel * sum_width];
                // Aligned for elements of any type, also where it is empty.
                let mut own = HostMemory::zeroed(numel * width)?;
                let own = own.bytes_mut();
                if how.last.is_some() {
                    absorb(dtype, own, Some(sums), None, how);
                    state.write_reduced(self, backend, place, own)?;
                } else {
                    state.read_reduced(self, backend, place, own)?;
                    absorb(dtype, &mut [], Some(sums), Some(own), how);
                }
                state.arena.copied_bytes += own.len() as u64;
            }
            state.arena.reduced_sums[storage] = Some(sums);
        }
        Ok(())
    }

    fn update(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        (divisor, pending): (Divisor, Pending),
    ) -> Result<MicroStepReport, PlanError> {
        comms.set_plan(self.hash());
        if self.reduces_each() {
            if pending == Pending::MicroStep {
                let weight = state.arena.weight;
                self.complete_gradients(state, backend, Divisor(1.0))?;
                self.reduce_and_add(state, backend, comms, weight)?;
            }
        } else {
            self.complete_gradients(state, backend, divisor)?;
            if self.reduces_when_full(comms) {
                // Ranks that have given everything are in these calls already.
                self.reduce_all(state, backend, comms)?;
            }
        }
        let report = if self.in_backward {
            update_rest(self, state, backend, comms)?
        } else {
            self.update_all(state, backend, comms, divisor)?
        };
        let averaged = self.average(state, backend, comms)?;
        comms.finish_on_device()?;
        let peak = state.arena.settle(keeps_segments(self));
        state.arena.seen_peak(peak);
        state.arena.clear();
        Ok(MicroStepReport {
            update: Some(report),
            averaged,
            exposed_ns: std::mem::take(&mut state.arena.exposed_ns),
            segment_peak_bytes: std::mem::take(&mut state.arena.seen_peak_bytes),
            gradient_bytes_copied: std::mem::take(&mut state.arena.copied_bytes),
        })
    }

    /// Agrees on which gradients there are and runs all stages.
    fn update_all(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        divisor: Divisor,
    ) -> Result<StepReport, PlanError> {
        let given = self.agree_on_given(state, comms)?;
        if self.reduces_each() {
            let how = Absorb {
                first: false,
                weight: None,
                last: Some(divisor),
            };
            self.each_reduced(state, backend, how)?;
        }
        for (param, _) in given.iter().enumerate().filter(|(_, given)| **given == 0) {
            state.set_without_gradient_at(param);
        }
        let mut executor = Executor::Backend(backend);
        let comms_of_stages = (self.topology.world > 1).then_some(&mut *comms);
        let report = self.run_update(state, &mut executor, comms_of_stages)?;
        Ok(StepReport {
            without_gradient: given.iter().filter(|&&given| given == 0).count() as u64,
            ..report
        })
    }
}

/// What has not been added yet when an update begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    /// The gradients of the last micro-step.
    MicroStep,
    /// Nothing: the update follows a micro-step that has ended.
    Nothing,
}

/// This rank among those of its plan, in errors.
impl std::fmt::Display for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}

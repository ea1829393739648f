//! Parameters averaged across ranks.

use std::num::NonZeroU64;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::Backend;
use fusestep_tensor::{DType, Role};

use super::comms::Comms;
use super::{Held, RankPlan, RankState};
use crate::PlanError;
use crate::passes::{Averaged, Interval, LocalSgd, Zero};

/// An interval that follows the loss.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Adapting {
    /// This rank's loss of the step under way.
    pub(crate) loss: Option<f64>,
    /// All ranks' mean loss in the first step, and the learning rate.
    pub(crate) first: Option<(f64, f64)>,
    /// The interval it has come to.
    pub(crate) every: Option<NonZeroU64>,
}

impl RankPlan {
    /// Averages parameters across ranks, if it is time to.
    pub(crate) fn average(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<bool, PlanError> {
        let Some(rule) = self.whole.ranks.local_sgd else {
            return Ok(false);
        };
        let adapts = rule.interval == Interval::Adaptive;
        if adapts && state.adapting.first.is_none() {
            let loss = mean_loss(state, comms)?;
            state.adapting.first = Some((loss, state.local.lr()));
        }
        let now = LocalSgd {
            every: state.adapting.every.unwrap_or(rule.every),
            ..rule
        };
        state.since_average += 1;
        // Skipped steps count, for other ranks may have taken theirs.
        let step = state.local.step() + state.local.skipped();
        if !now.due(step, state.since_average) {
            return Ok(false);
        }
        self.average_now(state, backend, comms)?;
        if adapts && let Some((first_loss, first_lr)) = state.adapting.first {
            let loss = mean_loss(state, comms)?;
            let adapted = rule.adapted(first_loss, loss, first_lr, state.local.lr());
            state.adapting.every = Some(adapted.every);
        }
        state.adapting.loss = None;
        Ok(true)
    }

    /// Averages parameters, and state if pass `local_sgd` says so, across all ranks.
    ///
    /// # Errors
    /// As [`Self::run_with`].
    pub fn average_now(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<(), PlanError> {
        state.since_average = 0;
        if self.topology().world == 1 || self.zero() != Zero::Zero0 {
            return Ok(());
        }
        let with_state = self
            .whole
            .ranks
            .local_sgd
            .is_some_and(|rule| rule.averaged == Averaged::ParamsAndState);
        state.params_version += 1;
        let done = self.average_tensors(state, backend, comms, with_state.into());
        if done.is_err() {
            self.poison(state);
        }
        done
    }

    fn average_tensors(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        what: What,
    ) -> Result<(), PlanError> {
        for line in self.flats.iter().filter(|line| line.held == Held::Together) {
            let Some(&first) = line.members.first() else {
                continue;
            };
            let roles = state.local.roles(&self.params()[first as usize].name)?;
            for role in roles {
                if role != Role::Param && !(role.is_state() && what == What::ParamsAndState) {
                    continue;
                }
                let dtype = state
                    .local
                    .dtype(role, &self.params()[first as usize].name)?;
                let width = dtype.len_bytes();
                let mut words = super::words::Words::zeroed(line.total() as usize * width);
                let place = |at: usize| {
                    line.starts[at] as usize * width..line.starts[at + 1] as usize * width
                };
                for (at, &member) in line.members.iter().enumerate() {
                    let name = &self.params()[member as usize].name;
                    let bytes = &mut words.bytes_mut()[place(at)];
                    state.local.read(backend, role, name, bytes)?;
                }
                let operation = Operation::AllReduce(ReduceOp::Average);
                comms.in_place(operation, dtype, None, words.bytes_mut())?;
                for (at, &member) in line.members.iter().enumerate() {
                    let name = &self.params()[member as usize].name;
                    state
                        .local
                        .write(backend, role, name, &words.bytes()[place(at)])?;
                }
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq)]
enum What {
    Params,
    ParamsAndState,
}

impl From<bool> for What {
    fn from(with_state: bool) -> Self {
        match with_state {
            true => What::ParamsAndState,
            false => What::Params,
        }
    }
}

/// The mean of all ranks' losses; not a number if one has none.
fn mean_loss(state: &RankState, comms: &mut Comms<'_>) -> Result<f64, PlanError> {
    let mut loss = [state.adapting.loss.unwrap_or(f64::NAN)];
    let operation = Operation::AllReduce(ReduceOp::Average);
    comms.in_place(
        operation,
        DType::F64,
        None,
        bytemuck::cast_slice_mut(&mut loss),
    )?;
    Ok(loss[0])
}

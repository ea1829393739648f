//! Counts of a rank: steps, skipped steps, the loss scale, and where it stands between updates and
//! averages.

use std::num::NonZeroU64;

use crate::plan::lanes::OpenLanes;
use crate::plan::value::Plan;
use crate::run::memory::state::State;

/// Counts of one rank of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunCounts {
    /// Steps run.
    pub step: u64,
    /// Steps that were skipped.
    pub skipped: u64,
    /// Loss scale, good steps, bad steps, where the loss is scaled.
    pub loss_scale: Option<(f64, u32, u32)>,
    /// Micro-steps of the update to come that are over.
    pub micro_steps: u64,
    /// Sum of the weights of these micro-steps.
    pub weights: f64,
    /// Hash of their weights, which ranks compare.
    pub weights_hash: u64,
    /// Steps since the last average of parameters.
    pub since_average: u64,
    /// Loss of the step under way, for an adaptive interval.
    pub loss: Option<f64>,
    /// Loss and rate of the first average, for an adaptive interval.
    pub first: Option<(f64, f64)>,
    /// Steps between two averages as adapted.
    pub every: Option<NonZeroU64>,
    /// Steps taken, for each parameter.
    pub steps_of: Vec<u64>,
    /// Micro-steps that have given a gradient, for each parameter.
    pub given: Vec<u64>,
    /// The window of lanes that has begun.
    pub lanes: Option<OpenLanes>,
}

impl RunCounts {
    /// Counts of a rank of `plan`.
    pub(crate) fn of_run(plan: &Plan, state: &State) -> Self {
        let window = state.arena.window.as_ref();
        let lanes = window.and_then(|window| window.open(plan, state.arena.micro_steps));
        Self { lanes, ..Self::of(state) }
    }

    pub(crate) fn of(state: &State) -> Self {
        let arena = &state.arena;
        let scale = state.loss_scale();
        Self {
            step: state.step(),
            skipped: state.skipped(),
            loss_scale: scale.map(|scale| (scale.scale(), scale.good_steps(), scale.bad_steps())),
            micro_steps: u64::from(arena.micro_steps),
            weights: arena.weights,
            weights_hash: arena.weights_hash,
            since_average: state.since_average,
            loss: state.adapting.loss,
            first: state.adapting.first,
            every: state.adapting.every,
            steps_of: state.steps().collect(),
            given: arena.given.iter().map(|&given| u64::from(given)).collect(),
            lanes: None,
        }
    }
}

//! Parameters that are updated together before the step is run.

use crate::plan::value::Plan;
use crate::run::report::StepReport;

/// A step whose updates have begun.
pub(crate) struct Begun {
    /// Report of the step's work so far.
    pub(crate) report: StepReport,
    pub(crate) skipped_before: u64,
}

/// Updates that may come before the step is run.
#[derive(Default)]
pub(crate) struct InBackward {
    /// Units: one for each segment, in order; then units that wait for no other rank.
    pub(crate) units: Vec<Unit>,
    /// Unit of each parameter, if that unit waits for no other rank.
    pub(crate) alone: Vec<Option<usize>>,
    /// Parameters in no segment's unit, on whose gradients ranks agree in the step.
    pub(crate) rest: Vec<u32>,
    /// First segment that is not updated yet.
    pub(crate) next: usize,
    /// Whether any rank has given a parameter's gradient, by parameter, as far as ranks have
    /// agreed.
    pub(crate) given: Vec<u8>,
    pub(crate) under_way: Option<Begun>,
}

/// Parameters that are updated together.
#[derive(Default)]
pub(crate) struct Unit {
    pub(crate) params: Vec<u32>,
    /// Positions among the plan's stages, each with its position among those that update.
    pub(crate) stages: Vec<(usize, usize)>,
    /// Gradients that are not given yet; `Ready` counts them for a segment's unit.
    pub(crate) missing: usize,
    pub(crate) updated: bool,
}

impl InBackward {
    /// The units of a plan; none without the pass.
    pub(crate) fn of(plan: &Plan) -> Self {
        if !plan.in_backward {
            return Self::default();
        }
        let mut units: Vec<Unit> = Vec::with_capacity(plan.segments.len());
        for segment in &plan.segments {
            let params = members(plan, segment.storage, segment.tensors.clone());
            units.push(Unit::of(params));
        }
        let mut of_segment = vec![false; plan.params.len()];
        for &param in units.iter().flat_map(|unit| &unit.params) {
            of_segment[param as usize] = true;
        }
        let mut alone = vec![None; plan.params.len()];
        let mut update = 0;
        for (at, stage) in plan.stages.iter().enumerate() {
            let place = (at, update);
            if let Some(bucket) = stage.bucket() {
                units[plan.buckets[bucket].segment].stages.push(place);
            } else if let Some(own) = stage.update() {
                let params = members(plan, own.storage, own.tensors.iter().copied());
                for &param in &params {
                    alone[param as usize] = Some(units.len());
                }
                let mut unit = Unit::of(params);
                unit.stages.push(place);
                units.push(unit);
            }
            update += usize::from(stage.update().is_some());
        }
        let params = 0..plan.params.len() as u32;
        Self {
            units,
            alone,
            rest: params.filter(|&param| !of_segment[param as usize]).collect(),
            next: 0,
            given: vec![0; plan.params.len()],
            under_way: None,
        }
    }

    /// Parameters that a step under way has updated; `None` between steps.
    pub(crate) fn updated(&self) -> Option<usize> {
        self.under_way.as_ref()?;
        let updated = self.units.iter().filter(|unit| unit.updated);
        Some(updated.map(|unit| unit.params.len()).sum())
    }

    /// Waits for all gradients again.
    pub(crate) fn again(&mut self) {
        self.next = 0;
        self.given.fill(0);
        for unit in &mut self.units {
            unit.missing = unit.params.len();
            unit.updated = false;
        }
    }
}

impl Unit {
    fn of(params: Vec<u32>) -> Self {
        Self { missing: params.len(), params, ..Self::default() }
    }
}

/// The parameters of some tensors that have elements.
fn members(plan: &Plan, storage: usize, tensors: impl Iterator<Item = u32>) -> Vec<u32> {
    let spec = &plan.storages[storage];
    let full = tensors.filter(|&tensor| spec.layout.numel(tensor as usize) > 0);
    full.map(|tensor| spec.members[tensor as usize]).collect()
}

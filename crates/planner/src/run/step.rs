//! Update of a step: the only loop over a plan's stages.

use fusestep_launch::{Backend, LaunchReport};
use fusestep_tensor::counted;

use crate::error::{PlanError, Result};
use crate::plan::stage::Stage;
use crate::plan::value::Plan;
use crate::run::clock::StepPart;
use crate::run::comms::calls::Comms;
use crate::run::executor::Executor;
use crate::run::masters;
use crate::run::memory::state::State;
use crate::run::memory::units::Begun;
use crate::run::report::StepReport;
use crate::run::run::Run;
use crate::run::stages::{
    device_norm, device_trust, gather, launches, norm, optimize, parts, reduce, reduce_update,
    trust, update_norms,
};

pub(crate) fn run_stages(
    plan: &Plan,
    state: &mut State,
    mut executor: Executor<'_>,
) -> Result<StepReport> {
    check_alone(plan, state)?;
    run_update(plan, state, &mut executor, None)
}

/// Refuses a state of another plan, a step under way, and a plan whose steps take more than one
/// call.
pub(crate) fn check_alone(plan: &Plan, state: &State) -> Result<()> {
    state.check_plan(plan)?;
    state.check_between_steps("step_all")?;
    if plan.topology.world > 1 || plan.micro_steps() > 1 {
        return Err(PlanError::Topology {
            expected: "a plan of one rank and one micro-step for `step_all`".to_owned(),
            found: format!(
                "{} and {}; use `Run::step`",
                counted(plan.topology.world as u64, "rank"),
                counted(plan.micro_steps().into(), "micro-step"),
            ),
        });
    }
    Ok(())
}

/// Runs one update: all stages except the stages that collect gradients.
pub(crate) fn run_update(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
    comms: Option<&mut Comms<'_>>,
) -> Result<StepReport> {
    let mut begun = begin_update(plan, state, executor)?;
    let done = each_stage(plan, state, executor, comms, &mut begun.report);
    state.or_poison(done)?;
    end_update(state, executor, begun)
}

/// Makes everything ready for the updates of a step.
pub(crate) fn begin_update(
    plan: &Plan,
    state: &mut State,
    executor: &Executor<'_>,
) -> Result<Begun> {
    masters::follow_views(state);
    let derived = match &executor {
        Executor::Backend(backend) => {
            state.settle(*backend)?;
            optimize::prepare(plan, state, *backend)?
        }
        Executor::Lender(_) => {
            optimize::refresh(plan, state)?;
            false
        }
    };
    if !derived {
        launches::write_step_scalars(state);
    }
    Ok(Begun {
        report: StepReport {
            step: state.step + 1,
            without_gradient: state.without_gradient_count,
            ..StepReport::default()
        },
        skipped_before: executor.backend().skipped(),
    })
}

/// Reads the outcome of the step, and counts the step.
pub(crate) fn end_update(
    state: &mut State,
    executor: &Executor<'_>,
    begun: Begun,
) -> Result<StepReport> {
    let read = match &mut state.norm {
        Some(norm) => norm.settle(executor.backend(), 1),
        None => Ok(()),
    };
    state.or_poison(read)?;
    count_update(state, executor.backend(), begun)
}

/// Counts the step, whose outcome the host has.
pub(crate) fn count_update(
    state: &mut State,
    backend: &dyn Backend,
    begun: Begun,
) -> Result<StepReport> {
    let Begun { mut report, skipped_before } = begun;
    let told = tell(state, backend, skipped_before, &mut report);
    state.or_poison(told)?;
    state.params_version += 1;
    state.written.forget();
    if report.skipped {
        state.forget_without_gradient();
    } else {
        state.advance();
    }
    report.step = state.step;
    Ok(report)
}

/// Runs the stages of an update, in order; `comms` is there if there are several ranks.
pub(crate) fn each_stage(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
    mut comms: Option<&mut Comms<'_>>,
    report: &mut StepReport,
) -> Result<()> {
    let mut updates = 0;
    let due = plan.stages.iter().map(|stage| {
        let update = updates;
        updates += usize::from(stage.update().is_some());
        Due { stage, update }
    });
    let skipped = run_due(plan, state, executor, comms.as_deref_mut(), due, report)?;
    if let Some(comms) = comms {
        let backend = executor.backend();
        let mut run = Run { plan, state, backend, comms };
        update_norms::share(&mut run, skipped)?;
    }
    Ok(())
}

/// A stage that is due, and its number among those that update.
pub(crate) struct Due<'p> {
    pub(crate) stage: &'p Stage,
    pub(crate) update: usize,
}

/// Runs stages in their order, of a whole update or of what can be updated in backward; returns
/// whether all updates are skipped.
pub(crate) fn run_due<'p>(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
    mut comms: Option<&mut Comms<'_>>,
    due: impl Iterator<Item = Due<'p>>,
    report: &mut StepReport,
) -> Result<bool> {
    let mut skipped = false;
    for Due { stage, update } in due {
        let comms = comms.as_deref_mut();
        let done = run_stage(plan, state, executor, comms, stage, update, &mut skipped)?;
        report.launches += done.launches;
        report.elements += done.elements;
    }
    Ok(skipped)
}

/// Runs one stage, the `update`-th of those that update. Returns whether all updates are skipped,
/// once that is known.
fn run_stage(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
    comms: Option<&mut Comms<'_>>,
    stage: &Stage,
    update: usize,
    skipped: &mut bool,
) -> Result<LaunchReport> {
    let begun = part(stage).map(|part| state.clock.begin(part));
    let done = match (stage, comms) {
        (Stage::Optimize(optimize), comms) => {
            if update == 0 && comms.is_none() {
                parts::sum_tensors(plan, state, executor)?;
            }
            reduce::with_gradients(plan, state, optimize.bucket, |state| {
                optimize::run_update(plan, state, optimize, update, executor)
            })
        }
        (Stage::Norm(_), None) => norm::run(plan, state, executor),
        (_, None) => Ok(LaunchReport::default()),
        (_, Some(comms)) => {
            let backend = executor.backend();
            let run = &mut Run { plan, state, backend, comms };
            run_stage_of_ranks(run, stage, update, skipped)
        }
    };
    if let Some(begun) = begun {
        state.clock.end(begun);
    }
    done
}

/// The part of a step that a stage is; `None` for those whose work is done elsewhere.
fn part(stage: &Stage) -> Option<StepPart> {
    Some(match stage {
        Stage::Norm(_) => StepPart::Norm,
        Stage::Reduce(_) => StepPart::Reduce,
        Stage::ReduceUpdate(_) => StepPart::ReduceUpdate,
        Stage::Trust => StepPart::Trust,
        Stage::Optimize(_) => StepPart::Update,
        Stage::Gather(_) => StepPart::Gather,
        Stage::Accumulate(_) | Stage::Average(_) => return None,
    })
}

/// Runs a stage that takes other ranks.
fn run_stage_of_ranks(
    run: &mut Run<'_, '_>,
    stage: &Stage,
    update: usize,
    skipped: &mut bool,
) -> Result<LaunchReport> {
    match stage {
        // Devices that decide keep to themselves whether the step is skipped.
        Stage::Norm(_) => *skipped = !device_norm::decide(run)? && norm::decide(run)?,
        // Reduced already, at the end of each micro-step.
        Stage::Reduce(_) if run.plan.reduces_each() => {}
        Stage::Reduce(reduce) => {
            let segment = run.plan.buckets[reduce.bucket].segment;
            // The first of its buckets reduces it whole.
            if run.plan.segments[segment].buckets.start == reduce.bucket {
                reduce::reduce_segment(run, segment)?;
            }
        }
        Stage::ReduceUpdate(optimize) => {
            return reduce_update::reduce_and_update(run, optimize, update);
        }
        // After a skipped step nothing has changed.
        Stage::Trust | Stage::Gather(_) if *skipped => {}
        Stage::Trust => {
            if !device_trust::sum_tensors(run)? {
                trust::sum_tensors(run)?;
            }
        }
        Stage::Gather(gather) => gather::bring(run, gather)?,
        // Gradients of earlier micro-steps are in the arena already; averages count steps, so they
        // follow once this one is counted; and updates need no other rank.
        Stage::Accumulate(_) | Stage::Average(_) | Stage::Optimize(_) => {}
    }
    Ok(LaunchReport::default())
}

/// Tells what a step decided. All of it was enqueued before: no launch has waited for the host.
fn tell(
    state: &mut State,
    backend: &dyn Backend,
    skipped_before: u64,
    report: &mut StepReport,
) -> Result<()> {
    if let Some(norm) = &state.norm {
        report.grad_norm = Some(norm.block.grad_norm);
        report.non_finite = norm.block.non_finite;
        report.skipped = norm.block.found != 0;
    }
    if report.skipped {
        report.elements = 0;
    }
    report.tensors_skipped = backend.skipped() - skipped_before;
    update_norms::report(state, backend, report)?;
    report.loss_scale = state.loss_scale().map(|scale| scale.scale());
    Ok(())
}

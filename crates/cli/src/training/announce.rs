//! Words on a run before it begins: what will be trained, and samples that do not come out even.

use fusestep::StepOptions;
use fusestep_models::Task;
use fusestep_planner::Plan;
use fusestep_tensor::{counted, counted_are};

use crate::output::{Told, detail, note, print, tells};
use crate::train::args::TrainArgs;

/// Says what will be trained and how, and how many micro-steps the last update of an epoch has,
/// where these are fewer.
pub(super) fn announce(
    args: &TrainArgs,
    task: &dyn Task,
    plan: &Plan,
    batch: usize,
) -> anyhow::Result<()> {
    if !args.json && tells(Told::Usual) {
        print(&format!("{}\n{plan}", task.describe()))?;
    }
    let batches = task.samples_of_epoch().div_ceil(batch);
    // With lanes a batch is an update, whose micro-batches are parts of it.
    let micro_steps = if plan.lanes().is_some() { 1 } else { plan.micro_steps() as usize };
    let rest = batches % micro_steps;
    // With lanes an update is of all batches that it is given.
    if rest > 0 && plan.lanes().is_none() {
        note(&format!(
            "note: the last update of each epoch has {}, not {micro_steps}: an epoch has {}, \
             no multiple of {micro_steps}",
            counted(rest as u64, "micro-step"),
            counted(batches as u64, "batch")
        ));
    }
    if let Some(lanes) = plan.lanes() {
        announce_lanes(args, task, lanes.count.get() as usize, batch);
    }
    let batches = counted(batches as u64, "batch");
    detail(&format!("{batches} of {batch} an epoch"));
    Ok(())
}

/// Says which lanes are without a sample, and when.
fn announce_lanes(args: &TrainArgs, task: &dyn Task, lanes: usize, batch: usize) {
    let of_lanes = |without| format!("{without} of {}", counted_are(lanes as u64, "lane"));
    if args.batch < lanes {
        note(&format!(
            "note: {} without a sample in every update: --batch {} is smaller; raise it, or give \
             fewer --lanes",
            of_lanes(lanes - args.batch),
            args.batch
        ));
        return;
    }
    // Samples go to lanes one after another.
    let last = task.samples_of_epoch() % batch;
    let filled = last.div_ceil(batch / args.batch);
    if (1..lanes).contains(&filled) {
        note(&format!(
            "note: {} without a sample in the last update of each epoch, which has {}",
            of_lanes(lanes - filled),
            counted(last as u64, "sample")
        ));
    }
}

/// Says at which loss scale a run goes on, where the plan says where others begin.
pub(super) fn announce_scale(options: &StepOptions, now: f64) {
    let start = options.loss_scale.map_or(now, |scale| scale.scale());
    if start != now {
        note(&format!(
            "note: --loss-scale: the run goes on at {now}, as it was saved; {start} is where a run \
             begins"
        ));
    }
}

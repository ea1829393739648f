//! `fusestep plan`: what a step would launch, without running it.

use std::path::PathBuf;

use clap::Args;
use fusestep_planner::{PlanSummary, Planner, RankSummary, Topology};
use fusestep_tensor::ParamDesc;
use serde::Serialize;

use crate::gradients::GradientArgs;
use crate::inputs::read_model;
use crate::options::{ParamDType, PlanningArgs, PrecisionArgs};
use crate::output::{print, print_json, write_page};
use crate::ranks::{Fused, WorldArgs};
use crate::rules::OptimizerArgs;

/// Flags of `plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A model (.safetensors) or its shapes (.json: [{"name": "fc.weight", "shape": [10, 64]}, …])
    model: PathBuf,
    #[command(flatten)]
    optimizer: OptimizerArgs,
    #[command(flatten)]
    gradients: GradientArgs,
    #[command(flatten)]
    precision: PrecisionArgs,
    #[command(flatten)]
    planning: PlanningArgs,
    #[command(flatten)]
    world: WorldArgs,
    /// Element type of shapes that state none
    #[arg(long, value_enum, default_value = "f32")]
    dtype: ParamDType,
    /// Print the plan's numbers as one JSON object
    #[arg(long)]
    json: bool,
    /// Write the plan as a page, drawn to scale
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let mut model = read_model(&args.model, args.dtype.into())?;
    args.optimizer.exclude(&mut model.params);
    let planner = args
        .planning
        .planner(args.optimizer.rule()?, args.planning.limits());
    let planner = args.precision.planner(planner, &model.params);
    let planner = args.gradients.passes(planner);
    if args.world.world.is_some() || args.world.ranks.any() {
        return run_world(args, planner, &model.params);
    }
    let plan = planner.plan(&model.params)?;
    if !model.buffers.is_empty() {
        let count = model.buffers.len();
        eprintln!(
            "note: {count} tensors are not floating point and so no parameters: {}, …",
            model.buffers[0]
        );
    }
    if let Some(path) = &args.html {
        write_page(path, &plan.to_html())?;
    }
    if args.json {
        return print_json(&plan.summary());
    }
    print(&plan.to_string())
}

/// What `--json` prints for a world of ranks: the numbers of rank 0's own launches, and those of the calls between ranks.
#[derive(Debug, Serialize)]
struct WorldSummary {
    #[serde(flatten)]
    plan: PlanSummary,
    #[serde(flatten)]
    ranks: RankSummary,
}

fn run_world(args: &PlanArgs, planner: Planner, params: &[ParamDesc]) -> anyhow::Result<()> {
    let world = args.world.world.map_or(1, std::num::NonZeroUsize::get);
    let model = args.world.cost_model(Fused::from(args.planning.naive))?;
    let planner = args
        .world
        .ranks
        .passes(planner, Fused::from(args.planning.naive))?;
    let plan = planner.plan_for(params, Topology::new(0, world)?)?;
    if let Some(path) = &args.html {
        write_page(path, &plan.to_html(&model))?;
    }
    let ranks = plan.summary(model);
    if args.json {
        let plan = plan.local().summary();
        return print_json(&WorldSummary { plan, ranks });
    }
    print(&format!("{}{ranks}", plan.local()))?;
    let notes: String = plan
        .explain()
        .iter()
        .map(|note| format!("note {note}\n"))
        .collect();
    print(&notes)
}

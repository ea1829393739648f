//! `fusestep plan`: what a step would launch, without running it.

use std::path::PathBuf;

use clap::Args;

use crate::gradients::GradientArgs;
use crate::inputs::read_model;
use crate::options::{ParamDType, PlanningArgs, PrecisionArgs};
use crate::output::{print, print_json, write_page};
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
    let plan = args.gradients.passes(planner).plan(&model.params)?;
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

//! `fusestep plan`: what a step would launch, without running it.

use std::path::PathBuf;

use clap::Args;
use fusestep::StepOptions;
use fusestep_planner::{PlanSummary, RankSummary, Topology};
use fusestep_tensor::{DType, Quoted};
use serde::Serialize;

use crate::config::ConfigArgs;
use crate::figures::FiguresArgs;
use crate::given_model::read_given;
use crate::options::param_dtype;
use crate::output::{detail, note, print, print_json, write_page};
use crate::places::{require_apart, require_folder};
use crate::planning::{chosen, planner_of};
use crate::ranks::WorldArgs;
use crate::rules::OptimizerArgs;
use crate::settings::{self, Settings};

/// Flags of `plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A model (.safetensors, or the .safetensors.index.json of several files), or its shapes
    /// (.json: [{"name": "fc.weight", "shape": [10, 64]}, …] or {"fc.weight": [10, 64], …})
    model: PathBuf,
    #[command(flatten)]
    optimizer: OptimizerArgs,
    /// Element type of shapes that state none [default: f32]
    #[arg(long, value_parser = param_dtype())]
    dtype: Option<DType>,
    #[command(flatten)]
    settings: Settings<settings::Plan>,
    #[command(flatten)]
    world: WorldArgs,
    #[command(flatten)]
    figures: FiguresArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Print the plan's numbers as one JSON object
    #[arg(long)]
    json: bool,
    /// Write the plan as a page, drawn to scale
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the launches as a picture, drawn to scale
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let written = [("--html", args.html.as_ref()), ("--svg", args.svg.as_ref())];
    require_apart(("the model", Some(&args.model)), &written)?;
    for (flag, path) in written {
        path.map_or(Ok(()), |path| require_folder(flag, path))?;
    }
    let mut model = read_given(&args.model, args.dtype)?;
    args.optimizer.check(&args.settings, &model.params)?;
    args.settings.require_several(args.world.world, "--world")?;
    let mut options = args.settings.of_model(args.optimizer.rule()?, &mut model.params)?;
    let topology = args.world.topology()?;
    if topology.world == 1 {
        options = options.of_one();
    }
    let known = args.figures.known()?;
    options.figures = known.figures(args.world.backward_ms * 1e-3);
    let of_ranks = args.world.world.is_some() || args.settings.asks_for_ranks();
    let limits = args.settings.limits();
    let mut chosen = chosen(&options, &model.params, topology, limits)?;
    known.explain(&mut chosen, topology);
    let planner = planner_of(&chosen, &model.params, topology, limits)?;
    let plan = planner.plan_for(&model.params, topology)?;
    if !model.buffers.is_empty() {
        let (count, more) = match model.buffers.len() {
            1 => ("1 tensor is".to_owned(), ""),
            count => (format!("{count} tensors are"), ", …"),
        };
        note(&format!(
            "note: {count} not floating point and so no parameters: {}{more}",
            Quoted(&model.buffers[0])
        ));
    }
    for param in &model.params {
        detail(&format!("{}: {} {}", Quoted(&param.name), param.dtype, param.shape));
    }
    let costs = of_ranks.then(|| args.world.cost_model(&options, &chosen)).transpose()?;
    if let Some(path) = &args.html {
        let page = costs.map_or_else(|| plan.to_html(), |costs| plan.ranks_to_html(&costs));
        write_page(path, &page)?;
    }
    if let Some(path) = &args.svg {
        write_page(path, &plan.to_svg())?;
    }
    let mut ranks = costs.map(|costs| plan.rank_summary(costs));
    if args.json {
        let plan = plan.summary();
        return print_json(&Summary { plan, ranks });
    }
    if let Some(ranks) = ranks.as_mut().filter(|_| is_cap_chosen(&options, topology)) {
        // The plan's notes say what was chosen in place of this proposal.
        ranks.proposed_bucket_cap_bytes = 0;
    }
    let ranks = ranks.map_or(String::new(), |ranks| ranks.to_string());
    print(&format!("{plan}{ranks}"))
}

/// Whether figures have decided how long buckets are.
fn is_cap_chosen(options: &StepOptions, topology: Topology) -> bool {
    let figures = options.figures.as_ref().filter(|_| options.bucket_cap_mib.is_none());
    figures.is_some_and(|figures| figures.world(topology).is_some())
}

/// The result that `--json` prints: the numbers of rank 0's own launches, and the numbers of the
/// calls between ranks where there are several.
#[derive(Debug, Serialize)]
struct Summary {
    #[serde(flatten)]
    plan: PlanSummary,
    #[serde(flatten)]
    ranks: Option<RankSummary>,
}

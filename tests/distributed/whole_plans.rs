//! Whole plans of ranks as text: totals, notes, stages, calls and cost, one file a plan in
//! `golden/plans`, and the plans' hashes.

use std::fmt::Write;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::Path;

use fusestep_collective::Link;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{
    ClipByGlobalNorm, CostModel, Distributed, FuseAllReduce, FuseBroadcast, FuseReduceIntoUpdate,
    GradientAccumulation, LocalSgd, LossScaling, Optimizer, Oversize, Ownership, Plan, Planner,
    Reach, ReducedWhen, Schedule, Shard, TableKind, Topology, UpdateInBackward, UpdateNorms,
    ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

use crate::stages::text_of as stage_text;

/// Environment variable that has the files written anew instead of compared.
const BLESS: &str = "FUSESTEP_BLESS";

const CAP_BYTES: u64 = 100_000;

/// Two layers, a tensor of bf16, one of a single element and one without any.
fn params() -> Vec<ParamDesc> {
    let tensors = [
        ("embed.weight", 70_001, DType::F32),
        ("layer0.weight", 20_000, DType::F32),
        ("layer0.bias", 64, DType::F32),
        ("layer1.weight", 131_072, DType::BF16),
        ("layer1.bias", 1, DType::F32),
        ("head.weight", 5_000, DType::F32),
        ("head.bias", 0, DType::F32),
    ];
    let describe = |(name, numel, dtype): (&str, u64, DType)| {
        let mut param = ParamDesc::new(name, Shape::new([numel]).unwrap(), dtype);
        if name.ends_with("bias") {
            param.weight_decay = Some(0.0);
        }
        param
    };
    tensors.map(describe).to_vec()
}

fn adam() -> Planner {
    Planner::new(Adam::default().into())
}

fn bucketed(planner: Planner) -> Planner {
    planner.with(FuseAllReduce::of_bytes(CAP_BYTES).oversize(Oversize::Split))
}

fn group(planner: Planner, zero: ZeroStage, ranks: usize) -> Planner {
    planner.with(Shard::new(zero).group(NonZeroUsize::new(ranks).unwrap()))
}

fn accumulated(planner: Planner, reduced: ReducedWhen) -> Planner {
    let every = NonZeroU32::new(4).unwrap();
    planner.with(GradientAccumulation::every(every).reduced(reduced))
}

fn local(planner: Planner) -> Planner {
    planner.with(LocalSgd::every(NonZeroU64::new(8).unwrap()))
}

fn masters() -> Precision {
    Precision { master: Master::F32, ..Precision::default() }
}

struct Whole {
    name: &'static str,
    planner: Planner,
    topology: Topology,
}

fn calls_of(world: usize) -> Topology {
    Topology::new(1, world).unwrap()
}

fn shared_of(world: usize) -> Topology {
    Topology { reach: Reach::SharedMemory, ..calls_of(world) }
}

fn whole(name: &'static str, planner: Planner, topology: Topology) -> Whole {
    Whole { name, planner, topology }
}

fn plans() -> Vec<Whole> {
    let mut plans = plans_of_adam();
    plans.extend(plans_of_other_updates());
    plans
}

fn plans_of_adam() -> Vec<Whole> {
    let sgd: Optimizer = Sgd { momentum: 0.9, ..Sgd::default() }.into();
    vec![
        whole("ranks_naive", adam().naive(), calls_of(2)),
        whole("ranks_zero_0", bucketed(adam()), calls_of(4)),
        whole(
            "ranks_zero_1_fused",
            bucketed(adam()).with(Shard::new(ZeroStage::One)).with(FuseReduceIntoUpdate),
            shared_of(2),
        ),
        whole(
            "ranks_zero_2_clip_accumulate",
            accumulated(bucketed(adam()), ReducedWhen::PerMicroStep)
                .precision_of(DType::BF16, masters())
                .with(Shard::new(ZeroStage::Two))
                .with(ClipByGlobalNorm::new(1.0))
                .with(LossScaling::dynamic()),
            calls_of(4),
        ),
        whole(
            "ranks_zero_3_groups",
            accumulated(bucketed(adam()), ReducedWhen::PerWindow)
                .group(["layer0.bias", "layer1.bias"], sgd)
                .with(Shard::new(ZeroStage::Three))
                .schedule(Schedule::warmup(10).then(Schedule::cosine(90))),
            calls_of(3),
        ),
        whole("ranks_shard_groups", group(bucketed(adam()), ZeroStage::Two, 2), calls_of(4)),
        whole(
            "ranks_whole_tensors",
            bucketed(adam())
                .with(Shard::new(ZeroStage::One).ownership(Ownership::Tensors))
                .with(FuseBroadcast::of_bytes(CAP_BYTES)),
            calls_of(3),
        ),
    ]
}

fn plans_of_other_updates() -> Vec<Whole> {
    let lars: Optimizer = Lars::default().into();
    let lamb: Optimizer = Lamb::default().into();
    vec![
        whole(
            "ranks_local_sgd",
            local(adam()).with(ClipByGlobalNorm::new(1.0)).precision_of(DType::BF16, masters()),
            calls_of(4),
        ),
        whole(
            "ranks_local_sgd_adaptive",
            adam().with(LocalSgd::every(NonZeroU64::new(2).unwrap()).adaptive()),
            calls_of(2),
        ),
        whole(
            "ranks_in_backward",
            bucketed(adam()).with(FuseReduceIntoUpdate).with(UpdateInBackward::default()),
            shared_of(2),
        ),
        whole(
            "ranks_lars_zero_2",
            bucketed(Planner::new(lars)).with(Shard::new(ZeroStage::Two)),
            calls_of(4),
        ),
        whole(
            "ranks_lamb_distributed",
            bucketed(Planner::new(lamb))
                .with(Distributed::params(["layer0.weight", "layer1.weight"]))
                .with(ClipByGlobalNorm::new(1.0))
                .with(UpdateNorms),
            calls_of(2),
        ),
        whole(
            "ranks_resident_tables",
            bucketed(adam()).table(TableKind::Resident).with(LossScaling::fixed(1024.0)),
            calls_of(2),
        ),
    ]
}

/// A plan with what the command line prints, its stages and its calls.
fn text_of(plan: &Plan) -> String {
    let model = CostModel {
        memory_bytes_per_second: Some(1e10),
        backward_seconds: 1e-3,
        streams: 2,
        ..CostModel::from(Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 })
    };
    let mut text = format!("{plan}{}", plan.rank_summary(model));
    let _ = writeln!(text, "stages:");
    for stage in plan.stages() {
        let _ = writeln!(text, "  {:?}: {}", plan.when(stage), stage_text(plan, stage));
    }
    let _ = writeln!(text, "calls:");
    for call in plan.calls() {
        let bucket = call.bucket.map_or(String::new(), |bucket| format!(" of bucket {bucket}"));
        let _ = writeln!(
            text,
            "  {:?}: {}{bucket}, {} bytes, {} sent, {} times, every {}",
            call.what, call.operation, call.len_bytes, call.bytes_sent, call.times, call.every
        );
    }
    let _ = writeln!(text, "hash: {:016x}", plan.hash());
    text
}

#[test]
fn whole_plans_of_ranks_print_as_written_down() {
    let bless = std::env::var_os(BLESS).is_some();
    for Whole { name, planner, topology } in plans() {
        let plan = planner.plan_for(&params(), topology);
        let plan = plan.unwrap_or_else(|error| panic!("{name}: {error}"));
        let found = text_of(&plan);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/plans");
        let path = folder.join(format!("{name}.txt"));
        if bless {
            std::fs::write(&path, &found).unwrap();
        }
        let expected =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(
            found == expected,
            "{name} prints otherwise; if that is meant, run again with {BLESS}=1\n\
             expected:\n{expected}\nfound:\n{found}"
        );
    }
}

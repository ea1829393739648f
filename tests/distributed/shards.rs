//! Where parts of ranks end, and how even they are.

use fusestep_collective::Link;
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_planner::{
    Bucket, ClipByGlobalNorm, FuseAllReduce, Optimizer, Ownership, Plan, Planner, RankBytes, Shard,
    Topology, UpdateNorms, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

use crate::run::noise;

/// The parameters of `data/shapes/<model>.json`.
fn model(model: &str) -> Vec<ParamDesc> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/shapes");
    let text = std::fs::read_to_string(format!("{folder}/{model}.json")).unwrap();
    let list: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let describe = |entry: &serde_json::Value| {
        let shape: Shape = serde_json::from_value(entry["shape"].clone()).unwrap();
        ParamDesc::new(entry["name"].as_str().unwrap(), shape, DType::F32)
    };
    list.iter().map(describe).collect()
}

fn worst_over_mean(plan: &Plan, of: fn(&RankBytes) -> u64) -> f64 {
    let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 };
    let summary = plan.rank_summary(link);
    of(&summary.worst_rank) as f64 / of(&summary.mean_rank) as f64
}

#[test]
fn layerwise_rules_share_known_models_out_evenly() {
    for name in ["gpt2", "resnet50"] {
        let params = model(name);
        for rule in [Optimizer::from(Lars::default()), Lamb::default().into()] {
            for world in [8, 64] {
                for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                    let planner =
                        Planner::new(rule).with(FuseAllReduce::default()).with(Shard::new(zero));
                    let plan = planner.plan_for(&params, Topology::new(0, world).unwrap());
                    let plan = plan.unwrap();
                    let text = format!("{name} {} {world} {zero:?}", rule.name());
                    let state = worst_over_mean(&plan, |bytes| bytes.state_bytes);
                    let memory = worst_over_mean(&plan, |bytes| bytes.memory_bytes);
                    assert!((1.0..=1.1).contains(&state), "{text}: {state}");
                    assert!((1.0..=1.1).contains(&memory), "{text}: {memory}");
                }
            }
        }
    }
}

#[test]
fn the_worst_rank_of_a_summary_is_that_of_all_plans() {
    let params = model("resnet50");
    for zero in [ZeroStage::One, ZeroStage::Three] {
        let planner = Planner::new(Lamb::default().into())
            .with(FuseAllReduce::default())
            .with(Shard::new(zero));
        let plan = |rank| {
            let topology = Topology::new(rank, 8).unwrap();
            planner.plan_for(&params, topology).unwrap()
        };
        let plans: Vec<Plan> = (0..8).map(plan).collect();
        let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 };
        let summary = plans[3].rank_summary(link);
        let memory = plans.iter().map(Plan::memory_bytes);
        assert_eq!(Some(summary.worst_rank.memory_bytes), memory.clone().max());
        assert_eq!(summary.mean_rank.memory_bytes, memory.sum::<u64>() / 8);
        let state = plans.iter().map(Plan::state_bytes);
        assert_eq!(summary.mean_rank.state_bytes, state.sum::<u64>() / 8);
        assert_eq!(summary.memory_bytes_per_rank, plans[3].memory_bytes());
    }
}

/// Where a pass asks parts to end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asked {
    Nothing,
    Clipped,
    Measured,
    Tensors,
}

/// Whether parts may end at an element of a storage.
fn may_end(plan: &Plan, bucket: &Bucket, at: u64, asked: Asked) -> bool {
    let layout = &plan.storages()[bucket.storage].layout;
    let offsets = layout.offsets();
    if at == bucket.elements.start || at == bucket.elements.end || offsets.contains(&at) {
        return true;
    }
    let start = offsets[offsets.partition_point(|&offset| offset <= at) - 1];
    match asked {
        Asked::Nothing => true,
        Asked::Clipped => (at - start).is_multiple_of(1_024),
        Asked::Measured => (at - start).is_multiple_of(65_536),
        Asked::Tensors => false,
    }
}

fn random_numels(seed: u64) -> Vec<u64> {
    let random = |at: u64, most: f32| {
        let unit = (noise([seed, at, 3]) + 1.0) / 2.0;
        (unit * most) as u64
    };
    let most = [1.0, 300.0, 5_000.0, 300_000.0];
    (0..1 + random(0, 12.0))
        .map(|at| random(2 * at + 1, most[random(2 * at + 2, 3.99) as usize]))
        .collect()
}

#[test]
fn parts_cover_every_bucket_and_end_where_sums_may_be_taken_apart() {
    for seed in 0..60 {
        let numels = random_numels(seed).into_iter().enumerate();
        let params: Vec<ParamDesc> = numels
            .map(|(at, numel)| {
                let shape = Shape::new([numel]).unwrap();
                ParamDesc::new(format!("layer.{at}"), shape, DType::F32)
            })
            .collect();
        for asked in [Asked::Nothing, Asked::Clipped, Asked::Measured, Asked::Tensors] {
            let world = 2 + (seed as usize % 7);
            let planner = Planner::new(Adam::default().into())
                .with(FuseAllReduce::of_bytes(1 << (10 + seed % 12)));
            let shard = Shard::new(ZeroStage::Two);
            let planner = match asked {
                Asked::Nothing => planner.with(shard),
                Asked::Clipped => planner.with(shard).with(ClipByGlobalNorm::new(1.0)),
                Asked::Measured => planner.with(shard).with(UpdateNorms),
                Asked::Tensors => planner.with(shard.ownership(Ownership::Tensors)),
            };
            let plan = planner.plan_for(&params, Topology::new(1, world).unwrap());
            let plan = plan.unwrap();
            let mut end = 0;
            for bucket in plan.buckets() {
                assert_eq!((bucket.storage, bucket.elements.start), (0, end));
                end = bucket.elements.end;
                assert_eq!(bucket.bounds.len(), world + 1);
                assert_eq!(bucket.bounds[0], bucket.elements.start);
                assert_eq!(bucket.bounds[world], bucket.elements.end);
                assert!(bucket.bounds.is_sorted());
                for &bound in &bucket.bounds {
                    let fits = may_end(&plan, bucket, bound, asked);
                    assert!(fits, "{seed} {asked:?}: {bound} in {bucket:?}");
                }
            }
            let total = plan.storages().iter().map(|spec| spec.layout.total_numel());
            assert_eq!(end, total.sum::<u64>(), "{seed} {asked:?}");
        }
    }
}

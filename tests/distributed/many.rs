//! Plans of many tensors for many ranks.

use std::time::Instant;

use fusestep_collective::Link;
use fusestep_fused_adam::Adam;
use fusestep_planner::{FuseAllReduce, MAX_WORLD, Planner, Shard, Topology, ZeroStage};
use fusestep_tensor::{DType, ParamDesc, Shape};

#[test]
fn as_many_tensors_as_are_named_are_planned_for_many_ranks_in_seconds() {
    let param = |at| ParamDesc::new(format!("p{at}"), Shape::new([7]).unwrap(), DType::F32);
    let params: Vec<ParamDesc> = (0..40_000).map(param).collect();
    let of = |world| Topology::new(0, world).unwrap();
    // One bucket for each tensor would be too many for so many ranks; fused there is one.
    let planner = || Planner::new(Adam::default().into());
    let fused = planner().with(FuseAllReduce::default());
    let fused = fused.plan_for(&params, of(MAX_WORLD)).unwrap();
    assert_eq!(fused.buckets().len(), 1);
    let naive = planner().naive().with(Shard::new(ZeroStage::One));
    let refused = naive.plan_for(&params, of(MAX_WORLD)).unwrap_err();
    assert!(refused.to_string().contains("or fuse them"), "{refused}");
    // Storages and buckets are gone through side by side, not each for each.
    let start = Instant::now();
    let plan = naive.plan_for(&params, of(2)).unwrap();
    let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e10 };
    assert_eq!(plan.rank_summary(link).buckets, params.len());
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

//! Plans of ranks as values: buckets, shards, promises.

use std::time::Instant;

use fusestep_collective::Link;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Bucket, CostModel, EventKind, FuseAllReduce, FuseBroadcast, GradientAccumulation, Note,
    Oversize, Ownership, Plan, Planner, Shard, Topology, ZeroStage, groups_by_layer,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

fn params(shapes: &[(&str, u64, DType)]) -> Vec<ParamDesc> {
    let describe = |&(name, numel, dtype): &(&str, u64, DType)| {
        ParamDesc::new(name, Shape::new([numel]).unwrap(), dtype)
    };
    shapes.iter().map(describe).collect()
}

fn plan(params: &[ParamDesc], fuse: FuseAllReduce, world: usize) -> Plan {
    let planner = Planner::new(Adam::default().into()).with(fuse);
    planner
        .plan_for(params, Topology::new(0, world).unwrap())
        .unwrap()
}

fn numels(plan: &Plan) -> Vec<Vec<(u32, u64, u64)>> {
    let spans = |bucket: &Bucket| {
        let spans = bucket.spans.iter();
        spans
            .map(|span| (span.param, span.first, span.numel))
            .collect()
    };
    plan.buckets().iter().map(spans).collect()
}

#[test]
fn caps_are_exact_in_bytes_and_in_count() {
    let f32s = [
        ("a", 20, DType::F32),
        ("b", 10, DType::F32),
        ("c", 5, DType::F32),
        ("d", 40, DType::F32),
        ("e", 1, DType::F32),
    ];
    let params = params(&f32s);
    let found = numels(&plan(&params, FuseAllReduce::of_bytes(4 * 15), 2));
    // From the plan's end; `d` is cut at exactly the cap, and its rest has room for `c`.
    assert_eq!(
        found,
        [
            vec![(4, 0, 1)],
            vec![(3, 0, 15)],
            vec![(3, 15, 15)],
            vec![(2, 0, 5), (3, 30, 10)],
            vec![(1, 0, 10)],
            vec![(0, 0, 15)],
            vec![(0, 15, 5)],
        ]
    );
    let alone = FuseAllReduce::of_bytes(4 * 32)
        .oversize(Oversize::Alone)
        .ready_order(vec![0, 1, 2, 3, 4]);
    let found = numels(&plan(&params, alone, 2));
    assert_eq!(
        found,
        [
            vec![(0, 0, 20), (1, 0, 10)],
            vec![(2, 0, 5)],
            vec![(3, 0, 40)],
            vec![(4, 0, 1)]
        ]
    );
    let exact = numels(&plan(&params, FuseAllReduce::of_bytes(4 * 76), 2));
    assert_eq!(exact.len(), 1);
    let count = numels(&plan(&params, FuseAllReduce::default().cap_count(2), 2));
    assert_eq!(count.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 1]);
}

#[test]
fn layers_are_grouped_as_the_reference_groups_them() {
    let mib = 1 << 18;
    let params = params(&[
        ("a.w", 4 * mib, DType::F32),
        ("a.b", 1, DType::F32),
        ("b.w", 2 * mib, DType::F32),
        ("c", 8 * mib, DType::F32),
        ("b.b", 1, DType::F32),
        ("d.w", mib, DType::F16),
        ("d.b", mib, DType::F32),
    ]);
    let order: Vec<u32> = (0..7).collect();
    let groups = |mib, most| groups_by_layer(&params, &order, mib, most);
    let layers: Vec<Vec<u32>> = vec![vec![0, 1], vec![2, 4], vec![3], vec![5], vec![6]];
    assert_eq!(groups(-1.0, 1), layers);
    assert_eq!(groups(-1.0, 50), layers);
    assert_eq!(groups(1e-6, 1), layers);
    // All in order of names, then split by dtype.
    assert_eq!(groups(0.0, 1), [vec![1, 0, 4, 2, 3, 6], vec![5]]);
    // Soft limits: 4 MiB of `a`, 2 of `b` and 8 of `c` together pass 5 MiB only with `b`.
    assert_eq!(
        groups(5.0, 1),
        [vec![0, 1, 2, 4], vec![3], vec![5], vec![6]]
    );
    assert_eq!(groups(32.0, 3), [vec![0, 1, 2, 4], vec![3, 6], vec![5]]);
    assert_eq!(groups(32.0, 50), [vec![0, 1, 2, 4, 3, 6], vec![5]]);
    let buckets = plan(&params, FuseAllReduce::by_layer(5.0, 1), 2);
    assert_eq!(buckets.buckets().len(), 4);
}

#[test]
fn updated_parameters_come_in_one_call_for_each_owner_and_cap() {
    let mib = 1 << 18;
    let params = params(&[
        ("a", 20 * mib, DType::F32),
        ("b", 10 * mib, DType::F32),
        ("c", 5 * mib, DType::F32),
        ("d", 40 * mib, DType::F32),
        ("e", mib, DType::F32),
        ("h", 3, DType::F16),
    ]);
    let planner = |zero, ownership, cap_mib: u64| {
        Planner::new(Adam::default().into())
            .with(FuseBroadcast::of_bytes(cap_mib << 20))
            .with(Shard::new(zero).ownership(ownership))
    };
    let groups = |planner: &Planner, world| -> Vec<(usize, Vec<u32>)> {
        let plan = planner.plan_for(&params, Topology::new(0, world).unwrap());
        let groups = plan.unwrap().broadcasts().to_vec();
        let found = groups.into_iter().map(|group| (group.owner, group.params));
        found.collect()
    };
    // A part of 38 MiB each: `c` starts below it, `d` not; an owner's groups hold at most the cap, or one longer tensor.
    let whole = planner(ZeroStage::Two, Ownership::UseOrder, 32);
    assert_eq!(
        groups(&whole, 2),
        [
            (0, vec![0, 1]),
            (0, vec![2]),
            (0, vec![3]),
            (1, vec![4]),
            (0, vec![5]),
        ]
    );
    // 20 and 10 MiB are exactly 30.
    let exact = planner(ZeroStage::One, Ownership::UseOrder, 30);
    assert_eq!(groups(&exact, 2)[0], (0, vec![0, 1]));
    let small = planner(ZeroStage::One, Ownership::UseOrder, 29);
    assert_eq!(groups(&small, 2)[..2], [(0, vec![0]), (0, vec![1, 2])]);
    for (planner, world, why) in [
        (
            planner(ZeroStage::One, Ownership::Elements, 32),
            2,
            "one all-gather",
        ),
        (
            planner(ZeroStage::Three, Ownership::UseOrder, 32),
            2,
            "in their shards",
        ),
        (
            planner(ZeroStage::None, Ownership::UseOrder, 32),
            2,
            "itself",
        ),
        (
            planner(ZeroStage::Two, Ownership::UseOrder, 32),
            1,
            "nobody",
        ),
    ] {
        let plan = planner
            .plan_for(&params, Topology::new(0, world).unwrap())
            .unwrap();
        assert!(plan.broadcasts().is_empty());
        let refused = |note: &Note| note.pass == "fuse_broadcast" && note.reason.contains(why);
        assert!(plan.explain().iter().any(refused), "{why}");
    }
}

#[test]
fn ranks_agree_on_the_plan_and_hold_their_share_of_the_state() {
    let params = params(&[
        ("a", 10_007, DType::F32),
        ("b", 3, DType::F32),
        ("c", 60_000, DType::F32),
    ]);
    for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        for world in [1usize, 2, 3, 4, 7] {
            let planner = Planner::new(Adam::default().into())
                .with(FuseAllReduce::default())
                .with(Shard::new(zero));
            let plans: Vec<Plan> = (0..world)
                .map(|rank| {
                    planner
                        .plan_for(&params, Topology::new(rank, world).unwrap())
                        .unwrap()
                })
                .collect();
            assert!(plans.iter().all(|plan| plan.hash() == plans[0].hash()));
            for plan in &plans {
                // Two moments of 4 bytes, and a slot's padding for each piece and moment.
                let share = 8 * 70_010u64.div_ceil(world as u64);
                assert!(
                    plan.state_bytes() >= share - 8 && plan.state_bytes() <= share + 3 * 2 * 256
                );
            }
        }
    }
}

#[test]
fn calls_are_hidden_behind_a_backward_pass_and_drawn() {
    let params = params(&[("a", 1 << 20, DType::F32), ("b", 3 << 20, DType::F32)]);
    let plan = plan(&params, FuseAllReduce::of_bytes(1 << 20), 2);
    let link = Link {
        alpha_seconds: 1e-5,
        beta_bytes_per_second: 1e9,
    };
    let model = |rings| CostModel {
        backward_seconds: 0.1,
        rings,
        ..CostModel::from(link)
    };
    let [after, beside, two] = [0, 1, 2].map(|rings| plan.summary(model(rings)));
    // 16 calls of 1 MiB: latency and bytes of all of them, or of the last.
    let call = 1e-5 + f64::from(1 << 20) / 1e9;
    assert!(
        (after.exposed_ns / 1e9 - 16.0 * call).abs() < 1e-9,
        "{after:?}"
    );
    assert!((beside.exposed_ns / 1e9 - call).abs() < 1e-9, "{beside:?}");
    assert!(two.exposed_ns <= beside.exposed_ns * 1.000_001);
    assert!((after.predicted_step_ns - after.exposed_ns - 1e8).abs() < 1.0);
    assert_eq!(after.messages, 2 * 16);
    // √(16 MiB · 10 µs · 1 GB/s)
    assert_eq!(after.proposed_bucket_cap_bytes, 409_600);
    let timeline = plan.timeline(&model(1));
    let reduces = timeline
        .iter()
        .filter(|event| event.kind == EventKind::Reduce);
    assert_eq!(reduces.clone().count(), 16);
    assert!(
        reduces
            .clone()
            .zip(reduces.skip(1))
            .all(|(a, b)| a.end <= b.start + 1e-12)
    );
    let page = plan.to_html(&model(1));
    assert!(page.matches("<rect").count() >= 17 && page.contains("bucket 15"));
}

#[test]
fn a_ranks_own_copies_and_its_update_take_as_long_as_their_bytes() {
    // 2 Mi elements in one bucket; SGD without momentum reads two tensors and writes one.
    let params = params(&[("a", 1 << 20, DType::F32), ("b", 1 << 20, DType::F32)]);
    let rule = Sgd {
        momentum: 0.0,
        ..Sgd::default()
    };
    let bytes = f64::from(8 << 20);
    let link = |beta_bytes_per_second| Link {
        alpha_seconds: 0.0,
        beta_bytes_per_second,
    };
    let model = CostModel {
        scatter: Some(link(4e9)),
        gather: Some(link(5e9)),
        memory_bytes_per_second: Some(1e10),
        ..CostModel::from(link(1e9))
    };
    let plan = |zero, merge: u32| {
        let planner = Planner::new(rule.into()).with(FuseAllReduce::of_bytes(1 << 30));
        let planner = match merge {
            1 => planner,
            _ => planner.with(GradientAccumulation::every(merge.try_into().unwrap())),
        };
        let planner = match zero {
            ZeroStage::None => planner,
            zero => planner.with(Shard::new(zero)),
        };
        let topology = Topology::new(1, 2).unwrap();
        planner.plan_for(&params, topology).unwrap()
    };
    let near = |found: f64, expected: f64| {
        let expected = expected * bytes * 1e9;
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
    };
    // Into the bucket, out of it and to the update: a copy each. Then three passes of the update.
    let whole = plan(ZeroStage::None, 1).summary(model);
    near(whole.local_ns, (2.0 + 4.0 + 3.0) / 1e10);
    near(whole.exposed_ns, 1.0 / 1e9);
    near(whole.predicted_step_ns, 9.0 / 1e10 + 1.0 / 1e9);
    // Half of all that but the first, and half of the parameters into the replica; other calls.
    let shared = plan(ZeroStage::Two, 1).summary(model);
    near(shared.local_ns, (2.0 + 2.0 + 1.5 + 1.0) / 1e10);
    near(shared.exposed_ns, 1.0 / 4e9 + 1.0 / 5e9);
    // Two more passes of three, and a division.
    let merged = plan(ZeroStage::None, 3).summary(model);
    near(merged.local_ns, (2.0 + 3.0 + 5.0 + 4.0 + 3.0) / 1e10);
    let timeline = plan(ZeroStage::Two, 1).timeline(&model);
    let kinds: Vec<EventKind> = timeline.iter().map(|event| event.kind).collect();
    assert_eq!(
        kinds,
        [
            EventKind::Backward,
            EventKind::Reduce,
            EventKind::Update,
            EventKind::Gather
        ]
    );
    let without = plan(ZeroStage::None, 1).summary(link(1e9));
    assert_eq!(without.local_ns, 0.0);
    near(without.predicted_step_ns, 1.0 / 1e9);
}

#[test]
fn buckets_that_were_given_back_are_allocated_anew_and_fewer_with_streams() {
    let params = params(&[("a", 1 << 20, DType::F32), ("b", 1 << 20, DType::F32)]);
    let plan = |zero| {
        let planner = Planner::new(Sgd::default().into()).with(FuseAllReduce::of_bytes(1 << 20));
        let planner = match zero {
            ZeroStage::None => planner,
            zero => planner.with(Shard::new(zero)),
        };
        let topology = Topology::new(1, 2).unwrap();
        planner.plan_for(&params, topology).unwrap()
    };
    let shared = plan(ZeroStage::Two);
    let anew = [0, 1, 2].map(|rings| shared.fresh_bytes(0, rings));
    assert_eq!(anew, [8 << 20, 2 << 20, 3 << 20]);
    let model = CostModel::from(Link {
        alpha_seconds: 0.0,
        beta_bytes_per_second: 1e9,
    });
    let fresh = CostModel {
        fresh_bytes_per_second: Some(2e9),
        ..model
    };
    let expected = f64::from(8 << 20) / 2e9 * 1e9;
    let found = shared.summary(fresh).local_ns - shared.summary(model).local_ns;
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
    let whole = plan(ZeroStage::None);
    assert_eq!(whole.summary(fresh), whole.summary(model));
}

#[test]
fn predicted_memory_is_what_a_state_holds_per_stage() {
    let params = params(&[("a", 100_000, DType::F32), ("b", 20_000, DType::F32)]);
    let memory = |zero: ZeroStage| {
        let planner = Planner::new(Adam::default().into())
            .with(FuseAllReduce::default())
            .with(Shard::new(zero));
        let plan = planner.plan_for(&params, Topology::new(0, 4).unwrap());
        plan.unwrap().memory_bytes()
    };
    let bytes = 480_000;
    let near = |found: u64, expected: u64| assert!(found.abs_diff(expected) < 4 * 512, "{found}");
    // Parameter, gradient, two moments, buckets, and the reduced gradients.
    near(memory(ZeroStage::None), 6 * bytes);
    near(memory(ZeroStage::One), 5 * bytes / 4 + 2 * bytes);
    // A quarter of parameter, gradient, moments and reduced gradients, no buckets; up to stage 2 whole parameters.
    near(memory(ZeroStage::Two), 5 * bytes / 4 + bytes);
    near(memory(ZeroStage::Three), 5 * bytes / 4);
}

#[test]
fn a_world_of_one_is_told_that_it_has_nothing_to_reduce() {
    let params = params(&[("a", 5, DType::F32)]);
    let plan = plan(&params, FuseAllReduce::default(), 1);
    let link = Link {
        alpha_seconds: 1e-5,
        beta_bytes_per_second: 1e9,
    };
    let summary = plan.summary(link);
    assert_eq!((summary.collectives, summary.bytes_on_wire), (0, 0));
    assert!(
        plan.explain()
            .iter()
            .any(|note| note.reason.contains("nothing to reduce"))
    );
}

#[test]
fn a_model_of_7_billion_on_1024_ranks_is_planned_within_a_second() {
    let mut shapes = vec![("embedding".to_owned(), 32_000 * 4_096)];
    for layer in 0..32 {
        for (name, numel) in [
            ("q", 1 << 24),
            ("k", 1 << 24),
            ("v", 1 << 24),
            ("o", 1 << 24),
            ("up", 45_088_768),
            ("gate", 45_088_768),
            ("down", 45_088_768),
            ("norm", 4_096),
        ] {
            shapes.push((format!("layer{layer}.{name}"), numel));
        }
    }
    let params: Vec<ParamDesc> = shapes
        .into_iter()
        .map(|(name, numel)| ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::BF16))
        .collect();
    let start = Instant::now();
    let planner = Planner::new(Adam::default().into())
        .with(FuseAllReduce::default())
        .with(Shard::new(ZeroStage::Three));
    let plan = planner
        .plan_for(&params, Topology::new(0, 1024).unwrap())
        .unwrap();
    let link = Link {
        alpha_seconds: 1e-5,
        beta_bytes_per_second: 1e10,
    };
    assert!(plan.summary(link).collectives > 100);
    assert!(start.elapsed().as_millis() < 1_000, "{:?}", start.elapsed());
}

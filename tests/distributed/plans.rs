//! Plans of ranks as values: buckets, shards, promises.

use std::time::Instant;

use fusestep_collective::Link;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    ClipByGlobalNorm, CostModel, EventKind, FuseAllReduce, FuseBroadcast, GradientAccumulation,
    Note, Oversize, Ownership, Plan, Planner, Shard, Stage, Topology, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

fn params(shapes: &[(&str, u64, DType)]) -> Vec<ParamDesc> {
    let describe = |&(name, numel, dtype): &(&str, u64, DType)| {
        ParamDesc::new(name, Shape::new([numel]).unwrap(), dtype)
    };
    shapes.iter().map(describe).collect()
}

fn planner(fuse: FuseAllReduce) -> Planner {
    Planner::new(Adam::default().into()).with(fuse)
}

fn plan(params: &[ParamDesc], fuse: FuseAllReduce, world: usize) -> Plan {
    let topology = Topology::new(0, world).unwrap();
    planner(fuse).plan_for(params, topology).unwrap()
}

/// The names in each segment and the elements of each of its buckets, padding included.
fn buckets(plan: &Plan) -> Vec<(String, Vec<u64>)> {
    let of_segment = |segment: &fusestep_planner::Segment| {
        let members = &plan.storages()[segment.storage].members;
        let names = segment.tensors.clone().map(|tensor| {
            let param = members[tensor as usize] as usize;
            plan.params()[param].name.as_str()
        });
        let numels = plan.buckets()[segment.buckets.clone()].iter();
        (names.collect(), numels.map(|bucket| bucket.numel()).collect())
    };
    plan.segments().iter().map(of_segment).collect()
}

/// Elements of a slot of f32, and what so many slots take.
const SLOT: u64 = 64;

fn slots(count: u64) -> u64 {
    4 * SLOT * count
}

/// Tensors of 20, 10, 5, 40 and 1 slots; the third does not fill its last one.
fn slotted() -> Vec<ParamDesc> {
    params(&[
        ("a", 20 * SLOT, DType::F32),
        ("b", 10 * SLOT, DType::F32),
        ("c", 5 * SLOT - 3, DType::F32),
        ("d", 40 * SLOT, DType::F32),
        ("e", 1, DType::F32),
    ])
}

#[test]
fn caps_are_exact_in_bytes_with_padding_and_in_count() {
    let params = slotted();
    let found = |fuse| buckets(&plan(&params, fuse, 2));
    let named = |segments: &[(&str, &[u64])]| -> Vec<(String, Vec<u64>)> {
        let segments = segments.iter();
        let numels = |slots: &[u64]| slots.iter().map(|slots| slots * SLOT).collect();
        segments.map(|(names, slots)| ((*names).to_owned(), numels(slots))).collect()
    };
    // From the plan's end; `d` and `a` are cut at exactly the cap, and `c` and `b` are exactly as
    // long.
    assert_eq!(
        found(FuseAllReduce::of_bytes(slots(15))),
        named(&[("e", &[1]), ("d", &[15, 15, 10]), ("cb", &[15]), ("a", &[15, 5])])
    );
    // One byte less, and the padding behind `c` is too much.
    let less = found(FuseAllReduce::of_bytes(slots(15) - 1));
    let names: Vec<&str> = less.iter().map(|(names, _)| names.as_str()).collect();
    assert_eq!(names, ["e", "d", "c", "b", "a"]);
    let alone = FuseAllReduce::of_bytes(slots(32))
        .oversize(Oversize::Alone)
        .ready_order(vec![0, 1, 2, 3, 4]);
    assert_eq!(found(alone), named(&[("ab", &[30]), ("c", &[5]), ("d", &[40]), ("e", &[1])]));
    let all = found(FuseAllReduce::of_bytes(slots(76)));
    assert_eq!(all, named(&[("edcba", &[76])]));
    assert_eq!(found(FuseAllReduce::of_bytes(slots(76) - 1)).len(), 2);
    let count = found(FuseAllReduce::default().cap_count(2));
    assert_eq!(count, named(&[("ed", &[41]), ("cb", &[15]), ("a", &[20])]));
}

#[test]
fn buckets_of_one_tensor_end_with_leaves_where_norms_are_taken() {
    let params = params(&[("a", 5_000, DType::F32), ("b", 700, DType::F32)]);
    let numels = |cap_bytes, clipped: bool| -> Vec<u64> {
        let planner = planner(FuseAllReduce::of_bytes(cap_bytes));
        let planner = if clipped { planner.with(ClipByGlobalNorm::new(1.0)) } else { planner };
        let plan = planner.plan_for(&params, Topology::new(0, 2).unwrap());
        let plan = plan.unwrap();
        plan.buckets().iter().map(|bucket| bucket.numel()).collect()
    };
    // 704 elements of `b`, then `a`: 2,500 at a time, and two leaves of 1,024; a cap below a leaf
    // takes one. 5,000 are 5,056 in slots.
    assert_eq!(numels(10_000, false), [704, 2_500, 2_556]);
    assert_eq!(numels(10_000, true), [704, 2_048, 2_048, 960]);
    assert_eq!(numels(100, true)[1..], [1_024, 1_024, 1_024, 1_024, 960]);
}

/// Owner and names of every broadcast, in order.
fn broadcasts(plan: &Plan) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for stage in plan.stages() {
        let Stage::Gather(gather) = stage else {
            continue;
        };
        let spec = &plan.storages()[plan.buckets()[gather.bucket].storage];
        for call in &gather.broadcasts {
            let inside = |tensor: &usize| call.elements.contains(&spec.layout.offset(*tensor));
            let tensors = (0..spec.members.len()).filter(inside);
            let names = tensors.map(|tensor| {
                let param = spec.members[tensor] as usize;
                plan.params()[param].name.as_str()
            });
            found.push((call.owner, names.collect()));
        }
    }
    found
}

#[test]
fn updated_parameters_come_in_one_call_for_each_owner_bucket_and_cap() {
    let mib = 1 << 18;
    let params = params(&[
        ("a", 20 * mib, DType::F32),
        ("b", 10 * mib, DType::F32),
        ("c", 5 * mib, DType::F32),
        ("d", 40 * mib, DType::F32),
        ("e", mib, DType::F32),
        ("h", 3, DType::F16),
    ]);
    let plan = |zero, ownership, cap_bytes, world| {
        let planner = planner(FuseAllReduce::of_bytes(1 << 30))
            .with(FuseBroadcast::of_bytes(cap_bytes))
            .with(Shard::new(zero).ownership(ownership));
        let plan = planner.plan_for(&params, Topology::new(0, world).unwrap());
        plan.unwrap()
    };
    let groups =
        |cap_bytes: u64| broadcasts(&plan(ZeroStage::One, Ownership::Tensors, cap_bytes, 2));
    let named = |groups: &[(usize, &str)]| -> Vec<(usize, String)> {
        let groups = groups.iter();
        groups.map(|(owner, names)| (*owner, (*names).to_owned())).collect()
    };
    // From the plan's end 76 MiB; half of them lies in `d`, nearer to its end, so rank 0 owns `e`
    // and `d`, 41 MiB. The half of `h` is as near to its start as to its end; rank 1 owns it.
    assert_eq!(groups(32 << 20), named(&[(0, "e"), (0, "d"), (1, "cb"), (1, "a"), (1, "h")]));
    // 5, 10 and 20 MiB are exactly 35.
    assert_eq!(groups(35 << 20), named(&[(0, "e"), (0, "d"), (1, "cba"), (1, "h")]));
    assert_eq!(groups((35 << 20) - 1)[2..], named(&[(1, "cb"), (1, "a"), (1, "h")]));
    assert_eq!(groups(41 << 20), named(&[(0, "ed"), (1, "cba"), (1, "h")]));
    assert_eq!(groups(1).len(), params.len());
    for (zero, ownership, world, why) in [
        (ZeroStage::One, Ownership::Elements, 2, "one all-gather"),
        (ZeroStage::Three, Ownership::Tensors, 2, "in their shards"),
        (ZeroStage::None, Ownership::Tensors, 2, "itself"),
        (ZeroStage::Two, Ownership::Tensors, 1, "nobody"),
    ] {
        let plan = plan(zero, ownership, 32 << 20, world);
        assert!(broadcasts(&plan).is_empty());
        let refused = |note: &Note| note.pass == "fuse_broadcast" && note.reason.contains(why);
        assert!(plan.explain().iter().any(refused), "{why}");
    }
}

#[test]
fn ranks_agree_on_the_plan_and_hold_their_share_of_the_state() {
    let params =
        params(&[("a", 10_007, DType::F32), ("b", 3, DType::F32), ("c", 60_000, DType::F32)]);
    // In slots 10,048, 64 and 60,032 elements, of two moments.
    let all = 8 * 70_144;
    for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        for world in [1usize, 2, 3, 4, 7] {
            let planner = planner(FuseAllReduce::default()).with(Shard::new(zero));
            let plans: Vec<Plan> = (0..world)
                .map(|rank| planner.plan_for(&params, Topology::new(rank, world).unwrap()).unwrap())
                .collect();
            assert!(plans.iter().all(|plan| plan.hash() == plans[0].hash()));
            let bytes = plans.iter().map(Plan::state_bytes);
            assert_eq!(bytes.clone().sum::<u64>(), all);
            // Parts are cut between slots of 64 elements.
            let share = all / world as u64;
            assert!(bytes.clone().all(|bytes| bytes.abs_diff(share) <= 8 * 64));
            let updated = |plan: &Plan| -> u64 {
                let batches = plan.stages().iter().flat_map(|stage| match stage {
                    Stage::Optimize(optimize) => optimize.batches.as_slice(),
                    _ => &[],
                });
                batches.map(|batch| batch.elements()).sum()
            };
            assert_eq!(plans.iter().map(updated).sum::<u64>(), 70_010);
        }
    }
}

#[test]
fn calls_are_hidden_behind_a_backward_pass_and_drawn() {
    let params = params(&[("a", 1 << 20, DType::F32), ("b", 3 << 20, DType::F32)]);
    let plan = plan(&params, FuseAllReduce::of_bytes(1 << 20), 2);
    let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 };
    let model = |streams| CostModel { backward_seconds: 0.1, streams, ..CostModel::from(link) };
    let [after, beside, two] = [0, 1, 2].map(|streams| plan.rank_summary(model(streams)));
    // 16 calls of 1 MiB: latency and bytes of all of them, or of the last.
    let call = 1e-5 + f64::from(1 << 20) / 1e9;
    assert!((after.exposed_ns / 1e9 - 16.0 * call).abs() < 1e-9, "{after:?}");
    assert!((beside.exposed_ns / 1e9 - call).abs() < 1e-9, "{beside:?}");
    assert!(two.exposed_ns <= beside.exposed_ns * 1.000_001);
    assert!((after.predicted_step_ns - after.exposed_ns - 1e8).abs() < 1.0);
    assert_eq!((after.collectives, after.naive_collectives), (16, 2));
    // Which of the two parameters have a gradient: a byte each, and 32 that are to be alike. Each
    // of two ranks sends half of a
    // buffer twice.
    assert_eq!(after.control_calls, 1);
    assert_eq!(after.bytes_on_wire, (16 << 20) + 34);
    // √(16 MiB · 10 µs · 1 GB/s)
    assert_eq!(after.proposed_bucket_cap_bytes, 409_600);
    let timeline = plan.timeline(&model(1));
    let reduces = timeline.iter().filter(|event| event.kind == EventKind::Reduce);
    assert_eq!(reduces.clone().count(), 16);
    assert!(reduces.clone().zip(reduces.skip(1)).all(|(a, b)| a.end <= b.start + 1e-12));
    let page = plan.ranks_to_html(&model(1));
    assert!(page.matches("<rect").count() >= 17 && page.contains("bucket 15"));
}

#[test]
fn an_update_takes_as_long_as_its_bytes() {
    // 2 Mi elements in one bucket; SGD without momentum reads two tensors and writes one.
    let params = params(&[("a", 1 << 20, DType::F32), ("b", 1 << 20, DType::F32)]);
    let rule = Sgd { momentum: 0.0, ..Sgd::default() };
    let bytes = f64::from(8 << 20);
    let link = |beta_bytes_per_second| Link { alpha_seconds: 0.0, beta_bytes_per_second };
    let model = CostModel {
        scatter: Some(link(4e9)),
        gather: Some(link(5e9)),
        memory_bytes_per_second: Some(1e10),
        ..CostModel::from(link(1e9))
    };
    let plan = |zero, merge: u32| {
        let every = GradientAccumulation::every(merge.try_into().unwrap());
        let planner = Planner::new(rule.into())
            .with(FuseAllReduce::of_bytes(1 << 30))
            .with(every)
            .with(Shard::new(zero));
        let topology = Topology::new(1, 2).unwrap();
        planner.plan_for(&params, topology).unwrap()
    };
    let near = |found: f64, expected: f64| {
        let expected = expected * bytes * 1e9;
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
    };
    // Gradients are reduced and read where they are given, so the update's three passes are all
    // there is.
    let whole = plan(ZeroStage::None, 1).rank_summary(model);
    near(whole.local_ns, 3.0 / 1e10);
    near(whole.exposed_ns, 1.0 / 1e9);
    near(whole.predicted_step_ns, 3.0 / 1e10 + 1.0 / 1e9);
    // Half of that, and other calls.
    let shared = plan(ZeroStage::Two, 1).rank_summary(model);
    near(shared.local_ns, 1.5 / 1e10);
    near(shared.exposed_ns, 1.0 / 4e9 + 1.0 / 5e9);
    // Gradients are reduced once, after three passes.
    let merged = plan(ZeroStage::None, 3);
    near(merged.rank_summary(model).exposed_ns, 1.0 / 1e9);
    let merged = merged.timeline(&model);
    assert_eq!(merged.iter().filter(|event| event.kind == EventKind::Backward).count(), 3);
    let timeline = plan(ZeroStage::Two, 1).timeline(&model);
    let kinds: Vec<EventKind> = timeline.iter().map(|event| event.kind).collect();
    assert_eq!(
        kinds,
        [EventKind::Backward, EventKind::Reduce, EventKind::Update, EventKind::Gather]
    );
    let without = plan(ZeroStage::None, 1).rank_summary(link(1e9));
    assert_eq!(without.local_ns, 0.0);
    near(without.predicted_step_ns, 1.0 / 1e9);
}

#[test]
fn segments_that_were_given_back_are_allocated_anew_and_fewer_with_streams() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let params = params(&names.map(|name| (name, 1 << 18, DType::F32)));
    let plan = |zero| {
        let planner = Planner::new(Sgd::default().into()).with(FuseAllReduce::of_bytes(1 << 20));
        let topology = Topology::new(1, 2).unwrap();
        let planner = planner.with(Shard::new(zero));
        planner.plan_for(&params, topology).unwrap()
    };
    let model = |streams| CostModel {
        streams,
        ..CostModel::from(Link { alpha_seconds: 0.0, beta_bytes_per_second: 1e9 })
    };
    let fresh = |streams| CostModel { fresh_bytes_per_second: Some(2e9), ..model(streams) };
    let shared = plan(ZeroStage::Two);
    // 8 segments of 1 MiB: one that is being filled, and one for each stream.
    for (streams, mib) in [(0, 1.0), (1, 2.0), (2, 3.0), (9, 8.0)] {
        let backward = &shared.timeline(&fresh(streams))[0];
        assert_eq!(backward.kind, EventKind::Backward);
        let expected = mib * f64::from(1 << 20) / 2e9;
        let found = backward.end - backward.start;
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
        assert_eq!(shared.timeline(&model(streams))[0].end, 0.0);
    }
    let whole = plan(ZeroStage::None);
    assert_eq!(whole.rank_summary(fresh(0)), whole.rank_summary(model(0)));
}

#[test]
fn predicted_memory_is_what_a_state_holds_per_stage() {
    let params = params(&[("a", 100_000, DType::F32), ("b", 20_000, DType::F32)]);
    let of_cap = |zero: ZeroStage, cap_bytes| {
        let planner = planner(FuseAllReduce::of_bytes(cap_bytes)).with(Shard::new(zero));
        let plan = planner.plan_for(&params, Topology::new(0, 4).unwrap());
        plan.unwrap().memory_bytes()
    };
    let memory = |zero| of_cap(zero, 1 << 16);
    let bytes = 480_000;
    let near = |found: u64, expected: u64| assert!(found.abs_diff(expected) < 4 * 512, "{found}");
    // Parameter, gradient and two moments, in which the gradient is reduced where it lies.
    near(memory(ZeroStage::None), 4 * bytes);
    near(memory(ZeroStage::One), 2 * bytes + 2 * bytes / 4);
    // Segments of gradients are given back, a quarter is kept; up to stage 2 whole parameters.
    near(memory(ZeroStage::Two), bytes + 3 * bytes / 4);
    near(memory(ZeroStage::Three), bytes);
    // One bucket of several tensors stays, here all of them.
    for zero in [ZeroStage::Two, ZeroStage::Three] {
        near(of_cap(zero, 1 << 20), memory(zero) + bytes);
    }
}

#[test]
fn a_plan_says_how_many_gradients_are_reduced_in_how_many_calls() {
    let params =
        params(&[("a", 3 * SLOT, DType::F32), ("nothing", 0, DType::F32), ("b", SLOT, DType::F32)]);
    let told = |cap_bytes| {
        let plan = plan(&params, FuseAllReduce::of_bytes(cap_bytes), 2);
        let mut notes = plan.explain().iter();
        let note = notes.find(|note| note.reason.contains("are reduced in"));
        note.unwrap().reason.clone()
    };
    let whole = "2 gradients are reduced in 1 call (0 cut by the cap)";
    assert_eq!(told(slots(4)), whole);
    let cut = "2 gradients are reduced in 3 calls (1 cut by the cap)";
    assert_eq!(told(slots(2)), cut);
}

#[test]
fn a_world_of_one_is_told_that_it_has_nothing_to_reduce() {
    let params = params(&[("a", 5, DType::F32)]);
    let plan = plan(&params, FuseAllReduce::default(), 1);
    let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 };
    let summary = plan.rank_summary(link);
    assert_eq!((summary.collectives, summary.bytes_on_wire), (0, 0));
    assert!(plan.explain().iter().any(|note| note.reason.contains("nothing to reduce")));
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
    let plan = planner.plan_for(&params, Topology::new(0, 1024).unwrap()).unwrap();
    let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e10 };
    assert!(plan.rank_summary(link).collectives > 100);
    assert!(start.elapsed().as_millis() < 1_000, "{:?}", start.elapsed());
}

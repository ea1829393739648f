//! Pass `fuse_reduce_into_update`: one pass over memory, the same bits.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use fusestep_fused_adam::{Adam, WeightDecay};
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision, Rounding, StateDType};
use fusestep_planner::{
    CallPurpose, ClipByGlobalNorm, Distributed, FuseAllReduce, FuseBroadcast, FuseReduceIntoUpdate,
    GradientAccumulation, LocalSgd, LossScaling, Note, Optimizer, Ownership, Plan, PlanError,
    Planner, Reach, ReducedWhen, Shard, Stage, Topology, UpdateNorms, Verdict, ZeroStage,
};
use fusestep_testkit::each_rule;

use crate::run::{Case, Mixed, lacking};
use crate::train::{Trained, train};

/// Cut into buckets of 2,000 elements of f32 in the middle of tensors; at many worlds some parts
/// are empty.
fn case(world: usize) -> Case {
    Case {
        numels: vec![1_000, 3, 0, 1, 5_003, 130, 257],
        world,
        cap: Some(8_000),
        steps: 3,
        ..Case::default()
    }
}

fn shared(world: usize) -> Topology {
    Topology { reach: Reach::SharedMemory, ..Topology::new(0, world).unwrap() }
}

/// Rules that need no sums over whole tensors.
fn elementwise() -> Vec<Optimizer> {
    let plain = Sgd { momentum: 0.0, ..Sgd::default() };
    let l2 = Adam { weight_decay: WeightDecay::L2(0.1), ..Adam::default() };
    let others = [plain.into(), l2.into()];
    let layerwise = |rule: &Optimizer| matches!(rule, Optimizer::Lars(_) | Optimizer::Lamb(_));
    let known = each_rule().into_iter().filter(|rule| !layerwise(rule));
    known.chain(others).collect()
}

fn is_fused(plan: &Plan) -> bool {
    let fused = |stage: &Stage| matches!(stage, Stage::ReduceUpdate(_));
    plan.stages().iter().any(fused)
}

fn assert_same(found: &[Trained], expected: &[Trained], text: &str) {
    for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.bits() == expected.bits(), "rank {rank}: {text}");
        let alike = |trained: &Trained| -> Vec<_> {
            let updates = trained.reports.iter().filter_map(|report| report.update);
            updates.map(|update| (update.step, update.without_gradient)).collect()
        };
        assert_eq!(alike(found), alike(expected), "rank {rank}: {text}");
    }
}

/// Requires the fused run to be that without the pass, and the naive one.
fn same_fused(base: &Case) {
    let naive = Case { cap: None, zero: ZeroStage::None, ..base.clone() };
    let naive = train(base, &naive.planner());
    for zero in [ZeroStage::None, ZeroStage::One] {
        let case = Case { zero, ..base.clone() };
        let planner = case.planner().with(FuseReduceIntoUpdate);
        let plan = planner.plan_for(&case.params(), shared(case.world));
        assert!(is_fused(&plan.unwrap()), "{case:?}");
        let found = train(&case, &planner);
        let separate = train(&case, &case.planner());
        assert_same(&found, &separate, &format!("{case:?}"));
        for (found, naive) in found.iter().zip(&naive) {
            assert!(found.params == naive.params, "{case:?}");
            // Without shards every rank has all state, as in the naive plan.
            assert!(zero == ZeroStage::One || found.state == naive.state);
        }
    }
}

#[test]
fn every_rule_and_world_gives_the_bits_of_reducing_and_updating_apart() {
    for world in 2..=5 {
        for rule in elementwise() {
            let base = Case { rule, ..case(world) };
            same_fused(&base);
        }
    }
}

#[test]
fn bf16_with_masters_residuals_and_rounding_at_random_gives_the_same_bits() {
    let precision =
        |master, state, rounding| Precision { master, state, rounding, ..Precision::default() };
    let nearest = Rounding::default();
    let random = Rounding::Stochastic { seed: 7 };
    for world in 2..=5 {
        for rule in elementwise() {
            for precision in [
                Precision::default(),
                precision(Master::F32, StateDType::Compute, nearest),
                precision(Master::Remainder, StateDType::Bf16, nearest),
                precision(Master::None, StateDType::Bf16, random),
            ] {
                let base = Case {
                    rule,
                    mixed: Mixed::Yes,
                    precision: Some(precision),
                    steps: 2,
                    ..case(world)
                };
                same_fused(&base);
            }
        }
    }
}

#[test]
fn micro_steps_absent_gradients_and_streams_change_no_bit() {
    for world in 2..=5 {
        for mixed in [Mixed::No, Mixed::Yes] {
            for (merge, streams) in [(1, 0), (3, 0), (1, 2), (3, 1)] {
                let base = Case {
                    merge,
                    streams,
                    mixed,
                    without_gradient: lacking(world, merge),
                    ..case(world)
                };
                same_fused(&base);
                let report = train(&base, &base.planner().with(FuseReduceIntoUpdate));
                let updates = report[0].reports.iter().filter_map(|report| report.update);
                assert_eq!(
                    updates.map(|update| update.without_gradient).collect::<Vec<_>>(),
                    [0, 1, 0]
                );
            }
        }
    }
}

#[test]
fn slices_of_a_ranks_own_are_updated_beside_fused_buckets() {
    let case = case(3);
    let slices = || {
        let names = ["layer2.weight4", "layer0.weight1"];
        case.planner().with(Distributed::params(names))
    };
    let fused = slices().with(FuseReduceIntoUpdate);
    assert!(is_fused(&fused.plan_for(&case.params(), shared(3)).unwrap()));
    let found = train(&case, &fused);
    assert_same(&found, &train(&case, &slices()), "slices");
    assert!(found[0].params[4] != found[1].params[4]);
}

#[test]
fn one_stage_takes_the_place_of_three() {
    for zero in [ZeroStage::None, ZeroStage::One] {
        let case = Case { zero, ..case(3) };
        let plan = case.planner().with(FuseReduceIntoUpdate);
        let plan = plan.plan_for(&case.params(), shared(3)).unwrap();
        let mut fused = 0;
        for stage in plan.stages() {
            match stage {
                Stage::ReduceUpdate(_) => fused += 1,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(fused, plan.buckets().len());
        let applied = plan.explain().iter().any(|note| {
            note.pass == "fuse_reduce_into_update"
                && note.verdict == Verdict::Applied
                && note.reason.contains("one pass")
        });
        assert!(applied, "{zero:?}");
    }
}

/// Requires the pass to leave a plan as it is and to say why.
fn refused(planner: impl Fn() -> Planner, topology: Topology, why: &str) {
    let params = case(2).params();
    let plain = planner().plan_for(&params, topology).unwrap();
    let plan = planner().with(FuseReduceIntoUpdate);
    let plan = plan.plan_for(&params, topology).unwrap();
    assert!(!is_fused(&plan), "{why}");
    assert_eq!((plan.stages(), plan.hash()), (plain.stages(), plain.hash()), "{why}");
    let notes = plan.explain().iter();
    let own: Vec<_> = notes.filter(|note| note.pass == "fuse_reduce_into_update").collect();
    assert_eq!(own.len(), 1, "{why}");
    assert_eq!(own[0].verdict, Verdict::Refused, "{why}");
    assert!(own[0].reason.contains(why), "{why}: {}", own[0].reason);
}

#[test]
fn steps_in_which_something_has_to_be_known_of_all_gradients_first_are_refused() {
    let adam = || Planner::new(Adam::default().into()).with(FuseAllReduce::of_bytes(8_000));
    let two = shared(2);
    refused(|| adam().with(ClipByGlobalNorm::new(1.0)), two, "norm of all gradients");
    refused(|| adam().with(LossScaling::dynamic()), two, "norm of all gradients");
    for rule in [Lars::default().into(), Lamb::default().into()] {
        refused(|| Planner::new(rule), two, "sums over whole tensors");
    }
    refused(|| adam().with(UpdateNorms), two, "measured");
    let each = |every| {
        let rule = GradientAccumulation::every(NonZeroU32::new(every).unwrap());
        rule.reduced(ReducedWhen::PerMicroStep)
    };
    refused(|| adam().with(each(2)), two, "micro-steps that update nothing");
    let local = LocalSgd::every(NonZeroU64::MIN);
    refused(|| adam().with(local), two, "reduce no gradients");
}

#[test]
fn ranks_without_common_memory_or_with_shared_out_gradients_are_refused() {
    let adam = || Planner::new(Adam::default().into()).with(FuseAllReduce::of_bytes(8_000));
    let calls = Topology::new(0, 2).unwrap();
    assert_eq!(calls.reach, Reach::Calls);
    refused(adam, calls, "do not see each other's memory");
    refused(adam, shared(1), "1 rank");
    for zero in [ZeroStage::Two, ZeroStage::Three] {
        refused(|| adam().with(Shard::new(zero)), shared(2), "as soon as they are reduced");
    }
    let group = NonZeroUsize::new(2).unwrap();
    let groups = || adam().with(Shard::new(ZeroStage::One).group(group));
    refused(groups, shared(4), "within shard groups");
    let twice = adam().with(FuseReduceIntoUpdate).with(FuseReduceIntoUpdate);
    let error = twice.plan_for(&case(2).params(), shared(2)).unwrap_err();
    let pass = "fuse_reduce_into_update";
    assert_eq!(error, PlanError::PassTwice { pass });
}

#[test]
fn owners_of_whole_tensors_fuse_too_and_have_nothing_left_to_broadcast() {
    let case =
        Case { zero: ZeroStage::One, ownership: Ownership::Tensors, mixed: Mixed::Yes, ..case(3) };
    let planner = case.planner().with(FuseBroadcast::of_bytes(1 << 20)).with(FuseReduceIntoUpdate);
    let plan = planner.plan_for(&case.params(), shared(3)).unwrap();
    assert!(is_fused(&plan));
    let gathers = |stage: &Stage| matches!(stage, Stage::Gather(_));
    assert!(!plan.stages().iter().any(gathers));
    assert_same(&train(&case, &planner), &train(&case, &case.planner()), "tensors");
}

/// Calls of a step that move gradients, parameters or state.
fn data_calls(plan: &Plan) -> u64 {
    let calls = plan.calls();
    let data = calls.iter().filter(|call| call.what == CallPurpose::Data);
    data.map(|call| call.times).sum()
}

#[test]
fn one_pass_costs_fewer_bytes_and_no_more_calls_whatever_the_shapes_ranks_and_stage() {
    let shapes: [&[u64]; 4] = [&[1], &[3, 0, 17], &[5_000, 257, 64], &[131_072, 70_001]];
    let precisions = [
        None,
        Some(Precision { master: Master::F32, ..Precision::default() }),
        Some(Precision { master: Master::None, state: StateDType::Bf16, ..Precision::default() }),
    ];
    for world in [2, 3, 4, 8, 64] {
        for (numels, rule) in shapes.iter().flat_map(|shape| {
            let rules = elementwise().into_iter();
            rules.map(move |rule| (shape.to_vec(), rule))
        }) {
            for (zero, precision) in [ZeroStage::None, ZeroStage::One]
                .into_iter()
                .flat_map(|zero| precisions.map(|precision| (zero, precision)))
            {
                let case = Case {
                    rule,
                    numels: numels.clone(),
                    mixed: if precision.is_some() { Mixed::Yes } else { Mixed::No },
                    zero,
                    precision,
                    ..case(world)
                };
                let plan_of = |planner: Planner, rank| {
                    let topology = Topology { rank, ..shared(world) };
                    planner.plan_for(&case.params(), topology).unwrap()
                };
                let separate = plan_of(case.planner(), 0);
                let fused = plan_of(case.planner().with(FuseReduceIntoUpdate), 0);
                let prices = [&fused, &separate].map(Plan::bytes_per_element);
                assert!(prices[0] < prices[1], "{prices:?}, {case:?}");
                assert!(data_calls(&fused) <= data_calls(&separate), "{case:?}");
                // The plan says both.
                let notes = fused.explain().iter();
                let said = format!(
                    "{} bytes an element for all ranks together, apart {}",
                    prices[0], prices[1]
                );
                let says = |note: &Note| note.reason.contains(&said);
                assert_eq!(notes.filter(|note| says(note)).count(), 1, "{said}: {case:?}");
                if precision.is_none() && world <= 4 {
                    // What each rank is said to read and write adds up to that price.
                    let fused = || case.planner().with(FuseReduceIntoUpdate);
                    let of_rank = |rank| plan_of(fused(), rank).traffic_bytes();
                    let all: u64 = (0..world).map(of_rank).sum();
                    assert_eq!(all, prices[0] * numels.iter().sum::<u64>(), "{case:?}");
                }
            }
        }
    }
}

#[test]
fn adamw_takes_the_bytes_that_the_documents_say() {
    let prices = |zero, world| {
        let case = Case { zero, ..case(world) };
        let of = |planner: Planner| {
            let plan = planner.plan_for(&case.params(), shared(world)).unwrap();
            plan.bytes_per_element()
        };
        (of(case.planner().with(FuseReduceIntoUpdate)), of(case.planner()))
    };
    let found =
        [2, 4, 8].map(|world| (prices(ZeroStage::None, world), prices(ZeroStage::One, world)));
    assert_eq!(found, [((44, 72), (36, 48)), ((76, 144), (52, 72)), ((140, 288), (84, 120)),]);
}

//! What plans say of themselves in numbers and words.

use std::num::NonZeroUsize;

use fusestep_amp::{LossScale, ScalePolicy};
use fusestep_fused_adam::Adam;
use fusestep_planner::{
    FuseAllReduce, FuseReduceIntoUpdate, LossScaling, Plan, Planner, Reach, Shard, Stage, Topology,
    UpdateInBackward, UpdateNorms, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

fn params() -> Vec<ParamDesc> {
    let describe =
        |(name, numel): (&str, u64)| ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::F32);
    [("a", 300), ("nothing", 0), ("b", 200)].map(describe).into()
}

fn planner() -> Planner {
    Planner::new(Adam::default().into()).with(FuseAllReduce::default())
}

fn plan(planner: Planner, world: usize) -> Plan {
    let mut topology = Topology::new(0, world).unwrap();
    topology.reach = Reach::SharedMemory;
    planner.plan_for(&params(), topology).unwrap()
}

fn says(plan: &Plan, text: &str) -> bool {
    plan.explain().iter().any(|note| note.reason.contains(text))
}

#[test]
fn bytes_of_an_element_are_those_of_its_passes() {
    let sharded = |zero| planner().with(Shard::new(zero));
    for (planner, world, expected) in [
        // Gradient; parameter and two moments read and written.
        (planner(), 1, 4 + 2 * 12),
        // All gradients read and written by the reduction, and each rank's update.
        (planner(), 2, 2 * 8 + 2 * 28),
        // All read, one written, one update, and a gather to every other rank.
        (sharded(ZeroStage::One), 2, 8 + 4 + 28 + 8),
        (sharded(ZeroStage::Two), 3, 12 + 4 + 28 + 2 * 8),
        (sharded(ZeroStage::Three), 2, 8 + 4 + 28),
        (sharded(ZeroStage::Three), 3, 12 + 4 + 28),
        // In one pass: all read, state of one rank or of all, parameters of all written.
        (planner().with(FuseReduceIntoUpdate), 2, 8 + 3 * 12),
        (planner().with(FuseReduceIntoUpdate), 3, 12 + 4 * 12),
        (sharded(ZeroStage::One).with(FuseReduceIntoUpdate), 2, 8 + 2 * 8 + 4 + 2 * 4),
        (sharded(ZeroStage::One).with(FuseReduceIntoUpdate), 3, 12 + 2 * 8 + 4 + 3 * 4),
    ] {
        let plan = plan(planner, world);
        let zero = plan.zero();
        assert_eq!(plan.bytes_per_element(), expected, "{world} ranks, {zero:?}");
    }
}

#[test]
fn an_update_of_a_bucket_leaves_empty_tensors_out() {
    let plan = plan(planner().with(FuseReduceIntoUpdate), 2);
    let updates = plan.stages().iter().filter_map(|stage| match stage {
        Stage::ReduceUpdate(update) => Some(update),
        _ => None,
    });
    let tensors: Vec<Vec<&str>> = updates
        .map(|update| {
            let members = &plan.storages()[update.storage].members;
            let name = |&tensor: &u32| {
                let param = members[tensor as usize] as usize;
                plan.params()[param].name.as_str()
            };
            update.tensors.iter().map(name).collect()
        })
        .collect();
    assert_eq!(tensors, [["b", "a"]]);
}

#[test]
fn updates_in_backward_say_what_they_do_with_buckets() {
    let with = |zero: Option<ZeroStage>, world, reach| {
        // Ranges of one tensor each, where ranks do not reduce.
        let mut planner = planner().with(UpdateInBackward::of_bytes(1_200));
        if let Some(zero) = zero {
            planner = planner.with(Shard::new(zero));
        }
        let mut topology = Topology::new(0, world).unwrap();
        topology.reach = reach;
        planner.plan_for(&params(), topology).unwrap()
    };
    let plain = with(None, 2, Reach::SharedMemory);
    assert!(says(&plain, "1 bucket is reduced and updated as soon"));
    let sharded = with(Some(ZeroStage::One), 2, Reach::SharedMemory);
    assert!(says(&sharded, "1 bucket is reduced, updated and gathered as soon"));
    // Only of many ranks, and only where streams call.
    let alone = with(None, 1, Reach::Calls);
    assert!(says(&alone, "2 updates run as soon"));
    for (plan, streams) in [(&plain, false), (&alone, false), (&with(None, 2, Reach::Calls), true)]
    {
        let told = says(plan, "where a communication stream reduces them");
        assert_eq!(told, streams);
    }
    // A bucket that is reduced is updated whole.
    let updates = |plan: &Plan| {
        let stages = plan.stages().iter();
        stages.filter(|stage| matches!(stage, Stage::Optimize(_))).count()
    };
    assert_eq!((updates(&plain), updates(&alone)), (1, 2));
}

#[test]
fn norms_of_updates_are_named_in_notes_and_refusals() {
    let plan = plan(planner().with(UpdateNorms), 1);
    let mut notes = plan.explain().iter();
    assert!(notes.any(|note| note.pass == "update_norms"));
    let twice = planner().with(UpdateNorms).with(UpdateNorms);
    let refused = twice.plan_for(&params(), Topology::new(0, 1).unwrap());
    assert!(refused.unwrap_err().to_string().contains("update_norms"));
}

#[test]
fn a_loss_scale_that_can_change_says_how() {
    let told = |growth, backoff| {
        let policy = ScalePolicy { growth, backoff, ..ScalePolicy::default() };
        let scale = LossScale::with_policy(8.0, policy).unwrap();
        let plan = planner().with(LossScaling::from(scale));
        plan_says_it_stays(&self::plan(plan, 1))
    };
    assert!(told(1.0, 1.0));
    for (growth, backoff) in [(2.0, 1.0), (1.0, 0.5), (2.0, 0.5)] {
        assert!(!told(growth, backoff), "times {growth} and {backoff}");
    }
}

fn plan_says_it_stays(plan: &Plan) -> bool {
    let stays = says(plan, "and stays so");
    assert!(stays != says(plan, "good steps"));
    stays
}

#[test]
fn stages_have_numbers_and_shards_of_groups_are_counted() {
    let stages = [
        Some(ZeroStage::None),
        Some(ZeroStage::One),
        Some(ZeroStage::Two),
        Some(ZeroStage::Three),
        None,
    ];
    for (number, stage) in (0..).zip(stages) {
        assert_eq!(ZeroStage::of(number), stage);
        assert!(stage.is_none_or(|stage| stage.number() == number));
    }
    let group = NonZeroUsize::new(2).unwrap();
    let shards = Shard::new(ZeroStage::One).group(group);
    let grouped = plan(planner().with(shards), 6);
    assert!(says(&grouped, "among 2 ranks, alike in 3 groups"));
    let alone = plan(planner().with(Shard::new(ZeroStage::One)), 1);
    let gathers = |stage: &Stage| matches!(stage, Stage::Gather(_));
    assert!(!alone.stages().iter().any(gathers));
}

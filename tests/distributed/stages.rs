//! What every pass makes of a plan's stages, as text: `golden/plans/stages.txt`.

use std::fmt::Write;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::Path;

use fusestep_fused_adam::Adam;
use fusestep_planner::{
    ClipByGlobalNorm, CoalesceGradients, FuseAllReduce, FuseBroadcast, FuseOptimizer,
    FuseReduceIntoUpdate, GradientAccumulation, LocalSgd, LossScaling, Optimize, Ownership, Plan,
    Planner, Reach, Shard, Stage, Topology, UpdateInBackward, Verdict, When, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape, counted};

/// Set to write the golden file anew instead of comparing with it.
const BLESS: &str = "FUSESTEP_BLESS";

fn params() -> Vec<ParamDesc> {
    let describe =
        |(name, numel): (&str, u64)| ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::F32);
    [("a", 5_000), ("b", 64), ("c", 3), ("d", 1_000)].map(describe).to_vec()
}

fn names(plan: &Plan, update: &Optimize) -> String {
    let members = &plan.storages()[update.storage].members;
    let names = update.tensors.iter().map(|&tensor| {
        let param = members[tensor as usize] as usize;
        plan.params()[param].name.as_str()
    });
    names.collect()
}

fn of_bucket(plan: &Plan, index: usize) -> String {
    let bucket = &plan.buckets()[index];
    format!("bucket {index} of storage {}, elements {:?}", bucket.storage, bucket.elements)
}

/// One stage in a line.
pub(crate) fn text_of(plan: &Plan, stage: &Stage) -> String {
    let update = |what: &str, update: &Optimize| {
        let bucket = update.bucket.map_or(String::new(), |b| format!(" bucket {b},"));
        let names = names(plan, update);
        format!(
            "{what}{bucket} storage {}, {names}, elements {:?}, {}",
            update.storage,
            update.elements,
            counted(update.batches.len() as u64, "launch")
        )
    };
    match stage {
        Stage::Accumulate(accumulate) => {
            format!("accumulate {} micro-steps", accumulate.rule.every)
        }
        Stage::Reduce(reduce) => {
            format!("reduce, {:?}: {}", reduce.result, of_bucket(plan, reduce.bucket))
        }
        Stage::Norm(norm) => {
            let reads = norm.reads.iter().map(|read| format!("{:?}", read.elements));
            format!("norm of {}", reads.collect::<Vec<_>>().join(", "))
        }
        Stage::Trust => "trust".to_owned(),
        Stage::Optimize(stage) => update("update", stage),
        Stage::ReduceUpdate(stage) => update("reduce and update", stage),
        Stage::Gather(gather) => {
            let calls = gather.broadcasts.iter();
            let calls = calls.map(|call| format!(", {:?} from {}", call.elements, call.owner));
            let calls: String = calls.collect();
            format!("gather{calls}: {}", of_bucket(plan, gather.bucket))
        }
        Stage::Average(rule) => format!("average every {} steps", rule.every),
        other => format!("{other:?}"),
    }
}

fn stages(text: &mut String, when: &str, plan: &Plan) {
    let _ = writeln!(text, "{when}:");
    for stage in plan.stages() {
        let ready = match plan.when(stage) {
            When::Ready => "once ready, ",
            _ => "",
        };
        let _ = writeln!(text, "  {ready}{}", text_of(plan, stage));
    }
}

type Base = fn() -> Planner;
type With = fn(Planner) -> Planner;

fn naive() -> Planner {
    Planner::new(Adam::default().into()).naive()
}

fn default() -> Planner {
    Planner::new(Adam::default().into())
}

/// Two buckets: `d`, `c` and `b`, to which `a` would be too much, and `a`.
fn in_buckets() -> FuseAllReduce {
    FuseAllReduce::of_bytes(4 * 6_000)
}

fn bucketed() -> Planner {
    default().with(in_buckets())
}

fn owned() -> Planner {
    bucketed().with(Shard::new(ZeroStage::One).ownership(Ownership::Tensors))
}

/// Ranks that update on their own: no bucket, so updates are cut.
fn local() -> Planner {
    default().with(LocalSgd::every(NonZeroU64::new(8).unwrap()))
}

/// Every pass with what it is put on top of.
fn passes() -> Vec<(&'static str, Base, With)> {
    vec![
        ("coalesce_gradients", naive, |p| p.with(CoalesceGradients)),
        (
            "fuse_optimizer",
            || naive().with(CoalesceGradients).with(in_buckets()),
            |p| p.with(FuseOptimizer),
        ),
        ("fuse_all_reduce", default, |p| p.with(in_buckets())),
        ("shard", bucketed, |p| p.with(Shard::new(ZeroStage::Two))),
        ("fuse_broadcast", owned, |p| p.with(FuseBroadcast::of_bytes(4 * 1_100))),
        ("accumulate", bucketed, |p| {
            p.with(GradientAccumulation::every(NonZeroU32::new(4).unwrap()))
        }),
        ("local_sgd", bucketed, |p| p.with(LocalSgd::every(NonZeroU64::new(8).unwrap()))),
        ("clip_by_global_norm", bucketed, |p| p.with(ClipByGlobalNorm::new(1.0))),
        ("loss_scaling", bucketed, |p| p.with(LossScaling::dynamic())),
        ("fuse_reduce_into_update", bucketed, |p| p.with(FuseReduceIntoUpdate)),
        (
            "update_in_backward",
            || bucketed().with(FuseReduceIntoUpdate),
            |p| p.with(UpdateInBackward::default()),
        ),
        ("update_in_backward", local, |p| p.with(UpdateInBackward::of_bytes(4 * 6_000))),
    ]
}

#[test]
fn stages_before_and_after_every_pass_are_as_written_down() {
    let topology = Topology { reach: Reach::SharedMemory, ..Topology::new(1, 2).unwrap() };
    let plan = |planner: Planner| planner.plan_for(&params(), topology).unwrap();
    let mut text =
        String::from("Stages of rank 1 of 2; tensors a, b, c and d of 5000, 64, 3 and 1000 f32.\n");
    for (pass, base, with) in passes() {
        let (before, after) = (plan(base()), plan(with(base())));
        let whens = |plan: &Plan| -> Vec<When> {
            plan.stages().iter().map(|stage| plan.when(stage)).collect()
        };
        let differ = before.stages() != after.stages() || whens(&before) != whens(&after);
        assert!(differ, "{pass}");
        let applied = |plan: &Plan| {
            let notes = plan.explain().iter();
            let own = |note: &&fusestep_planner::Note| {
                note.pass == pass && note.verdict == Verdict::Applied
            };
            notes.filter(own).count()
        };
        assert_eq!((applied(&before), applied(&after)), (0, 1), "{pass}");
        let _ = writeln!(text, "\n{pass}");
        stages(&mut text, "before", &before);
        stages(&mut text, "after", &after);
    }
    compare(&text);
}

fn compare(found: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/plans");
    let path = folder.join("stages.txt");
    if std::env::var_os(BLESS).is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let expected =
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(
        found == expected,
        "other stages; if that is meant, run again with {BLESS}=1\nexpected:\n{expected}\n\
         found:\n{found}"
    );
}

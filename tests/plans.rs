//! What plans look like: printed plans of known models, what splits a launch, and how many launches
//! there are.

use std::path::{Path, PathBuf};
use std::time::Instant;

use fusestep_fused_adam::{Adam, WeightDecay};
use fusestep_launch::{
    ARGUMENT_BYTES_CLASSIC, ARGUMENT_BYTES_LARGE, ArgumentLayout, LaunchLimits, Precision,
    StateDType,
};
use fusestep_planner::{
    CoalesceGradients, FuseOptimizer, Optimizer, Plan, Planner, SizeClass, Stage, StorageSpec,
    Verdict,
};
use fusestep_tensor::{DType, ParamDesc, Shape};
use serde::Deserialize;

/// Set to write the golden plans anew instead of comparing with them.
const BLESS: &str = "FUSESTEP_BLESS";

#[derive(Deserialize)]
struct NamedShape {
    name: String,
    shape: Shape,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The parameters of `data/shapes/<model>.json`, all f32.
fn model(model: &str) -> Vec<ParamDesc> {
    let path = root().join("data/shapes").join(format!("{model}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let shapes: Vec<NamedShape> = serde_json::from_str(&text).unwrap();
    let params = shapes.into_iter().map(|s| ParamDesc::new(s.name, s.shape, DType::F32));
    params.collect()
}

fn params(numels: impl IntoIterator<Item = u64>, dtype: DType) -> Vec<ParamDesc> {
    let params = numels.into_iter().enumerate();
    params
        .map(|(i, n)| ParamDesc::new(format!("tensor.{i}"), Shape::new([n]).unwrap(), dtype))
        .collect()
}

fn adamw() -> Optimizer {
    Optimizer::Adam(Adam::default())
}

fn planner(argument_bytes: usize) -> Planner {
    Planner::new(adamw()).limits(LaunchLimits::with_argument_bytes(argument_bytes))
}

/// Requires `plan` to print as `golden/plans/<name>.txt` says.
fn compare(name: &str, plan: &Plan) {
    let path = root().join("tests/golden/plans").join(format!("{name}.txt"));
    let found = plan.to_string();
    if std::env::var_os(BLESS).is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let expected =
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(
        found == expected,
        "{name} prints otherwise; if that is meant, run again with {BLESS}=1\nexpected:\n{expected}\nfound:\n{found}"
    );
}

#[test]
fn resnet50_takes_1_launch_2_with_classic_arguments_and_161_naively() {
    let params = model("resnet50");
    for (name, planner, launches) in [
        ("resnet50_adamw", planner(ARGUMENT_BYTES_LARGE), 1),
        ("resnet50_adamw_classic", planner(ARGUMENT_BYTES_CLASSIC), 2),
        ("resnet50_adamw_naive", planner(ARGUMENT_BYTES_LARGE).naive(), 161),
    ] {
        let plan = planner.plan(&params).unwrap();
        compare(name, &plan);
        assert_eq!((plan.launches(), plan.naive_launches()), (launches, 161), "{name}");
        assert_eq!(plan.elements(), 25_557_032);
        assert_eq!(plan.traffic_bytes(), 28 * 25_557_032);
    }
}

#[test]
fn gpt2_prints_with_two_groups() {
    let mut params = model("gpt2");
    for param in &mut params {
        // As it is trained: no decay on biases and norms.
        if param.shape.dims().len() < 2 {
            param.weight_decay = Some(0.0);
        }
    }
    let plan = planner(ARGUMENT_BYTES_LARGE).plan(&params).unwrap();
    compare("gpt2_adamw", &plan);
    assert_eq!((plan.launches(), plan.groups().len()), (1, 2));
    assert_eq!(plan.elements(), 124_439_808);
    let adam = Optimizer::Adam(Adam { weight_decay: WeightDecay::L2(0.1), ..Adam::default() });
    let cut = LaunchLimits {
        argument_bytes: ARGUMENT_BYTES_CLASSIC,
        chunk_elements: 4096,
        chunks_per_launch: 320,
        ..LaunchLimits::default()
    };
    let plan = Planner::new(adam).limits(cut).plan(&params).unwrap();
    compare("gpt2_adam_cut_by_chunks", &plan);
}

#[test]
fn gpt2_in_int8_says_what_stays_in_f32() {
    let precision = Precision { state: StateDType::Int8, ..Precision::default() };
    let planner = planner(ARGUMENT_BYTES_LARGE).precision(precision).keep_f32(["wte"]);
    let plan = planner.plan(&model("gpt2")).unwrap();
    compare("gpt2_adamw_int8", &plan);
    assert_eq!((plan.storages().len(), plan.launches()), (2, 2));
    // An element with codes moves 12 bytes of parameter and gradient, 4 of codes, half of a unit.
    let coded: u64 = plan.storages().iter().filter(|s| s.lists.len() > 4).map(numel_of).sum();
    let others = plan.elements() - coded;
    assert_eq!(plan.traffic_bytes(), 28 * others + 16 * coded + coded / 2);
}

fn numel_of(storage: &StorageSpec) -> u64 {
    storage.layout.tensor_numel()
}

#[test]
fn launches_of_10_000_tiny_tensors_are_what_the_argument_bytes_allow() {
    let params = params((0..10_000).map(|i| 64 + i * 7 % 449), DType::F32);
    let layout = ArgumentLayout { lists: 4, scalar_bytes: 24, step_scalar_bytes: 16 };
    for argument_bytes in [ARGUMENT_BYTES_LARGE, ARGUMENT_BYTES_CLASSIC] {
        let start = Instant::now();
        let plan = planner(argument_bytes).plan(&params).unwrap();
        println!("10,000 tensors planned in {:?}", start.elapsed());
        let limit = layout.records_per_launch(argument_bytes, 1);
        assert_eq!(plan.launches(), 10_000usize.div_ceil(limit));
        assert_eq!((plan.storages().len(), plan.stages().len()), (1, 1));
        // One record per tensor, in order: the plan's length, and so its making, is linear in the
        // tensors.
        let Stage::Optimize(stage) = &plan.stages()[0] else {
            panic!("an optimize stage");
        };
        let records = stage.batches.iter().flat_map(|batch| &batch.records);
        assert!(records.map(|record| record.tensor).eq(0..10_000));
    }
}

#[test]
fn updates_are_fused_where_there_are_several_and_tensors_lie_together() {
    let fused = |params: &[ParamDesc], coalesced: bool| {
        let mut planner = Planner::new(adamw()).naive();
        if coalesced {
            planner = planner.with(CoalesceGradients);
        }
        let plan = planner.with(FuseOptimizer).plan(params).unwrap();
        let note = plan.explain().iter().find(|n| n.pass == "fuse_optimizer");
        let note = note.unwrap();
        (plan.launches(), note.verdict, note.reason.clone())
    };
    let mut two = params([100, 200], DType::F32);
    let (launches, verdict, reason) = fused(&two, false);
    assert_eq!((launches, verdict), (2, Verdict::Refused));
    assert!(reason.contains("put pass coalesce_gradients before"), "{reason}");
    assert_eq!(fused(&two, true).0, 1);
    let (launches, verdict, reason) = fused(&two[..1], true);
    assert_eq!((launches, verdict), (1, Verdict::Refused));
    assert_eq!(reason, "1 update has nothing to be fused with");
    // As many storages as parameters, since there are as many dtypes.
    two[1].dtype = DType::F64;
    let (launches, verdict, _) = fused(&two, true);
    assert_eq!((launches, verdict), (2, Verdict::Applied));
    // Fewer than parameters, and more than one.
    let mut three = params([100, 200, 300], DType::F32);
    three[1].dtype = DType::F64;
    let (launches, verdict, _) = fused(&three, true);
    assert_eq!((launches, verdict), (2, Verdict::Applied));
}

#[test]
fn dtypes_split_and_say_so() {
    let mut params = params([100, 200, 300, 400], DType::F32);
    params[1].dtype = DType::F64;
    params[3].dtype = DType::F64;
    let plan = Planner::new(adamw()).plan(&params).unwrap();
    assert_eq!((plan.launches(), plan.storages().len()), (2, 2));
    let members: Vec<_> = plan.storages().iter().map(|s| s.members.clone()).collect();
    assert_eq!(members, [vec![0, 2], vec![1, 3]]);
    let splits: Vec<_> = plan
        .explain()
        .iter()
        .filter(|note| note.verdict == Verdict::Split)
        .map(|note| (note.pass.as_str(), note.reason.as_str()))
        .collect();
    assert_eq!(
        splits,
        [
            ("coalesce_gradients", "a buffer holds one dtype, so f32, f64 lie apart"),
            (
                "fuse_optimizer",
                "a launch has one kernel and dtype, so fused_adam_f32, fused_adam_f64 run apart"
            ),
        ]
    );
}

#[test]
fn hyper_parameters_do_not_split() {
    let mut params = params([100; 12], DType::F32);
    for (index, param) in params.iter_mut().enumerate() {
        param.lr_scale = 1.0 / (index % 3 + 1) as f64;
        param.weight_decay = (index % 2 == 0).then_some(0.0);
    }
    let plan = Planner::new(adamw()).plan(&params).unwrap();
    assert_eq!((plan.launches(), plan.groups().len()), (1, 6));
    assert!(plan.explain().iter().all(|n| n.verdict == Verdict::Applied));
    let Stage::Optimize(stage) = &plan.stages()[0] else {
        panic!("an optimize stage");
    };
    assert_eq!(stage.batches[0].groups.len(), 6);
}

#[test]
fn a_tensor_with_more_chunks_than_a_launch_takes_is_a_class_of_its_own() {
    let limits =
        LaunchLimits { chunk_elements: 100, chunks_per_launch: 4, ..LaunchLimits::default() };
    let params = params([50, 401, 400, 1000], DType::F32);
    let plan = Planner::new(adamw()).limits(limits).plan(&params).unwrap();
    let stages: Vec<_> = plan
        .stages()
        .iter()
        .map(|stage| match stage {
            Stage::Optimize(stage) => (stage.size_class, stage.tensors.clone()),
            other => panic!("unexpected stage {other:?}"),
        })
        .collect();
    assert_eq!(stages, [(SizeClass::Small, vec![0, 2]), (SizeClass::Large, vec![1, 3])]);
}

#[test]
fn the_page_is_self_contained() {
    let mut params = model("resnet50");
    params[0].name = "<script>alert(1)</script>&\"".to_owned();
    let page = Planner::new(adamw()).plan(&params).unwrap().to_html();
    assert!(page.contains("<svg"), "launches and buffers are drawn");
    for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
        assert!(!page.contains(outside), "the page refers to `{outside}`");
    }
}

#[test]
fn the_picture_shows_sixteen_launches_and_counts_the_others() {
    let mut params = model("resnet50");
    params[0].name = "<script>".to_owned();
    let plan = planner(400).plan(&params).unwrap();
    let svg = plan.to_svg();
    assert!(plan.launches() > 17, "{} launches", plan.launches());
    assert_eq!(svg.matches("<text y=").count(), 17);
    let more = format!("and {} more launches</text>", plan.launches() - 16);
    assert!(svg.contains(&more), "{more}");
    assert!(svg.contains("&lt;script&gt;") && !svg.contains("<script"));
    let xml = svg.matches("<g ").count() == svg.matches("</g>").count();
    assert!(xml && svg.ends_with("</svg>\n"));
}

#[test]
fn plans_of_equal_input_are_equal_and_the_hash_tells_others_apart() {
    let plan = |params: &[ParamDesc]| planner(ARGUMENT_BYTES_LARGE).plan(params).unwrap();
    let params = model("gpt2");
    assert_eq!(plan(&params), plan(&params));
    let mut renamed = params.clone();
    renamed[7].name.push('x');
    let mut turned = params.clone();
    turned.rotate_left(1);
    let hashes = [&params, &renamed, &turned].map(|params| plan(params).hash());
    assert!(hashes[0] != hashes[1] && hashes[0] != hashes[2] && hashes[1] != hashes[2]);
}

#[test]
fn no_parameters_and_one_parameter_are_plans() {
    let none = Planner::new(adamw()).plan(&[]).unwrap();
    assert_eq!((none.launches(), none.elements()), (0, 0));
    let one = Planner::new(adamw()).plan(&params([5], DType::F32)).unwrap();
    assert_eq!((one.launches(), one.naive_launches()), (1, 1));
    assert!(one.explain().iter().all(|n| n.verdict == Verdict::Refused));
}

/// A stage alone may have as many, but there is one for every tensor.
#[test]
fn launches_of_all_tensors_together_are_bounded() {
    let limits =
        LaunchLimits { chunk_elements: 1, chunks_per_launch: 1, ..LaunchLimits::default() };
    let plan = |numels: &[u64]| {
        Planner::new(Adam::default().into())
            .naive()
            .limits(limits)
            .plan(&params(numels.iter().copied(), DType::F32))
    };
    assert_eq!(plan(&[600_000]).unwrap().launches(), 600_000);
    let error = plan(&[600_000, 1, 600_000]).unwrap_err().to_string();
    assert!(error.contains("expected at most 1048576, found more"), "{error}");
}

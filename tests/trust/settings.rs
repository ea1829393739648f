//! Settings under which the same state means something else: state files and checkpoints say which
//! they were, and others are refused.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_collective::Solo;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_launch::WeightDecay;
use fusestep_planner::{Comms, Manifest, Optimizer, Plan, PlanError, Planner, State};
use fusestep_schedule_free::ScheduleFree;
use fusestep_tensor::{DType, ParamDesc, Shape};
use fusestep_tensor_file::{TensorFile, write_atomically};
use xxhash_rust::xxh3::Xxh3;

use super::folders::sign;

fn start(planner: &Planner) -> (Plan, State, CpuBackend) {
    let desc = |name| ParamDesc::new(name, Shape::new([4]).unwrap(), DType::F32);
    let params = ["a", "b"].map(desc);
    let plan = planner.plan(&params).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let state = plan.allocate(&backend).unwrap();
    (plan, state, backend)
}

/// Saves a state file and a checkpoint of a run in a folder.
fn save(planner: &Planner, folder: &Path) {
    let (plan, state, backend) = start(planner);
    state.save(&backend, &folder.join("state")).unwrap();
    let mut rank = Solo::default();
    let mut comms = Comms::direct(&mut rank);
    plan.save(&state, &backend, &mut comms, folder, BTreeMap::new()).unwrap();
}

/// What loading the state file and the checkpoint comes to.
fn load(planner: &Planner, folder: &Path) -> [Result<(), PlanError>; 2] {
    let (plan, mut state, backend) = start(planner);
    let file = state.load(&backend, &folder.join("state")).map(drop);
    let checkpoint = plan.load(&mut state, &backend, folder).map(drop);
    [file, checkpoint]
}

fn momentum(weight_decay: WeightDecay) -> Sgd {
    Sgd { weight_decay, ..Sgd::with_momentum() }
}

#[test]
fn other_settings_under_which_state_means_something_else_are_refused() {
    let free = ScheduleFree::default();
    let l2 = momentum(WeightDecay::L2(0.1));
    let cases: [(Optimizer, Optimizer, &str); 3] = [
        (
            free.into(),
            ScheduleFree { beta1: 0.95, ..free }.into(),
            "`beta1`: expected 0.95, found 0.9",
        ),
        (
            ScheduleFree { warmup_steps: 10, ..free }.into(),
            free.into(),
            "`warmup_steps`: expected 0, found 10",
        ),
        (
            l2.into(),
            momentum(WeightDecay::Decoupled(0.1)).into(),
            "`weight_decay`: expected decoupled, found l2",
        ),
    ];
    for (saved, other, named) in cases {
        let folder = tempfile::tempdir().unwrap();
        save(&Planner::new(saved), folder.path());
        for outcome in load(&Planner::new(saved), folder.path()) {
            outcome.unwrap();
        }
        for outcome in load(&Planner::new(other), folder.path()) {
            let error = outcome.expect_err(named).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}

#[test]
fn settings_under_which_state_means_the_same_may_change() {
    let free = ScheduleFree::default();
    let l2 = momentum(WeightDecay::L2(0.1));
    let cases: [(Optimizer, Optimizer); 4] = [
        (
            free.into(),
            ScheduleFree { lr: 1.0, beta2: 0.5, eps: 1.0, weight_decay: 0.5, ..free }.into(),
        ),
        (l2.into(), Sgd { lr: 0.5, momentum: 0.5, dampening: 0.5, rescale: 0.25, ..l2 }.into()),
        (l2.into(), momentum(WeightDecay::L2(0.0)).into()),
        (Adam::default().into(), Adam { beta1: 0.5, beta2: 0.5, ..Adam::default() }.into()),
    ];
    for (saved, other) in cases {
        let folder = tempfile::tempdir().unwrap();
        save(&Planner::new(saved), folder.path());
        for outcome in load(&Planner::new(other), folder.path()) {
            outcome.unwrap();
        }
    }
}

#[test]
fn settings_of_single_parameters_are_compared_too() {
    let planner = |beta1| {
        let free = ScheduleFree { beta1, ..ScheduleFree::default() };
        Planner::new(Adam::default().into()).group(["b"], free.into())
    };
    let folder = tempfile::tempdir().unwrap();
    save(&planner(0.9), folder.path());
    for outcome in load(&planner(0.9), folder.path()) {
        outcome.unwrap();
    }
    for outcome in load(&planner(0.8), folder.path()) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("`beta1@b`: expected 0.8, found 0.9"), "{error}");
    }
}

/// The checksum of a state file's other metadata, as docs/RELIABILITY.md has it.
fn sum_of(texts: &HashMap<String, String>) -> String {
    let mut hasher = Xxh3::new();
    for (key, value) in texts.iter().collect::<BTreeMap<_, _>>() {
        for text in [key, value] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    format!("{:016x}", hasher.digest())
}

#[test]
fn files_from_before_settings_were_in_them_are_read_under_any() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    save(&Planner::new(ScheduleFree::default().into()), folder.path());
    let file = TensorFile::read(&path).unwrap();
    let mut texts = file.metadata().clone();
    let settings = ["beta1", "warmup_steps", "xxh3"];
    assert!(settings.iter().all(|key| texts.remove(*key).is_some()));
    texts.insert("xxh3".to_owned(), sum_of(&texts));
    let tensors = file.entries().iter();
    let tensors = tensors.map(|(name, entry)| {
        let bytes = file.bytes(name).unwrap();
        (name.clone(), entry.with_bytes(bytes))
    });
    write_atomically(&path, &tensors.collect::<Vec<_>>(), texts).unwrap();
    let mut manifest = Manifest::read(folder.path()).unwrap();
    assert_eq!(manifest.settings["beta1"], "0.9");
    manifest.settings.clear();
    manifest.version = 4;
    sign(manifest, folder.path());
    let other = ScheduleFree { beta1: 0.5, ..ScheduleFree::default() };
    for outcome in load(&Planner::new(other.into()), folder.path()) {
        outcome.unwrap();
    }
}

#[test]
fn a_rule_that_has_replaced_the_plans_is_the_one_that_files_name() {
    let folder = tempfile::tempdir().unwrap();
    let adam = Adam { weight_decay: WeightDecay::L2(0.01), ..Adam::default() };
    let adamw = Adam::default();
    let file = folder.path().join("state");
    let (plan, mut state, backend) = start(&Planner::new(adam.into()));
    state.set_optimizer(adamw.into()).unwrap();
    state.save(&backend, &file).unwrap();
    let (mut rank, texts) = (Solo::default(), BTreeMap::new());
    plan.save(&state, &backend, &mut Comms::direct(&mut rank), folder.path(), texts).unwrap();
    assert_eq!(Manifest::read(folder.path()).unwrap().optimizer, "adamw");
    // By a plan of it, and by one that has it by now.
    for replaced in [false, true] {
        let planned = if replaced { adam } else { adamw };
        let (plan, mut state, backend) = start(&Planner::new(planned.into()));
        if replaced {
            let refused = plan.load(&mut state, &backend, folder.path()).unwrap_err().to_string();
            assert!(refused.contains("`optimizer`: expected adam, found adamw"), "{refused}");
            state.set_optimizer(adamw.into()).unwrap();
        }
        plan.load(&mut state, &backend, folder.path()).unwrap();
        state.load(&backend, &file).unwrap();
    }
}

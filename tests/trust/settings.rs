//! Settings under which the same state means something else: state files and checkpoints say which
//! they were, and others are refused.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_checkpoint::{Manifest, load, load_state, save, save_state};
use fusestep_collective::Solo;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::{Nesterov, Sgd};
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Excluded, SettingValue, WeightDecay};
use fusestep_planner::{
    Accumulated, ClipByGlobalNorm, Comms, GradientAccumulation, LossScale, LossScaling, Optimizer,
    Plan, PlanError, Planner, RunToLoad, RunToSave, ScalePolicy, State,
};
use fusestep_rmsprop::RmsProp;
use fusestep_schedule_free::ScheduleFree;
use fusestep_tensor::{DType, ParamDesc, Shape, Trust};
use fusestep_tensor_file::{TensorFile, write_atomically};
use fusestep_testkit::each_rule;
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
fn both_saved(planner: &Planner, folder: &Path) {
    let (plan, state, backend) = start(planner);
    save_state(&state, &backend, &folder.join("state")).unwrap();
    let mut rank = Solo::default();
    let mut comms = Comms::direct(&mut rank);
    save(RunToSave::of(&plan, &state, &backend), &mut comms, folder, BTreeMap::new()).unwrap();
}

/// What loading the state file and the checkpoint comes to.
fn both_loaded(planner: &Planner, folder: &Path) -> [Result<(), PlanError>; 2] {
    let (plan, mut state, backend) = start(planner);
    let file = load_state(&mut state, &backend, &folder.join("state")).map(drop);
    let checkpoint = load(RunToLoad::of(&plan, &mut state, &backend), folder).map(drop);
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
        both_saved(&Planner::new(saved), folder.path());
        for outcome in both_loaded(&Planner::new(saved), folder.path()) {
            outcome.unwrap();
        }
        for outcome in both_loaded(&Planner::new(other), folder.path()) {
            let error = outcome.expect_err(named).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}

/// A planner, its name, and the setting that another has not as it has.
type Changed = (Planner, Planner, &'static str);

/// A rule with each number of its settings changed, one at a time. The learning rate and factors on
/// gradients may change as a run goes on, and what state depends on is compared for itself.
fn changed(rule: Optimizer) -> Vec<(Optimizer, Optimizer, &'static str)> {
    let of_state = rule.rule().settings_of_state();
    let is_fixed =
        |name| !matches!(name, "lr" | "rescale") && of_state.iter().all(|(own, _)| *own != name);
    let (mut names, mut own) = (Vec::new(), rule);
    own.each(&mut |setting| {
        if matches!(setting.value, SettingValue::Number(..)) && is_fixed(setting.name) {
            names.push(setting.name);
        }
    });
    let change = |name| {
        let mut other = rule;
        other.each(&mut |setting| {
            if let (SettingValue::Number(value, _), true) = (setting.value, setting.name == name) {
                *value = if *value == 0.5 { 0.25 } else { 0.5 };
            }
        });
        (rule, other, name)
    };
    names.into_iter().map(change).collect()
}

/// Every setting of every rule but its rate, changed one by one.
fn of_rules() -> Vec<Changed> {
    let adam = Adam { weight_decay: WeightDecay::L2(0.01), ..Adam::default() };
    let l2 = momentum(WeightDecay::L2(0.1));
    let sgd = Sgd { weight_decay: WeightDecay::L2(0.1), ..Sgd::default() };
    let nesterov = Sgd { nesterov: Nesterov::Nesterov, ..l2 };
    let (lars, lamb) = (Lars::default(), Lamb::default());
    let rms = RmsProp { momentum: 0.5, ..RmsProp::default() };
    let decoupled = Sgd { weight_decay: WeightDecay::Decoupled(0.1), ..sgd };
    let mut pairs: Vec<(Optimizer, Optimizer, &str)> = vec![
        (sgd.into(), Sgd { weight_decay: WeightDecay::L2(0.2), ..sgd }.into(), "weight_decay"),
        (sgd.into(), decoupled.into(), "decoupled_weight_decay"),
        (l2.into(), nesterov.into(), "nesterov"),
        (l2.into(), momentum(WeightDecay::L2(0.0)).into(), "weight_decay"),
        (lars.into(), Lars { excluded: Excluded::TrustRatio, ..lars }.into(), "excluded"),
        (lamb.into(), Lamb { excluded: Excluded::TrustRatio, ..lamb }.into(), "excluded"),
    ];
    for rule in each_rule().into_iter().chain([adam.into(), l2.into()]) {
        pairs.extend(match rule {
            // Without momentum there is no such state.
            Optimizer::RmsProp(_) => changed(rms.into()),
            rule => changed(rule),
        });
    }
    assert!(pairs.len() > 35, "{}", pairs.len());
    let planners = pairs.into_iter();
    planners.map(|(rule, other, name)| (Planner::new(rule), Planner::new(other), name)).collect()
}

/// Settings of plans.
fn of_plans() -> Vec<Changed> {
    let lars = || Planner::new(Lars::default().into());
    let group = |momentum| {
        let rule = Lars { momentum, ..Lars::default() };
        Planner::new(Adam::default().into()).group(["b"], rule.into())
    };
    let sum = |accumulated| {
        let two = GradientAccumulation::every(2.try_into().unwrap());
        lars().with(GradientAccumulation { accumulated, ..two })
    };
    let policy = |growth_interval| {
        let policy = ScalePolicy { growth_interval, ..ScalePolicy::default() };
        lars().with(LossScaling::from(LossScale::with_policy(1024.0, policy).unwrap()))
    };
    vec![
        (group(0.9), group(0.5), "momentum@b"),
        (
            lars().with(ClipByGlobalNorm::new(1.0)),
            lars().with(ClipByGlobalNorm::new(2.0)),
            "clip_norm",
        ),
        (lars(), lars().with(ClipByGlobalNorm::new(2.0)), "clip_norm"),
        (sum(Accumulated::Mean), sum(Accumulated::Sum), "accumulated"),
        (policy(10), policy(20), "loss_scaling"),
    ]
}

#[test]
fn every_other_setting_that_decides_bits_is_compared_for_every_rule() {
    for (saved, other, named) in of_rules().into_iter().chain(of_plans()) {
        // In both directions: neither side may lack what the other says.
        for (saved, other) in [(&saved, &other), (&other, &saved)] {
            let folder = tempfile::tempdir().unwrap();
            both_saved(saved, folder.path());
            for outcome in both_loaded(saved, folder.path()) {
                outcome.unwrap();
            }
            for outcome in both_loaded(other, folder.path()) {
                let error = outcome.expect_err(named).to_string();
                assert!(error.contains(named) && error.contains("by `any_settings`"), "{error}");
            }
            let (plan, mut state, backend) = start(other);
            state.any_settings();
            load_state(&mut state, &backend, &folder.path().join("state")).unwrap();
            load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
        }
    }
}

#[test]
fn parameters_that_are_excluded_are_compared() {
    type Change = fn(&mut ParamDesc);
    let described = |change: Change| {
        let desc = |name| ParamDesc::new(name, Shape::new([4]).unwrap(), DType::F32);
        let mut params = ["a", "b"].map(desc);
        change(&mut params[1]);
        let plan = Planner::new(Lars::default().into()).plan(&params).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let state = plan.allocate(&backend).unwrap();
        (plan, state, backend)
    };
    let changes: [(Change, &str); 3] = [
        (|param| param.weight_decay = Some(0.0), "weight_decay_of@b"),
        (|param| param.trust = Some(Trust::Plain), "trust_of@b"),
        (|param| param.weight_decay = Some(0.25), "weight_decay_of@b"),
    ];
    for (change, named) in changes {
        let folder = tempfile::tempdir().unwrap();
        let (plan, state, backend) = described(change);
        save_state(&state, &backend, &folder.path().join("state")).unwrap();
        let (mut rank, texts) = (Solo::default(), BTreeMap::new());
        let mut comms = Comms::direct(&mut rank);
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), texts).unwrap();
        for (own, refused) in [(change, false), (|_: &mut ParamDesc| {}, true)] {
            let (plan, mut state, backend) = described(own);
            let file = load_state(&mut state, &backend, &folder.path().join("state")).map(drop);
            for outcome in
                [file, load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).map(drop)]
            {
                match outcome {
                    Ok(()) => assert!(!refused, "{named}"),
                    Err(error) => assert!(refused && error.to_string().contains(named), "{error}"),
                }
            }
        }
    }
}

#[test]
fn rates_may_change_and_what_a_run_has_changed_itself_is_its_own() {
    let lars = Lars::default();
    let l2 = momentum(WeightDecay::L2(0.1));
    let cases: [(Optimizer, Optimizer); 2] = [
        (lars.into(), Lars { lr: 5.0, rescale: 0.5, ..lars }.into()),
        (l2.into(), Sgd { lr: 0.5, rescale: 0.25, ..l2 }.into()),
    ];
    for (saved, other) in cases {
        let folder = tempfile::tempdir().unwrap();
        both_saved(&Planner::new(saved), folder.path());
        for outcome in both_loaded(&Planner::new(other), folder.path()) {
            outcome.unwrap();
        }
    }
    // A fixed loss scale keeps itself, whatever the run before had; one that moves is not lost
    // unseen.
    let scaled = |scaling| Planner::new(l2.into()).with(scaling);
    let (dynamic, fixed) = (LossScaling::dynamic(), LossScaling::fixed(8.0));
    let of = [Planner::new(l2.into()), scaled(fixed), scaled(dynamic)];
    for (saved, own) in of.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        both_saved(own, folder.path());
        for (loaded, other) in of.iter().enumerate() {
            for outcome in both_loaded(other, folder.path()) {
                assert_eq!(outcome.is_err(), (saved, loaded) == (2, 0), "{saved} {loaded}");
            }
        }
    }
    // A momentum that is moved as training goes: a run begins as the one before did, or goes on
    // where it was, and nothing else.
    let folder = tempfile::tempdir().unwrap();
    let (plan, mut state, backend) = start(&Planner::new(lars.into()));
    state.set_optimizer(Lars { momentum: 0.7, ..lars }.into()).unwrap();
    save_state(&state, &backend, &folder.path().join("state")).unwrap();
    let (mut rank, texts) = (Solo::default(), BTreeMap::new());
    save(
        RunToSave::of(&plan, &state, &backend),
        &mut Comms::direct(&mut rank),
        folder.path(),
        texts,
    )
    .unwrap();
    for (momentum, fits) in [(0.9, true), (0.7, true), (0.8, false)] {
        let planner = Planner::new(Lars { momentum, ..lars }.into());
        for outcome in both_loaded(&planner, folder.path()) {
            assert_eq!(outcome.is_ok(), fits, "{momentum}");
        }
    }
}

#[test]
fn what_a_run_has_set_or_unset_itself_is_its_own() {
    let plain = Sgd::with_momentum();
    let nesterov = Sgd { nesterov: Nesterov::Nesterov, ..plain };
    let l2 = Sgd { weight_decay: WeightDecay::L2(0.1), ..Sgd::default() };
    let decoupled = Sgd { weight_decay: WeightDecay::Decoupled(0.1), ..l2 };
    let other = Sgd { dampening: 0.5, ..plain };
    for (began, now, other) in [
        (plain, nesterov, other),
        (nesterov, plain, other),
        (l2, decoupled, Sgd::default()),
        (decoupled, l2, Sgd::default()),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (plan, mut state, backend) = start(&Planner::new(began.into()));
        state.set_optimizer(now.into()).unwrap();
        save_state(&state, &backend, &folder.path().join("state")).unwrap();
        let (mut rank, texts) = (Solo::default(), BTreeMap::new());
        save(
            RunToSave::of(&plan, &state, &backend),
            &mut Comms::direct(&mut rank),
            folder.path(),
            texts,
        )
        .unwrap();
        for (rule, fits) in [(began, true), (now, true), (other, false)] {
            for outcome in both_loaded(&Planner::new(rule.into()), folder.path()) {
                assert_eq!(outcome.is_ok(), fits, "{began:?} to {now:?} as {rule:?}: {outcome:?}");
            }
        }
        // The other way round, too: a run that has changed it takes what it began with.
        let folder = tempfile::tempdir().unwrap();
        both_saved(&Planner::new(began.into()), folder.path());
        let (plan, mut state, backend) = start(&Planner::new(began.into()));
        state.set_optimizer(now.into()).unwrap();
        load_state(&mut state, &backend, &folder.path().join("state")).unwrap();
        load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
    }
}

#[test]
fn other_settings_are_taken_until_the_same_are_asked_for_again() {
    let (saved, own) = (Lars::default(), Lars { momentum: 0.5, ..Lars::default() });
    let folder = tempfile::tempdir().unwrap();
    both_saved(&Planner::new(saved.into()), folder.path());
    let (plan, mut state, backend) = start(&Planner::new(own.into()));
    for taken in [false, true, false] {
        if taken {
            state.any_settings();
        } else {
            state.same_settings();
        }
        assert_eq!(state.takes_any_settings(), taken);
        assert_eq!(load_state(&mut state, &backend, &folder.path().join("state")).is_ok(), taken);
        assert_eq!(load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).is_ok(), taken);
    }
}

#[test]
fn settings_of_single_parameters_are_compared_too() {
    let planner = |beta1| {
        let free = ScheduleFree { beta1, ..ScheduleFree::default() };
        Planner::new(Adam::default().into()).group(["b"], free.into())
    };
    let folder = tempfile::tempdir().unwrap();
    both_saved(&planner(0.9), folder.path());
    for outcome in both_loaded(&planner(0.9), folder.path()) {
        outcome.unwrap();
    }
    for outcome in both_loaded(&planner(0.8), folder.path()) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("`beta1@b`: expected 0.8, found 0.9"), "{error}");
    }
}

/// The checksum of a state file's other metadata, as docs/RELIABILITY.md has it.
pub(crate) fn sum_of(texts: &HashMap<String, String>) -> String {
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
    both_saved(&Planner::new(ScheduleFree::default().into()), folder.path());
    let file = TensorFile::read(&path).unwrap();
    let mut texts = file.metadata().clone();
    let settings = ["beta1", "warmup_steps", "xxh3", "set"];
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
    for outcome in both_loaded(&Planner::new(other.into()), folder.path()) {
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
    save_state(&state, &backend, &file).unwrap();
    let (mut rank, texts) = (Solo::default(), BTreeMap::new());
    save(
        RunToSave::of(&plan, &state, &backend),
        &mut Comms::direct(&mut rank),
        folder.path(),
        texts,
    )
    .unwrap();
    assert_eq!(Manifest::read(folder.path()).unwrap().optimizer, "adamw");
    // By a plan of it, and by one that has it by now.
    for replaced in [false, true] {
        let planned = if replaced { adam } else { adamw };
        let (plan, mut state, backend) = start(&Planner::new(planned.into()));
        if replaced {
            let refused = load(RunToLoad::of(&plan, &mut state, &backend), folder.path())
                .unwrap_err()
                .to_string();
            assert!(refused.contains("`optimizer`: expected adam, found adamw"), "{refused}");
            state.set_optimizer(adamw.into()).unwrap();
        }
        load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
        load_state(&mut state, &backend, &file).unwrap();
    }
}

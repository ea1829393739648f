//! State files: whose they are, whether they are whole, and whether a run can have left such state
//! behind.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_adagrad::Adagrad;
use fusestep_checkpoint::{load, load_state, save, save_state};
use fusestep_collective::Solo;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{
    Backend, BackendError, Launch, LaunchReport, Objective, Reduce, WeightDecay,
};
use fusestep_planner::{
    Comms, Lender, Optimizer, Plan, PlanError, Planner, RunAlone, RunToLoad, RunToSave, State,
    Tensors,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use fusestep_tensor_file::{TensorBytes, TensorFile, write_atomically};
use fusestep_testkit::each_rule;

fn params() -> Vec<ParamDesc> {
    let desc = |name, numel| ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::F32);
    vec![desc("a", 5), desc("b", 3)]
}

fn start(rule: Optimizer) -> (Plan, State, CpuBackend) {
    let plan = Planner::new(rule).plan(&params()).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let state = plan.allocate(&backend).unwrap();
    (plan, state, backend)
}

/// Saves the state of a rule after two steps.
fn saved_state(rule: Optimizer, path: &Path) {
    let (plan, mut state, backend) = start(rule);
    for (name, numel) in [("a", 5), ("b", 3)] {
        let values: Vec<u8> = (0..numel).flat_map(|at| (at as f32 + 0.5).to_le_bytes()).collect();
        for role in [Role::Param, Role::Grad] {
            state.write(&backend, role, name, &values).unwrap();
        }
    }
    for _ in 0..2 {
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    }
    save_state(&state, &backend, path).unwrap();
}

fn loaded(rule: Optimizer, path: &Path) -> Result<Option<String>, PlanError> {
    let (_, mut state, backend) = start(rule);
    let before = format!("{state:?}");
    let outcome = load_state(&mut state, &backend, path);
    if outcome.is_err() {
        assert_eq!(format!("{state:?}"), before, "a load that failed has changed the state");
    }
    outcome
}

fn momentum() -> Sgd {
    Sgd { momentum: 0.9, ..Sgd::default() }
}

/// Adam whose decay is part of the gradient.
fn l2() -> Adam {
    Adam { weight_decay: WeightDecay::L2(0.01), ..Adam::default() }
}

#[test]
fn state_of_another_rule_or_direction_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let rules: [Optimizer; 5] = [
        Adam::default().into(),
        l2().into(),
        Lamb::default().into(),
        momentum().into(),
        Lars::default().into(),
    ];
    for saved in rules {
        saved_state(saved, &path);
        for other in rules {
            let outcome = loaded(other, &path);
            if saved == other {
                assert!(outcome.unwrap().is_some(), "it says whose parameters it belongs to");
                continue;
            }
            let error = outcome.unwrap_err().to_string();
            let same_roles =
                !error.contains("no such tensor") && !error.contains("no parameter given");
            assert!(
                !same_roles || (error.contains(saved.name()) && error.contains(other.name())),
                "{error}"
            );
        }
    }
    saved_state(Adam::default().into(), &path);
    let error = loaded(Sgd::default().into(), &path).unwrap_err().to_string();
    assert!(error.contains("rule and settings keep other tensors"), "{error}");
    saved_state(momentum().into(), &path);
    let turned = Sgd { objective: Objective::Maximize, ..momentum() };
    let error = loaded(turned.into(), &path).unwrap_err().to_string();
    assert!(error.contains("expected maximize, found minimize"), "{error}");
}

/// A file read, changed and written again without its checksums, as a program would that knows
/// nothing of them.
fn rewrite(
    path: &Path,
    change: impl Fn(&str, &mut Vec<u8>),
    metadata: impl Fn(&mut HashMap<String, String>),
) {
    let file = TensorFile::read(path).unwrap();
    let mut tensors = Vec::new();
    for (name, entry) in file.entries() {
        let mut bytes = file.bytes(name).unwrap().to_vec();
        change(name, &mut bytes);
        tensors.push((name.clone(), TensorBytes { bytes: bytes.into(), ..entry.with_bytes(&[]) }));
    }
    let mut texts = file.metadata().clone();
    metadata(&mut texts);
    write_atomically(path, &tensors, texts).unwrap();
}

/// Makes a file one of the first version, which had no checksums.
fn without_checksums(texts: &mut HashMap<String, String>) {
    texts.retain(|key, _| key == "step" || key == "optimizer");
}

#[test]
fn every_flipped_bit_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    saved_state(Adam::default().into(), &path);
    let intact = fs::read(&path).unwrap();
    for bit in (0..intact.len() * 8).step_by(5) {
        let mut damaged = intact.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &damaged).unwrap();
        let error = loaded(Adam::default().into(), &path);
        // A bit of the header may be one that means nothing, such as a space for another.
        let same = TensorFile::read(&path).is_ok_and(|file| {
            let whole = TensorFile::parse(&path, intact.clone()).unwrap();
            file.metadata() == whole.metadata() && file.entries() == whole.entries()
        });
        assert!(error.is_err() || (same && bit / 8 < 8 + header(&intact)), "bit {bit}");
    }
}

fn header(file: &[u8]) -> usize {
    u64::from_le_bytes(file[..8].try_into().unwrap()) as usize
}

#[test]
fn changed_counts_and_newer_or_foreign_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let rule = Adam::default();
    for (key, value, named) in [
        ("step", "3", "checksum"),
        ("step@a", "1", "checksum"),
        ("parameters_xxh3", "0", "checksum"),
        ("version", "3", "newer fusestep"),
        ("format", "pt", "expected fusestep-state, found pt"),
    ] {
        saved_state(rule.into(), &path);
        rewrite(
            &path,
            |_, _| {},
            |texts| {
                texts.insert(key.to_owned(), value.to_owned());
            },
        );
        let error = loaded(rule.into(), &path).unwrap_err().to_string();
        assert!(error.contains(named), "{key} = {value}: {error}");
    }
    for key in ["format", "version", "xxh3"] {
        saved_state(rule.into(), &path);
        rewrite(&path, |_, _| {}, |texts| drop(texts.remove(key)));
        let error = loaded(rule.into(), &path).unwrap_err().to_string();
        let said = "expected metadata of a whole state";
        assert!(error.contains(key) && error.contains(said), "{key}: {error}");
    }
    saved_state(rule.into(), &path);
    rewrite(
        &path,
        |_, _| {},
        |texts| {
            without_checksums(texts);
            texts.insert("step".to_owned(), u64::MAX.to_string());
        },
    );
    let error = loaded(rule.into(), &path).unwrap_err().to_string();
    assert!(error.contains("9007199254740992 at most"), "{error}");
}

#[test]
fn files_of_the_first_version_are_read_and_impossible_values_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let adam: Optimizer = Adam::default().into();
    let adagrad: Optimizer = Adagrad::default().into();
    for (rule, tensor, value, named) in [
        (adam, "a@moment1", -1.0f32, None),
        (
            adam,
            "a@moment2",
            -1.0,
            Some("`a@moment2`: expected finite values of at least 0, found -1 at element 1"),
        ),
        (
            adam,
            "b@moment1",
            f32::NAN,
            Some("`b@moment1`: expected finite values, found NaN at element 1"),
        ),
        (adam, "b@moment2", f32::INFINITY, Some("inf at element 1")),
        (adagrad, "b@sum", -0.5, Some("-0.5 at element 1")),
    ] {
        saved_state(rule, &path);
        let change = |name: &str, bytes: &mut Vec<u8>| {
            if name == tensor {
                bytes[4..8].copy_from_slice(&value.to_le_bytes());
            }
        };
        rewrite(&path, change, without_checksums);
        match (loaded(rule, &path), named) {
            (Ok(parameters), None) => assert_eq!(parameters, None),
            (Err(error), Some(named)) => {
                let error = error.to_string();
                assert!(error.contains(named), "{error}");
            }
            (outcome, _) => panic!("{tensor} = {value}: {outcome:?}"),
        }
    }
}

#[test]
fn state_of_parameters_that_have_taken_no_step_is_zero() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let rms = fusestep_rmsprop::RmsProp { momentum: 0.5, ..Default::default() };
    let amsgrad = Adam { second_moment: fusestep_fused_adam::SecondMoment::Largest, ..l2() };
    let others: [Optimizer; 2] = [amsgrad.into(), rms.into()];
    for rule in each_rule().into_iter().chain(others) {
        for (key, value) in
            [("step", "0"), ("step@a", "0"), ("step", "-1"), ("step", "NaN"), ("step", "1.0")]
        {
            saved_state(rule, &path);
            for old in [true, false] {
                rewrite(
                    &path,
                    |_, _| {},
                    |texts| {
                        if old {
                            without_checksums(texts);
                        }
                        texts.insert(key.to_owned(), value.to_owned());
                        if !old {
                            sign(texts);
                        }
                    },
                );
                let error = loaded(rule, &path).unwrap_err().to_string();
                let named = match value {
                    "0" => "expected zeros, since no step has been taken",
                    _ => "a count of steps",
                };
                assert!(error.contains(named), "{rule:?} {key} {value}: {error}");
                saved_state(rule, &path);
            }
        }
        // A tensor that is missing, and a file that does not say of which rule it is.
        let file = TensorFile::read(&path).unwrap();
        for left_out in file.entries().keys() {
            let kept = file.entries().iter().filter(|(name, _)| *name != left_out);
            let tensors = kept
                .map(|(name, entry)| (name.clone(), entry.with_bytes(file.bytes(name).unwrap())));
            let mut texts = file.metadata().clone();
            without_checksums(&mut texts);
            let other = folder.path().join("other");
            write_atomically(&other, &tensors.collect::<Vec<_>>(), texts).unwrap();
            let error = loaded(rule, &other).unwrap_err().to_string();
            assert!(error.contains(left_out) && error.contains("no such tensor"), "{error}");
        }
        rewrite(&path, |_, _| {}, |texts| texts.retain(|key, _| key == "step"));
        let error = loaded(rule, &path).unwrap_err().to_string();
        assert!(error.contains("`optimizer`") && error.contains("found none"), "{error}");
    }
}

/// Writes the checksum of a file's other metadata.
fn sign(texts: &mut HashMap<String, String>) {
    texts.remove("xxh3");
    let sum = super::settings::sum_of(texts);
    texts.insert("xxh3".to_owned(), sum);
}

/// Runs no launch, and fails once.
struct FailsOnce(CpuBackend, bool);

impl Lender for FailsOnce {
    fn backend(&self) -> &dyn Backend {
        &self.0
    }

    fn launch(&mut self, _: Launch<'_>) -> Result<LaunchReport, BackendError> {
        if std::mem::replace(&mut self.1, true) {
            return Ok(LaunchReport::default());
        }
        Err(BackendError::Device {
            backend: "test",
            operation: "a launch".to_owned(),
            code: 1,
            text: "it fails".to_owned(),
        })
    }

    fn reduce(&mut self, _: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        Ok(LaunchReport::default())
    }
}

#[test]
fn what_a_failed_step_was_to_leave_out_is_no_concern_of_the_step_behind_a_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let plan = Planner::new(momentum().into()).tensors(Tensors::Borrowed).plan(&params()).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    save_state(&state, &backend, &path).unwrap();
    let cpu = CpuBackend::new(NonZeroUsize::MIN);
    let lender = &mut FailsOnce(backend, false);
    state.set_without_gradient("b").unwrap();
    RunAlone::of(&plan, &mut state, &cpu).step_borrowed(lender).unwrap_err();
    // As an adapter does before each step.
    state.set_without_gradient("b").unwrap();
    let refused = RunAlone::of(&plan, &mut state, &cpu).step_borrowed(lender);
    assert_eq!(refused.unwrap_err(), PlanError::Poisoned { step: 1 });
    load_state(&mut state, lender.backend(), &path).unwrap();
    assert_eq!(
        RunAlone::of(&plan, &mut state, &cpu).step_borrowed(lender).unwrap().without_gradient,
        0
    );
    assert_eq!(state.step_of("b").unwrap(), 1);
}

#[test]
fn a_save_that_nobody_could_load_is_refused_and_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let params = ["a", "b"].map(|name| ParamDesc::new(name, Shape::new([4]).unwrap(), DType::F32));
    let plan = Planner::new(Adam::default().into()).plan(&params).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    let moment: [f32; 4] = [0.0, 0.5, 0.0, 0.0];
    let bytes: &[u8] = bytemuck::cast_slice(&moment);
    state.write(&backend, Role::Moment1, "b", bytes).unwrap();
    let file = folder.path().join("state");
    let checkpoint = folder.path().join("checkpoint");
    let save_both = |state: &State| {
        let (mut rank, texts) = (Solo::default(), BTreeMap::new());
        let mut comms = Comms::direct(&mut rank);
        let saved = save(RunToSave::of(&plan, state, &backend), &mut comms, &checkpoint, texts);
        [save_state(state, &backend, &file), saved]
    };
    for steps in [[0, 0], [3, 0]] {
        state.set_steps(steps.into_iter());
        for outcome in save_both(&state) {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("b@moment1") && error.contains("set_step"), "{error}");
        }
        assert!(
            !file.exists()
                && load(RunToLoad::of(&plan, &mut state, &backend), &checkpoint).is_err()
        );
    }
    state.set_steps([0, 3].into_iter());
    for outcome in save_both(&state) {
        outcome.unwrap();
    }
    load_state(&mut state, &backend, &file).unwrap();
    load(RunToLoad::of(&plan, &mut state, &backend), &checkpoint).unwrap();
}

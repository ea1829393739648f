//! State that is infinite or NaN because a run has made it so: it is saved and gone on from, and
//! what is not known to be a run's is refused.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_checkpoint::{Manifest, StateTensors, load, load_state, save, save_state};
use fusestep_collective::{Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Comms, Optimizer, Plan, PlanError, Planner, Run, RunToLoad, RunToSave, Shard, State, Topology,
    ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use fusestep_tensor_file::{TensorBytes, TensorFile, serialize, write_atomically};
use xxhash_rust::xxh3::xxh3_64;

use super::folders::sign;

/// A square beyond f32, and what makes all moments NaN.
const GRADIENTS: [f32; 2] = [3e19, f32::NAN];

/// Whole slots, of which two ranks have half each.
const NUMEL: usize = 128;

fn rules() -> [Optimizer; 2] {
    let momentum = Sgd { momentum: 0.9, ..Sgd::default() };
    [Adam::default().into(), momentum.into()]
}

struct Trained {
    plan: Plan,
    state: State,
    backend: CpuBackend,
}

impl Trained {
    fn new(rule: Optimizer, (topology, zero): (Topology, ZeroStage)) -> Self {
        let desc = |name| ParamDesc::new(name, Shape::new([NUMEL as u64]).unwrap(), DType::F32);
        let planner = Planner::new(rule).with(Shard::new(zero));
        let params = ["w", "b"].map(desc);
        let plan = planner.plan_for(&params, topology).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let state = plan.allocate(&backend).unwrap();
        Self { plan, state, backend }
    }

    fn alone(rule: Optimizer) -> Self {
        Self::new(rule, (Topology::new(0, 1).unwrap(), ZeroStage::None))
    }

    /// A step whose gradient of `w` has one value of these in each half.
    fn step(&mut self, comms: &mut Comms<'_>, value: f32) {
        let mut run = Run::of(&self.plan, &mut self.state, &self.backend, comms);
        for name in ["w", "b"] {
            let mut gradient: Vec<f32> = (0..NUMEL).map(|at| at as f32 - 2.5).collect();
            if name == "w" {
                (gradient[3], gradient[NUMEL - 3]) = (value, value);
            }
            let bytes: Vec<u8> = gradient.iter().flat_map(|g| g.to_le_bytes()).collect();
            run.push_grad(name, &bytes).unwrap();
        }
        run.step().unwrap();
    }

    /// All values of this rank.
    fn values(&self) -> Vec<(String, Vec<u8>)> {
        let mut values = Vec::new();
        for role in [Role::Param, Role::Moment1, Role::Moment2, Role::Velocity] {
            let mut bytes = vec![0; 4 * NUMEL];
            let read = self.state.read(&self.backend, role, "w", &mut bytes);
            if read.is_ok() {
                values.push((role.to_string(), bytes));
            }
        }
        values
    }
}

/// A state file after one step of this gradient.
fn saved(rule: Optimizer, value: f32, path: &Path) {
    let mut run = Trained::alone(rule);
    run.step(&mut Comms::direct(&mut Solo::default()), value);
    save_state(&run.state, &run.backend, path).unwrap();
}

#[test]
fn a_state_file_that_is_not_finite_is_gone_on_from_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    for rule in rules() {
        for value in GRADIENTS {
            let mut one = Trained::alone(rule);
            for _ in 0..2 {
                one.step(&mut Comms::direct(&mut Solo::default()), value);
            }
            let mut first = Trained::alone(rule);
            first.step(&mut Comms::direct(&mut Solo::default()), value);
            save_state(&first.state, &first.backend, &path).unwrap();
            let mut other = Trained::alone(rule);
            load_state(&mut other.state, &other.backend, &path).unwrap();
            for name in ["w", "b"] {
                let mut bytes = vec![0; 4 * NUMEL];
                let backend = &first.backend;
                first.state.read(backend, Role::Param, name, &mut bytes).unwrap();
                other.state.write(backend, Role::Param, name, &bytes).unwrap();
            }
            other.step(&mut Comms::direct(&mut Solo::default()), value);
            assert_eq!(one.values(), other.values(), "{} {value}", rule.name());
            let told = StateTensors::of(&first.state, &first.backend).unwrap();
            let told: Vec<&str> = told.non_finite().collect();
            match (rule.name(), value.is_nan()) {
                ("adamw" | "adam", false) => assert_eq!(told, ["w@moment2"]),
                ("adamw" | "adam", true) => assert_eq!(told, ["w@moment1", "w@moment2"]),
                (_, false) => assert!(told.is_empty(), "{told:?}"),
                (_, true) => assert_eq!(told, ["w@velocity"]),
            }
        }
    }
}

/// Changes a state file and makes all its checksums right.
fn change(
    path: &Path,
    values: impl Fn(&str, &mut Vec<u8>),
    texts: impl Fn(&mut HashMap<String, String>),
) {
    let file = TensorFile::read(path).unwrap();
    let mut metadata = file.metadata().clone();
    texts(&mut metadata);
    let mut tensors = Vec::new();
    for (name, entry) in file.entries() {
        let mut bytes = file.bytes(name).unwrap().to_vec();
        values(name, &mut bytes);
        metadata.insert(format!("xxh3@{name}"), sum(&bytes));
        let tensor = TensorBytes { bytes: bytes.into(), ..entry.with_bytes(&[]) };
        tensors.push((name.clone(), tensor));
    }
    let mut all = Vec::new();
    metadata.remove("xxh3");
    for (key, value) in metadata.iter().collect::<BTreeMap<_, _>>() {
        for text in [key, value] {
            all.extend_from_slice(&(text.len() as u64).to_le_bytes());
            all.extend_from_slice(text.as_bytes());
        }
    }
    metadata.insert("xxh3".to_owned(), sum(&all));
    write_atomically(path, &tensors, metadata).unwrap();
}

fn sum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

#[test]
fn a_state_file_that_does_not_say_so_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let rule: Optimizer = Adam::default().into();
    let key = "non_finite@w@moment2";
    let put = |value: f32| {
        move |name: &str, bytes: &mut Vec<u8>| {
            if name == "w@moment2" {
                bytes[20..24].copy_from_slice(&value.to_le_bytes());
            }
        }
    };
    let says = |count: &'static str| {
        move |texts: &mut HashMap<String, String>| {
            texts.insert(key.to_owned(), count.to_owned());
        }
    };
    let load = || -> Result<_, PlanError> {
        let mut run = Trained::alone(rule);
        let before = run.values();
        let outcome = load_state(&mut run.state, &run.backend, &path);
        assert!(outcome.is_ok() || run.values() == before, "changed all the same");
        outcome
    };
    let refused = |named: &str| {
        let error = load().unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    };
    saved(rule, 3e19, &path);
    change(&path, |_, _| {}, |_| {});
    load().unwrap();
    change(&path, |_, _| {}, |texts| drop(texts.remove(key)));
    refused("`w@moment2`: expected finite values of at least 0, found inf at element 3");
    saved(rule, 3e19, &path);
    change(&path, put(f32::NAN), |_| {});
    refused("`w@moment2`: expected 2 values that are not finite, as the file says, found 3");
    for value in [f32::NEG_INFINITY, -1.0] {
        saved(rule, 3e19, &path);
        change(&path, put(value), says("3"));
        refused(&format!("`w@moment2`: expected values of at least 0, found {value} at element 5"));
    }
    change(&path, put(1.0), says("two"));
    refused("`non_finite@w@moment2`: expected a count of values, found two");
    // Without checksums anyone may have written it.
    saved(rule, 3e19, &path);
    let file = TensorFile::read(&path).unwrap();
    let entries = file.entries().iter();
    let tensors: Vec<_> = entries
        .map(|(name, entry)| (name.clone(), entry.with_bytes(file.bytes(name).unwrap())))
        .collect();
    let mut texts = file.metadata().clone();
    texts.retain(|text, _| ["step", "optimizer", key].contains(&text.as_str()));
    write_atomically(&path, &tensors, texts).unwrap();
    refused("expected finite values of at least 0, found inf at element 3");
}

/// All ranks' values after steps of this gradient, the first from the folder's checkpoint if there
/// is one; saved there at the end if that is asked for.
fn ranks(
    (world, zero): (usize, ZeroStage),
    (steps, value): (usize, f32),
    folder: Option<&Path>,
) -> Vec<Vec<(String, Vec<u8>)>> {
    let outcomes = run_ranks(world, &Options::default(), |mut comm| {
        let mut run = Trained::new(Adam::default().into(), (Topology::of(&comm), zero));
        let mut comms = Comms::direct(&mut comm);
        if let Some(folder) = folder.filter(|folder| folder.join("manifest.json").exists()) {
            load(RunToLoad::of(&run.plan, &mut run.state, &run.backend), folder).unwrap();
        }
        for _ in 0..steps {
            run.step(&mut comms, value);
        }
        if let Some(folder) = folder {
            let (state, backend) = (&run.state, &run.backend);
            let saved =
                save(RunToSave::of(&run.plan, state, backend), &mut comms, folder, BTreeMap::new());
            saved.unwrap();
        }
        if zero == ZeroStage::None {
            return run.values();
        }
        let mut values = run.values();
        values.truncate(1);
        values
    });
    outcomes.unwrap().into_iter().map(|values| values.unwrap()).collect()
}

#[test]
fn a_checkpoint_that_is_not_finite_is_gone_on_from_to_the_same_bits() {
    for world in [1, 2] {
        for zero in [ZeroStage::None, ZeroStage::One] {
            for value in GRADIENTS {
                let place = (world, zero);
                let whole = ranks(place, (2, value), None);
                let folder = tempfile::tempdir().unwrap();
                ranks(place, (1, value), Some(folder.path()));
                let found = Manifest::verify(folder.path()).unwrap();
                let moments = ["w@moment1", "w@moment2"];
                let expected = if value.is_nan() { &moments[..] } else { &moments[1..] };
                assert_eq!(found.non_finite, expected, "{place:?} {value}");
                let params = if value.is_nan() { &["w@param"][..] } else { &[] };
                assert_eq!(found.params_non_finite, params, "{place:?} {value}");
                let resharded = tempfile::tempdir().unwrap();
                let manifest = found.manifest.reshard(folder.path(), resharded.path(), 3);
                assert_eq!(manifest.unwrap().shards.len(), 4);
                let again = Manifest::verify(resharded.path()).unwrap();
                assert_eq!((again.non_finite, again.tensors), (found.non_finite, found.tensors));
                for folder in [folder.path(), resharded.path()] {
                    let resumed = ranks(place, (1, value), Some(folder));
                    assert_eq!(whole, resumed, "{place:?} {value}");
                }
            }
        }
    }
}

#[test]
fn a_checkpoint_that_does_not_say_so_is_refused_and_resharding_does_not_make_it_say_so() {
    let folder = tempfile::tempdir().unwrap();
    ranks((2, ZeroStage::One), (1, 3e19), Some(folder.path()));
    let mut manifest = Manifest::read(folder.path()).unwrap();
    let within = folder.path().join(&manifest.generation);
    for spec in &mut manifest.shards {
        let path = within.join(&spec.file);
        let file = TensorFile::read(&path).unwrap();
        let mut texts = file.metadata().clone();
        texts.retain(|key, _| !key.starts_with("non_finite@"));
        let entries = file.entries().iter();
        let tensors: Vec<_> = entries
            .map(|(name, entry)| (name.clone(), entry.with_bytes(file.bytes(name).unwrap())))
            .collect();
        let bytes = serialize(&path, &tensors, texts).unwrap();
        fs::write(&path, &bytes).unwrap();
        (spec.len_bytes, spec.xxh3) = (bytes.len() as u64, sum(&bytes));
    }
    sign(manifest, folder.path());
    let resharded = tempfile::tempdir().unwrap();
    let manifest = Manifest::read(folder.path()).unwrap();
    manifest.reshard(folder.path(), resharded.path(), 1).unwrap();
    for folder in [folder.path(), resharded.path()] {
        let mut run = Trained::alone(Adam::default().into());
        let loaded = load(RunToLoad::of(&run.plan, &mut run.state, &run.backend), folder);
        for error in [loaded.unwrap_err(), Manifest::verify(folder).unwrap_err()] {
            let error = error.to_string();
            let named = "`w@moment2`: expected finite values of at least 0, found inf at element 3";
            assert!(error.contains(named), "{error}");
        }
    }
}

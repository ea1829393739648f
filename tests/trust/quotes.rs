//! Messages about files stay short, whatever the files say.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_checkpoint::{Manifest, load_state, save_state};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{Plan, Planner, State};
use fusestep_tensor::{DType, ParamDesc, Shape};
use fusestep_tensor_file::{TensorFile, write_atomically};

use super::folders::{expect_saved, loaded, sign, step_and_save};

/// Longer than all that a message may quote, and more than a terminal should show.
const MOST: usize = 4_000;

fn long() -> String {
    "x".repeat(50_000)
}

fn expect_short(error: &str, named: &str) {
    assert!(error.contains(named), "{}", &error[..error.len().min(MOST)]);
    assert!(error.len() <= MOST, "{} bytes about {named}", error.len());
}

#[test]
fn a_manifest_of_long_values_is_refused_shortly() {
    let path = Path::new("manifest.json");
    for text in [
        format!(r#"{{"format":"fusestep-checkpoint","version":"{}"}}"#, long()),
        format!(r#"{{"format":"fusestep-checkpoint","version":{{"{}":1}}}}"#, long()),
        format!(r#"{{"format":"{}","version":1}}"#, long()),
    ] {
        let error = Manifest::parse(path, text.as_bytes()).unwrap_err();
        expect_short(&error.to_string(), "manifest.json");
    }
}

#[test]
fn long_names_shapes_and_sums_of_a_checkpoint_are_quoted_shortly() {
    let folder = tempfile::tempdir().unwrap();
    expect_saved(step_and_save(folder.path().into()));
    let manifest = Manifest::read(folder.path()).unwrap();
    let refused = |changed: Manifest, named: &str| {
        sign(changed, folder.path());
        expect_short(&loaded(folder.path().into()).unwrap_err().to_string(), named);
    };
    let mut names = manifest.clone();
    for at in 0..20 {
        let spec = names.tensors["a@param"].clone();
        names.tensors.insert(format!("{at}{}@param", long()), spec);
    }
    refused(names, "others differ too");
    let mut shape = manifest.clone();
    let spec = shape.tensors.get_mut("a@param").unwrap();
    spec.shape = Shape::new(vec![1; 20_000]).unwrap();
    refused(shape, "`a@param`: expected f32");
    let mut steps = manifest.clone();
    steps.steps_of.insert(long(), 1);
    refused(steps, "a parameter of the plan");
    let mut sums = manifest.clone();
    sums.shards[1].xxh3 = long();
    refused(sums, "expected checksum");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

fn start() -> (Plan, State, CpuBackend) {
    let params = [ParamDesc::new("a", Shape::new([5]).unwrap(), DType::F32)];
    let plan = Planner::new(Adam::default().into()).plan(&params).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let state = plan.allocate(&backend).unwrap();
    (plan, state, backend)
}

#[test]
fn a_long_shape_in_a_state_file_is_quoted_shortly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let (_, mut state, backend) = start();
    save_state(&state, &backend, &path).unwrap();
    let file = TensorFile::read(&path).unwrap();
    let tensors = file.entries().iter().map(|(name, entry)| {
        let mut tensor = entry.with_bytes(file.bytes(name).unwrap());
        tensor.shape.extend([1; 1_500]);
        (name.clone(), tensor)
    });
    write_atomically(&path, &tensors.collect::<Vec<_>>(), file.metadata().clone()).unwrap();
    let error = load_state(&mut state, &backend, &path).unwrap_err().to_string();
    assert!(error.contains("`a@moment1`: expected f32 [5]"), "{error}");
    assert!(error.len() < 1_000, "{} bytes", error.len());
}

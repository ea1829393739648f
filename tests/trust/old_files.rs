//! Files that old versions have written, kept in [old](old): of two ranks after two steps alike
//! (manifest of version 1) and after one apart, under LocalSGD (version 2), and a state file of
//! version 1. Of momentum 0.5 at rate 0.5 with gradients 1, 2, 3, … all values are exact.

use std::collections::BTreeMap;
use std::fs;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};

use fusestep_checkpoint::{Manifest, load, load_state, save};
use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Comms, LocalSgd, Planner, RunToLoad, RunToSave, Shard, State, Topology, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

fn old(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("trust/old").join(name)
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

fn planner() -> Planner {
    let rule = Sgd { lr: 0.5, momentum: 0.5, ..Sgd::default() };
    Planner::new(rule.into())
}

fn desc(name: &str, numel: u64) -> ParamDesc {
    ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::F32)
}

/// Compares a tensor of `a` with 1, 2, 3, … times a factor.
fn expect(state: &State, backend: &CpuBackend, role: Role, factor: f32) {
    let mut bytes = [0; 20];
    state.read(backend, role, "a", &mut bytes).unwrap();
    let expected: Vec<u8> =
        (1..=5u8).flat_map(|at| (f32::from(at) * factor).to_le_bytes()).collect();
    assert_eq!(bytes.as_slice(), expected, "{role}");
}

#[test]
fn checkpoints_of_versions_1_and_2_are_read_and_the_next_save_replaces_them() {
    for (name, version, differ) in [("alike", 1, false), ("apart", 2, true)] {
        let folder = tempfile::tempdir().unwrap();
        copy(&old(name), folder.path());
        let before = Manifest::read(folder.path()).unwrap();
        assert_eq!(before.version, version);
        let planner = if differ {
            planner().with(LocalSgd::every(NonZeroU64::new(100).unwrap()))
        } else {
            planner().with(Shard::new(ZeroStage::One))
        };
        let outcomes = run_ranks(2, &Options::default(), |mut comm| {
            let topology = Topology::of(&comm);
            let params = [desc("a", 5), desc("b", 3)];
            let plan = planner.plan_for(&params, topology).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut comms = Comms::direct(&mut comm);
            let mut state = plan.allocate(&backend).unwrap();
            let caller = load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
            assert_eq!(caller["at"], state.step().to_string());
            if differ {
                let own = (topology.rank + 1) as f32;
                expect(&state, &backend, Role::Param, -0.5 * own);
                expect(&state, &backend, Role::Velocity, own);
            } else {
                expect(&state, &backend, Role::Param, -1.25);
            }
            save(
                RunToSave::of(&plan, &state, &backend),
                &mut comms,
                folder.path(),
                BTreeMap::new(),
            )
            .unwrap();
        });
        for outcome in outcomes.unwrap() {
            outcome.unwrap();
        }
        let after = Manifest::read_whole(folder.path()).unwrap().0;
        assert_eq!((after.version, after.step), (5, before.step));
        assert!(!folder.path().join(&before.generation).exists());
    }
}

#[test]
fn a_state_file_of_version_1_is_read() {
    let plan = planner().plan(&[desc("a", 5)]).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    assert_eq!(load_state(&mut state, &backend, &old("state")).unwrap(), None);
    assert_eq!(state.step(), 2);
    expect(&state, &backend, Role::Velocity, 1.5);
}

//! Checkpoints whose ranks are averaged hold what the ranks' own average would have left, however
//! parameters and state are kept.

use std::collections::BTreeMap;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;

use fusestep_checkpoint::{Manifest, load, save};
use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_launch::{Master, Precision, StateDType};
use fusestep_planner::{
    Averaged, Comms, LocalSgd, Plan, Run, RunToLoad, RunToSave, State, Topology,
};
use fusestep_tensor::Role;

use crate::run::{Case, Mixed};

type Lists = BTreeMap<String, Vec<u8>>;

/// A large parameter, one whose last group is short, one too small for int8, and one without a
/// gradient on any rank.
const NUMELS: [u64; 4] = [8_192, 4_101, 31, 4_096];

fn case(mixed: Mixed, master: Master, state: StateDType) -> Case {
    let precision = Precision { master, state, ..Precision::default() };
    let numels = NUMELS.to_vec();
    Case { world: 3, numels, mixed, state, precision: Some(precision), ..Case::default() }
}

fn rule() -> LocalSgd {
    let every = NonZeroU64::new(1000).expect("not 0");
    LocalSgd { averaged: Averaged::ParamsAndState, ..LocalSgd::every(every) }
}

fn plan_of(case: &Case, topology: Topology) -> Plan {
    case.planner().with(rule()).plan_for(&case.params(), topology).unwrap()
}

/// Bytes of every list of every parameter.
fn lists(plan: &Plan, state: &State, backend: &CpuBackend) -> Lists {
    let mut all = Lists::new();
    for desc in plan.params() {
        let roles = state.roles(&desc.name).unwrap().into_iter();
        for role in roles.filter(|role| *role != Role::Grad) {
            let dtype = state.dtype(role, &desc.name).unwrap();
            let mut bytes = vec![0; role.entries(desc.numel()) as usize * dtype.len_bytes()];
            state.read(backend, role, &desc.name, &mut bytes).unwrap();
            all.insert(format!("{}@{role}", desc.name), bytes);
        }
    }
    all
}

/// Steps of ranks with gradients of their own, which are saved and then averaged. Returns the lists
/// before and after.
fn run(case: &Case, folder: &Path) -> [Lists; 2] {
    let ends = run_ranks(case.world, &Options::default(), |mut comm| {
        let topology = Topology::of(&comm);
        let plan = plan_of(case, topology);
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut comms = Comms::direct(&mut comm);
        let mut state = plan.allocate(&backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            state.write(&backend, Role::Param, &desc.name, &case.first_values(param)).unwrap();
        }
        for step in 0..3 {
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for (param, desc) in plan.params().iter().enumerate().take(NUMELS.len() - 1) {
                let gradient = case.gradient(topology.rank, step, param);
                run.push_grad(&desc.name, &gradient).unwrap();
            }
            run.step().unwrap();
        }
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder, BTreeMap::new()).unwrap();
        let before = lists(&plan, &state, &backend);
        Run::of(&plan, &mut state, &backend, &mut comms).average_now().unwrap();
        [before, lists(&plan, &state, &backend)]
    });
    let ends: Vec<_> = ends.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(ends[0][0] != ends[1][0], "ranks have values of their own");
    assert!(ends.iter().all(|[_, after]| *after == ends[0][1]), "and end alike");
    ends[0].clone()
}

/// The lists of each rank that has loaded a checkpoint.
fn loaded(case: &Case, folder: &Path) -> Vec<Lists> {
    let ends = run_ranks(case.world, &Options::default(), |comm| {
        let plan = plan_of(case, Topology::of(&comm));
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        load(RunToLoad::of(&plan, &mut state, &backend), folder).unwrap();
        lists(&plan, &state, &backend)
    });
    ends.unwrap().into_iter().map(Result::unwrap).collect()
}

#[test]
fn an_averaged_checkpoint_has_the_bits_of_ranks_that_average() {
    let masters = [Master::None, Master::F32, Master::Remainder];
    let of_bf16 = [StateDType::Compute, StateDType::Int8]
        .into_iter()
        .flat_map(|state| masters.map(|master| case(Mixed::Yes, master, state)));
    let cases = of_bf16.chain([
        case(Mixed::No, Master::None, StateDType::Compute),
        case(Mixed::No, Master::None, StateDType::Int8),
        case(Mixed::Yes, Master::Remainder8, StateDType::Int8),
    ]);
    for case in cases {
        let folders: [_; 2] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let [from, to] = folders.each_ref().map(|folder| folder.path());
        let [before, after] = run(&case, from);
        let written = Manifest::read(from).unwrap().average(from, to, 2).unwrap();
        for world in [1, 2] {
            let again = tempfile::tempdir().unwrap();
            written.reshard(to, again.path(), 1).unwrap();
            for found in loaded(&Case { world, ..case.clone() }, again.path()) {
                assert!(found.keys().eq(after.keys()), "{case:?}");
                for (name, bytes) in &after {
                    assert!(found[name] == *bytes, "{name} of {case:?}");
                }
            }
        }
        let codes = before.keys().filter(|name| name.ends_with("_units")).count();
        assert_eq!(codes > 0, case.state == StateDType::Int8, "{case:?}");
    }
}

//! State in int8 on many ranks: shards end between groups, so every stage gives the bits of one
//! rank, and what some ranks save others resume.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_checkpoint::{KeptState, Manifest, convert, load, load_state, save, save_state};
use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_elementwise::coded::{CodedState, Coding, Dither, decode, encode, units_of};
use fusestep_launch::{Master, Precision, StateDType};
use fusestep_planner::{
    Averaged, Comms, Distributed, FuseReduceIntoUpdate, LocalSgd, Ownership, PlanError, Planner,
    ReducedWhen, Run, RunToLoad, RunToSave, Topology, UpdateInBackward, ZeroStage,
};
use fusestep_tensor::{DType, Role, UNIT_ELEMENTS};
use fusestep_testkit::each_rule;

use crate::checkpoints::copy_all;
use crate::run::{Case, Measured, Mixed, lacking, whole_params};

/// Sizes at the border of int8, with groups that end early, and longer than a bucket.
const NUMELS: [u64; 8] = [70_001, 4_095, 0, 31, 4_097, 131_072, 4_096, 5_003];

const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

fn case() -> Case {
    Case { numels: NUMELS.to_vec(), state: StateDType::Int8, ..Case::default() }
}

fn with_codes(rule: &fusestep_planner::Optimizer) -> bool {
    let int8 = Precision { state: StateDType::Int8, ..Precision::default() };
    rule.rule().kernel(DType::F32, int8).is_ok()
}

#[test]
fn ranks_and_stages_give_the_bits_of_one_rank() {
    for world in 1..=4 {
        for zero in STAGES {
            for (streams, cap) in [(0, Some(100_000)), (2, Some(7_777)), (0, None)] {
                let case = Case {
                    world,
                    zero,
                    streams,
                    cap,
                    without_gradient: lacking(world, 1),
                    ..case()
                };
                assert!(case.run().params == case.by_hand().params, "{case:?}");
            }
        }
    }
}

#[test]
fn every_rule_with_codes_gives_the_bits_of_one_rank() {
    let rules: Vec<_> = each_rule().into_iter().filter(with_codes).collect();
    assert!(rules.len() >= 7, "{rules:?}");
    for rule in rules {
        for zero in STAGES {
            let case = Case { rule, world: 3, zero, ..case() };
            assert!(case.run().params == case.by_hand().params, "{case:?}");
        }
    }
}

#[test]
fn clipping_scaling_measuring_and_owners_of_whole_tensors_change_nothing_else() {
    for world in [1, 2, 3] {
        for zero in STAGES {
            let base = Case { world, zero, ..case() };
            let clipped = Case {
                clip: Some(0.5),
                scaled: Some(64.0),
                infinite: Some((0, 1, 4)),
                ..base.clone()
            };
            let measured = Case { measured: Measured::Yes, ..base.clone() };
            for case in [clipped, measured] {
                let (found, expected) = (case.run(), case.by_hand());
                assert!(found.params == expected.params, "{case:?}");
                assert_eq!(found.skipped, expected.skipped);
            }
            if zero != ZeroStage::None {
                let owned = Case { ownership: Ownership::Tensors, ..base };
                assert!(owned.run().params == owned.by_hand().params, "{owned:?}");
            }
        }
    }
}

#[test]
fn parameters_of_bf16_with_and_without_further_bits_share_out_alike() {
    for master in [Master::None, Master::F32, Master::Remainder, Master::Remainder8] {
        let precision = Precision { master, state: StateDType::Int8, ..Precision::default() };
        let base = Case { mixed: Mixed::Yes, precision: Some(precision), ..case() };
        for world in [1, 2, 3] {
            let whole = Case { world, ..base.clone() }.run();
            for zero in STAGES {
                for (streams, cap) in [(0, Some(100_000)), (2, Some(7_777))] {
                    let case = Case { world, zero, streams, cap, ..base.clone() };
                    assert!(case.run().params == whole.params, "{case:?}");
                }
            }
        }
    }
}

#[test]
fn micro_steps_updates_in_backward_and_averages_keep_their_bits() {
    for world in [2, 3] {
        for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
            let whole = Case { world, merge: 2, reduced, ..case() };
            let expected = whole.run().params;
            for zero in STAGES {
                let case = Case { zero, ..whole.clone() };
                assert!(case.run().params == expected, "{case:?}");
            }
        }
        for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two] {
            let case = Case { world, zero, ..case() };
            let ends = run_ranks(world, &Options::default(), |mut comm| {
                let planner = case.planner().with(UpdateInBackward::default());
                let plan = planner.plan_for(&case.params(), Topology::of(&comm)).unwrap();
                let mut comms = Comms::direct(&mut comm);
                let backend = CpuBackend::new(NonZeroUsize::MIN);
                let mut state = plan.allocate(&backend).unwrap();
                steps(&case, &plan, &mut state, &mut comms, 0..case.steps)
            });
            for end in ends.unwrap() {
                assert!(end.unwrap() == case.by_hand().params, "in backward: {case:?}");
            }
        }
        // Ranks end alike, as `run` sees; each has state of its own.
        let local = LocalSgd::every(std::num::NonZeroU64::new(2).unwrap());
        let precision = Some(Precision {
            master: Master::Remainder8,
            state: StateDType::Int8,
            ..Precision::default()
        });
        let mixed = Case { mixed: Mixed::Yes, precision, ..case() };
        Case { world, local_sgd: Some(local), ..mixed }.run();
        let averaged = Case { world, local_sgd: Some(local), ..case() }.run().params;
        assert!(averaged != Case { world, ..case() }.run().params);
    }
}

#[test]
fn one_pass_over_memory_writes_codes_and_units_to_the_ranks_that_keep_them() {
    let precision = |master| Precision { master, state: StateDType::Int8, ..Precision::default() };
    let mixed = Case { mixed: Mixed::Yes, ..case() };
    let bytes = Case { precision: Some(precision(Master::Remainder8)), ..mixed };
    for world in [2, 3, 4] {
        let stages = [ZeroStage::None, ZeroStage::One];
        let cases =
            stages.map(|zero| [case(), bytes.clone()].map(|own| Case { world, zero, ..own }));
        for case in cases.into_iter().flatten() {
            let ends = run_ranks(world, &Options::default(), |mut comm| {
                let planner = case.planner().with(FuseReduceIntoUpdate);
                let plan = planner.plan_for(&case.params(), Topology::of(&comm)).unwrap();
                let fused = plan.explain().iter().filter(|n| n.pass == "fuse_reduce_into_update");
                let reason = fused.map(|note| note.to_string()).collect::<String>();
                assert!(reason.contains("applied"), "{reason}");
                let backend = CpuBackend::new(NonZeroUsize::MIN);
                let mut comms = Comms::direct(&mut comm);
                let mut state = plan.allocate_on(&backend, comms.communicator()).unwrap();
                let params = steps(&case, &plan, &mut state, &mut comms, 0..case.steps);
                let all_keep = case.zero == ZeroStage::None;
                (params, if all_keep { kept_by_all(&plan, &state) } else { BTreeMap::new() })
            });
            let separate = Case { world, ..case.clone() }.run().params;
            let ends: Vec<_> = ends.unwrap().into_iter().map(Result::unwrap).collect();
            for (params, kept) in &ends {
                assert!(*params == separate, "{case:?}");
                assert!(*kept == ends[0].1, "state of {case:?}");
            }
            assert_eq!(ends[0].1.is_empty(), case.zero != ZeroStage::None);
        }
    }
}

/// Ranks that average state hold what the mean of their values codes as.
#[test]
fn averages_of_state_are_those_of_what_codes_read_as() {
    let world = 3;
    let rule = LocalSgd {
        averaged: Averaged::ParamsAndState,
        ..LocalSgd::every(std::num::NonZeroU64::new(2).unwrap())
    };
    for precision in [Master::None, Master::Remainder8].map(|master| Precision {
        master,
        state: StateDType::Int8,
        ..Precision::default()
    }) {
        let mixed = if precision.master == Master::None { Mixed::No } else { Mixed::Yes };
        let case = Case { world, mixed, precision: Some(precision), ..case() };
        let ends = run_ranks(world, &Options::default(), |mut comm| {
            let plan = case.planner().with(rule).plan_for(&case.params(), Topology::of(&comm));
            let plan = plan.unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut comms = Comms::direct(&mut comm);
            let mut state = plan.allocate(&backend).unwrap();
            steps(&case, &plan, &mut state, &mut comms, 0..1);
            let before = kept_by_all(&plan, &state);
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            run.average_now().unwrap();
            (before, kept_by_all(&plan, &state))
        });
        let ends: Vec<_> = ends.unwrap().into_iter().map(Result::unwrap).collect();
        let of_f32 = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<u8, f32>(bytes);
        for desc in case.params() {
            for role in [Role::Moment1, Role::Moment2] {
                let key = format!("{}@{role}", desc.name);
                let units = format!("{}@{}", desc.name, role.units().unwrap());
                for (_, end) in &ends {
                    assert!(
                        end[&key] == ends[0].1[&key] && end.get(&units) == ends[0].1.get(&units)
                    );
                }
                if !ends[0].1.contains_key(&units) {
                    continue;
                }
                let coding = Coding::of(role).unwrap();
                let read = |lists: &BTreeMap<String, Vec<u8>>| {
                    let mut values = vec![0.0; lists[&key].len()];
                    decode(coding, &lists[&key], &of_f32(&lists[&units]), &mut values).unwrap();
                    values
                };
                let each: Vec<_> = ends.iter().map(|(before, _)| read(before)).collect();
                let mean = |at: usize| ((each[0][at] + each[1][at]) + each[2][at]) / 3.0;
                let means: Vec<f32> = (0..each[0].len()).map(mean).collect();
                let (mut codes, mut own) = (vec![0; means.len()], vec![0.0; units_of(means.len())]);
                let list = CodedState { codes: &mut codes, units: &mut own };
                encode(coding, &means, list, &Dither::NEAREST).unwrap();
                assert!(codes == ends[0].1[&key], "{key}");
                assert!(own == of_f32(&ends[0].1[&units]), "{key}");
            }
        }
    }
}

/// The state of all parameters, where every rank keeps it.
fn kept_by_all(
    plan: &fusestep_planner::Plan,
    state: &fusestep_planner::State,
) -> BTreeMap<String, Vec<u8>> {
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut all = BTreeMap::new();
    for desc in plan.params() {
        for role in state.roles(&desc.name).unwrap().into_iter().filter(|role| role.is_state()) {
            let dtype = state.dtype(role, &desc.name).unwrap();
            let mut bytes = vec![0; role.entries(desc.numel()) as usize * dtype.len_bytes()];
            if state.read(&backend, role, &desc.name, &mut bytes).is_ok() {
                all.insert(format!("{}@{role}", desc.name), bytes);
            }
        }
    }
    all
}

/// Runs steps of a case, from first values if they begin with 0.
fn steps(
    case: &Case,
    plan: &fusestep_planner::Plan,
    state: &mut fusestep_planner::State,
    comms: &mut Comms<'_>,
    steps: std::ops::Range<u64>,
) -> Vec<Vec<u8>> {
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let rank = plan.topology().rank;
    for (param, desc) in plan.params().iter().enumerate().filter(|_| steps.start == 0) {
        state.write(&backend, Role::Param, &desc.name, &case.first_values(param)).unwrap();
    }
    let mut run = Run::of(plan, state, &backend, comms);
    for step in steps {
        for (param, desc) in plan.params().iter().enumerate() {
            run.push_grad(&desc.name, &case.gradient(rank, step, param)).unwrap();
        }
        run.step().unwrap();
    }
    whole_params(&mut run)
}

/// Steps `from..to` on all ranks, with equal gradients; loads before if `from` is above 0, and
/// saves after.
fn part(case: &Case, folder: &Path, from: u64, to: u64) -> Vec<Vec<u8>> {
    let outcomes = run_ranks(case.world, &Options::default(), |mut comm| {
        let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut comms = Comms::direct(&mut comm);
        let mut state = plan.allocate(&backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate().filter(|_| from == 0) {
            state.write(&backend, Role::Param, &desc.name, &case.first_values(param)).unwrap();
        }
        if from > 0 {
            load(RunToLoad::of(&plan, &mut state, &backend), folder).unwrap();
        }
        for step in from..to {
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for (param, desc) in plan.params().iter().enumerate() {
                run.push_grad(&desc.name, &case.gradient(0, step, param)).unwrap();
            }
            run.step().unwrap();
        }
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder, BTreeMap::new()).unwrap();
        whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    });
    outcomes.unwrap().pop().unwrap().unwrap()
}

#[test]
fn runs_saved_on_4_ranks_go_on_exactly_on_others() {
    let with = |master| Some(Precision { master, state: StateDType::Int8, ..Precision::default() });
    for (mixed, precision) in [
        (Mixed::No, None),
        (Mixed::Yes, with(Master::Remainder)),
        (Mixed::Yes, with(Master::Remainder8)),
    ] {
        let base = Case { world: 4, zero: ZeroStage::Two, mixed, precision, ..case() };
        let folder = tempfile::tempdir().unwrap();
        part(&base, folder.path(), 0, 2);
        for (world, zero) in
            [(1, ZeroStage::None), (2, ZeroStage::Three), (4, ZeroStage::One), (4, ZeroStage::None)]
        {
            let other = Case { world, zero, ..base.clone() };
            let (copy, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            copy_all(folder.path(), copy.path());
            let resumed = part(&other, copy.path(), 2, 4);
            assert!(resumed == part(&other, whole.path(), 0, 4), "{world} {zero:?}");
        }
    }
}

/// Values of a state's list of a parameter, read from its codes if it has some.
fn values_of(folder: &Path, name: &str, role: Role) -> Vec<f32> {
    let (manifest, tensors) = Manifest::read_whole(folder).unwrap();
    let key = format!("{name}@{role}");
    let of_f32 = |key: &str| bytemuck::pod_collect_to_vec::<u8, f32>(&tensors[key]);
    match manifest.tensors[&key].dtype {
        DType::U8 => {
            let units = of_f32(&format!("{name}@{}", role.units().unwrap()));
            let mut values = vec![0.0; tensors[&key].len()];
            decode(Coding::of(role).unwrap(), &tensors[&key], &units, &mut values).unwrap();
            values
        }
        _ => of_f32(&key),
    }
}

#[test]
fn checkpoints_are_converted_to_other_types_of_state_and_back() {
    let base = Case { world: 2, zero: ZeroStage::One, ..case() };
    let [coded, wide, again] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    part(&base, coded.path(), 0, 2);
    let converted = |from: &tempfile::TempDir, to: &tempfile::TempDir, dtype| {
        let state = KeptState { dtype, keep_f32: &[] };
        convert(from.path(), to.path(), state).unwrap()
    };
    let manifest = converted(&coded, &wide, StateDType::Compute);
    converted(&wide, &again, StateDType::Int8);
    let names: Vec<String> = base.params().into_iter().map(|param| param.name).collect();
    for (name, numel) in names.iter().zip(NUMELS) {
        for role in [Role::Moment1, Role::Moment2] {
            let key = format!("{name}@{role}");
            assert_eq!(manifest.tensors[&key].dtype, DType::F32, "{key}");
            let read = values_of(coded.path(), name, role);
            assert!(read == values_of(wide.path(), name, role), "{key} of {numel}");
            let codes = |folder: &Path| Manifest::read_whole(folder).unwrap().1[&key].clone();
            assert!(codes(coded.path()) == codes(again.path()), "{key} of {numel}");
        }
    }
    // A run in f32 goes on with the one, and a run in int8 with the other.
    let in_f32 = Case { state: StateDType::Compute, ..base.clone() };
    part(&in_f32, wide.path(), 2, 4);
    part(&base, again.path(), 2, 4);
}

#[test]
fn checkpoints_of_other_formats_and_names_are_refused_by_name() {
    let base = Case { world: 1, numels: vec![4_100, 7], ..case() };
    let folder = tempfile::tempdir().unwrap();
    part(&base, folder.path(), 0, 1);
    let refused = |planner: Planner| {
        let plan = planner.plan(&base.params()).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap_err().to_string()
    };
    let in_f32 = refused(Case { state: StateDType::Compute, ..base.clone() }.planner());
    assert!(in_f32.contains("int8"), "{in_f32}");
    let kept = refused(base.planner().keep_f32(["layer0"]));
    assert!(kept.contains("keep_f32") || kept.contains("moment"), "{kept}");
}

#[test]
fn state_files_bring_codes_and_units_and_wild_ones_are_refused() {
    let base = Case { world: 1, numels: vec![4_100, 7], ..case() };
    let plan = base.planner().plan(&base.params()).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let ready = || {
        let mut state = plan.allocate(&backend).unwrap();
        let mut comms = Comms::alone();
        steps(&base, &plan, &mut state, &mut comms, 0..2);
        state
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let mut state = ready();
    save_state(&state, &backend, &path).unwrap();
    let mut other = plan.allocate(&backend).unwrap();
    load_state(&mut other, &backend, &path).unwrap();
    let name = "layer0.weight0";
    for role in [Role::Moment1, Role::Moment2] {
        let codes: [&[u8]; 2] = [&state, &other].map(|state| state.view(role, name).unwrap());
        assert!(codes[0] == codes[1] && codes[0].len() == 4_100);
        let role = role.units().unwrap();
        let units: [&[f32]; 2] = [&state, &other].map(|state| state.view(role, name).unwrap());
        assert!(units[0] == units[1] && units[0].len() == 129);
    }
    let mut refused = |role: Role, bytes: Vec<u8>| {
        let mut wild = ready();
        wild.write(&backend, role, name, &bytes).unwrap();
        save_state(&wild, &backend, &path).unwrap();
        load_state(&mut state, &backend, &path).unwrap_err().to_string()
    };
    let mut codes = vec![9; 4_100];
    codes[77] = 0;
    let text = refused(Role::Moment2, codes);
    let expected = "layer0.weight0@moment2`: expected codes from 1 to 255, since a step has been \
                    taken, found 0 at element 77";
    assert!(text.contains(expected), "{text}");
    let mut units = vec![1e-3f32; 129];
    units[128] = -1e-3;
    let text = refused(Role::Moment1Units, units.iter().flat_map(|u| u.to_le_bytes()).collect());
    assert!(text.contains("moment1_units") && text.contains("at element 128"), "{text}");
}

#[test]
fn a_gradient_that_is_not_finite_is_saved_and_resumed_as_such() {
    let base = Case { world: 2, zero: ZeroStage::One, infinite: Some((0, 1, 4)), ..case() };
    let (folder, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    part(&base, folder.path(), 0, 2);
    assert!(part(&base, folder.path(), 2, 4) == part(&base, whole.path(), 0, 4));
}

#[test]
fn shards_end_between_groups_and_the_plan_tells_what_is_allocated() {
    for world in 2..=4 {
        for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            for rank in 0..world {
                let case = Case { world, zero, cap: Some(7_777), ..case() };
                let topology = Topology::new(rank, world).unwrap();
                let plan = case.planner().plan_for(&case.params(), topology).unwrap();
                for spec in plan.storages() {
                    for part in &spec.shard {
                        let ends = [part.elements.start, part.elements.end, part.at];
                        let cut = ends.map(|end| end % UNIT_ELEMENTS);
                        assert_eq!(cut, [0; 3], "{part:?}");
                    }
                }
            }
        }
    }
    let sizes = |state| {
        let case = Case { numels: vec![1 << 20], state, ..case() };
        let plan = case.planner().plan(&case.params()).unwrap();
        (plan.summary().state_bytes, plan.traffic_bytes())
    };
    let (numel, units) = (1u64 << 20, 1u64 << 15);
    assert_eq!(sizes(StateDType::Compute), (8 * numel, 28 * numel));
    assert_eq!(sizes(StateDType::Int8), (2 * (numel + 4 * units), 16 * numel + 16 * units));
}

#[test]
fn what_does_not_go_with_int8_is_refused_when_the_plan_is_made() {
    let case = Case { world: 2, ..case() };
    let topology = Topology::new(0, 2).unwrap();
    let refused =
        |planner: Planner| -> PlanError { planner.plan_for(&case.params(), topology).unwrap_err() };
    let slices = Distributed::params([case.params()[0].name.clone()]);
    let text = refused(case.planner().with(slices)).to_string();
    assert!(text.contains("state_dtype int8") && text.contains("slices"), "{text}");
    for rule in each_rule().into_iter().filter(|rule| !with_codes(rule)) {
        let text = refused(Case { rule, ..case.clone() }.planner()).to_string();
        assert!(text.contains("int8") && text.contains("f32 or bf16"), "{text}");
    }
}

//! What a checkpoint holds beside tensors: steps skipped, the loss scale, and nothing of a
//! micro-step that is not over.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use fusestep_checkpoint::{load, load_state, save, save_state};
use fusestep_collective::Solo;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{
    Comms, LossScaling, MAX_STEPS, Plan, Planner, Run, RunToLoad, RunToSave, State, Topology,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

fn start() -> (Plan, State, CpuBackend) {
    start_at(LossScaling::dynamic())
}

fn start_at(scaling: LossScaling) -> (Plan, State, CpuBackend) {
    let params = ["a", "b"].map(|name| ParamDesc::new(name, Shape::new([3]).unwrap(), DType::F32));
    let planner = Planner::new(Adam::default().into()).with(scaling);
    let plan = planner.plan_for(&params, Topology::new(0, 1).unwrap()).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let state = plan.allocate(&backend).unwrap();
    (plan, state, backend)
}

fn give(run: &mut (Plan, State, CpuBackend), comms: &mut Comms<'_>, name: &str, value: f32) {
    let (plan, state, backend) = run;
    let bytes: Vec<u8> = [value; 3].iter().flat_map(|x| x.to_le_bytes()).collect();
    Run::of(plan, state, backend, comms).push_grad(name, &bytes).unwrap();
}

#[test]
fn skipped_steps_missed_steps_and_the_scale_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut comm = Solo::new();
    let mut comms = Comms::direct(&mut comm);
    let mut run = start();
    for (a, b) in [(1.0, Some(2.0)), (f32::INFINITY, Some(1.0)), (3.0, None)] {
        give(&mut run, &mut comms, "a", a);
        if let Some(b) = b {
            give(&mut run, &mut comms, "b", b);
        }
        let (plan, state, backend) = &mut run;
        Run::of(plan, state, backend, &mut comms).step().unwrap();
    }
    let counts = |state: &State| {
        let scale = state.loss_scale().unwrap();
        let steps = ["a", "b"].map(|name| state.step_of(name).unwrap());
        let scale = (scale.scale(), scale.good_steps(), scale.bad_steps());
        (state.step(), state.skipped(), steps, scale)
    };
    let (plan, state, backend) = &run;
    save(RunToSave::of(plan, state, backend), &mut comms, folder.path(), BTreeMap::new()).unwrap();
    let expected = counts(state);
    assert_eq!(expected, (2, 1, [2, 1], (32_768.0, 1, 0)));
    let (plan, mut state, backend) = start();
    load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
    assert_eq!(counts(&state), expected);
}

#[test]
fn a_fixed_scale_stays_what_it_is_whatever_scale_a_run_was_saved_at() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let mut comm = Solo::new();
    let mut comms = Comms::direct(&mut comm);
    let mut run = start();
    give(&mut run, &mut comms, "a", 1.0);
    let (plan, state, backend) = &mut run;
    Run::of(plan, state, backend, &mut comms).step().unwrap();
    save(RunToSave::of(plan, state, backend), &mut comms, folder.path(), BTreeMap::new()).unwrap();
    save_state(state, backend, &file).unwrap();
    for of_file in [false, true] {
        let (plan, mut state, backend) = start_at(LossScaling::fixed(1024.0));
        if of_file {
            load_state(&mut state, &backend, &file).unwrap();
        } else {
            load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
        }
        let scale = state.loss_scale().unwrap();
        assert_eq!((scale.scale(), scale.good_steps()), (1024.0, 1), "of a file: {of_file}");
    }
}

#[test]
fn gradients_of_a_micro_step_under_way_are_not_lost_in_silence() {
    let folder = tempfile::tempdir().unwrap();
    let mut comm = Solo::new();
    let mut comms = Comms::direct(&mut comm);
    let mut run = start();
    give(&mut run, &mut comms, "a", 1.0);
    let (plan, state, backend) = &mut run;
    let saved =
        save(RunToSave::of(plan, state, backend), &mut comms, folder.path(), BTreeMap::new());
    let error = saved.unwrap_err().to_string();
    assert!(error.contains("end the micro-step"), "{error}");
    Run::of(plan, state, backend, &mut comms).step().unwrap();
    save(RunToSave::of(plan, state, backend), &mut comms, folder.path(), BTreeMap::new()).unwrap();
}

#[test]
fn counts_that_no_reader_takes_are_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("checkpoint"), folder.path().join("state"));
    let mut comm = Solo::new();
    let mut comms = Comms::direct(&mut comm);
    let mut run = start();
    run.1.set_step(MAX_STEPS - 1);
    for last in [true, false] {
        give(&mut run, &mut comms, "a", 1.0);
        let (plan, state, backend) = &mut run;
        Run::of(plan, state, backend, &mut comms).step().unwrap();
        let saves = [
            save(RunToSave::of(plan, state, backend), &mut comms, &path, BTreeMap::new()),
            save_state(state, backend, &file),
        ];
        for saved in saves {
            if last {
                saved.unwrap();
                continue;
            }
            let error = saved.unwrap_err().to_string();
            assert!(error.contains("9007199254740992 at most"), "{error}");
            assert!(error.contains("found 9007199254740993"), "{error}");
        }
        // What was saved last is what there is to go on from.
        let (plan, mut state, backend) = start();
        load(RunToLoad::of(&plan, &mut state, &backend), &path).unwrap();
        assert_eq!(state.step(), MAX_STEPS);
        let (_, mut state, backend) = start();
        load_state(&mut state, &backend, &file).unwrap();
        assert_eq!(state.step(), MAX_STEPS);
    }
}

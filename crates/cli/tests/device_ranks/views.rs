//! Gradients that are written where they lie on the device.

use fusestep_collective::Communicator;
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::Memory;
use fusestep_planner::{Comms, Optimizer, Plan, PlanError, Run, State, Topology, ZeroStage};
use fusestep_tensor::Role;

use crate::counted::Counted;
use crate::run::{Case, whole_params};
use crate::worlds::{STAGES, gpus, on_each, small, worlds};

fn started(case: &Case, comm: &dyn Communicator, backend: &Counted) -> (Plan, State) {
    let planner = case.planner().limits(backend.limits());
    let plan = planner.plan_for(&case.params(), Topology::of(comm)).unwrap();
    let mut state = plan.allocate(backend).unwrap();
    for (param, desc) in plan.params().iter().enumerate() {
        let bytes = case.first_values(param);
        state.write(backend, Role::Param, &desc.name, &bytes).unwrap();
    }
    (plan, state)
}

#[test]
fn gradients_given_through_views_give_the_bits_of_those_that_are_pushed() {
    for world in worlds() {
        for (zero, merge) in STAGES.into_iter().zip([1, 2].into_iter().cycle()) {
            let case = Case { world, zero, merge, streams: 2, ..small() };
            let expected = case.run();
            let found = on_each(world, |comm, backend| {
                let rank = comm.rank();
                let (plan, mut state) = started(&case, comm, backend);
                let mut comms = Comms::with_streams(comm, case.streams).unwrap();
                for step in 0..case.steps * u64::from(merge) {
                    for (param, desc) in plan.params().iter().enumerate() {
                        let view = state.grad_on_device(backend, &desc.name).unwrap();
                        assert_eq!(view.len_bytes() as u64, 4 * desc.numel());
                        // A framework would write it there.
                        let bytes = case.gradient(rank, step, param);
                        state.write(backend, Role::Grad, &desc.name, &bytes).unwrap();
                        // Of some it is only known when the step is run.
                        if param % 3 > 0 {
                            Run::of(&plan, &mut state, backend, &mut comms)
                                .give_view(&desc.name)
                                .unwrap();
                        }
                    }
                    Run::of(&plan, &mut state, backend, &mut comms).step().unwrap();
                }
                whole_params(&mut Run::of(&plan, &mut state, backend, &mut comms))
            });
            for (rank, found) in found.iter().enumerate() {
                assert!(*found == expected.params, "rank {rank}: {case:?}");
            }
        }
    }
}

#[test]
fn a_step_waits_for_a_device_at_its_end_and_only_to_report_a_norm() {
    let world = gpus().min(3);
    let rules: [Optimizer; 3] =
        [Adam::default().into(), Lars::default().into(), Lamb::default().into()];
    let cases = STAGES.into_iter().flat_map(|zero| {
        let of_rule = move |rule| [(zero, rule, None), (zero, rule, Some(0.5))];
        rules.into_iter().flat_map(of_rule)
    });
    for (zero, rule, clip) in cases {
        let case = Case { rule, world, zero, clip, streams: 2, ..small() };
        on_each(world, |comm, backend| {
            let (plan, mut state) = started(&case, comm, backend);
            let mut comms = Comms::with_streams(comm, case.streams).unwrap();
            let mut waits = 0;
            // The first steps make what later ones use again.
            for step in 0..6 {
                if step == 3 {
                    waits = backend.waits();
                }
                for desc in plan.params() {
                    state.grad_on_device(backend, &desc.name).unwrap();
                    Run::of(&plan, &mut state, backend, &mut comms).give_view(&desc.name).unwrap();
                }
                Run::of(&plan, &mut state, backend, &mut comms).step().unwrap();
            }
            let reports = if clip.is_some() && world > 1 { 3 } else { 0 };
            assert_eq!(backend.waits() - waits, reports, "{case:?}");
        });
    }
}

#[test]
fn views_of_the_host_and_of_what_was_pushed_are_refused() {
    on_each(1, |comm, backend| {
        let case = small();
        let (plan, mut state) = started(&case, comm, backend);
        let mut comms = Comms::direct(comm);
        let name = plan.params()[0].name.as_str();
        let bytes = case.gradient(0, 0, 0);
        Run::of(&plan, &mut state, backend, &mut comms).push_grad(name, &bytes).unwrap();
        let error = state.grad_on_device(backend, name).unwrap_err();
        assert!(matches!(error, PlanError::GradientTwice { .. }), "{error}");
        let host = fusestep_cpu::CpuBackend::new(std::num::NonZeroUsize::MIN);
        let mut state = plan.allocate(&host).unwrap();
        let error = state.grad_on_device(&host, name).unwrap_err();
        assert!(matches!(error, PlanError::NotOnDevice { .. }), "{error}");
        let gathered = Run::of(&plan, &mut state, &host, &mut comms).gather_on_device(&[name]);
        let error = gathered.unwrap_err();
        assert!(matches!(error, PlanError::NotOnDevice { .. }), "{error}");
    });
}

#[test]
fn whole_parameters_lie_on_the_device_where_steps_update_them() {
    for zero in STAGES {
        let case = Case { world: gpus().min(2), zero, steps: 1, streams: 2, ..small() };
        on_each(case.world, |comm, backend| {
            let (plan, mut state) = started(&case, comm, backend);
            let mut comms = Comms::with_streams(comm, case.streams).unwrap();
            let places = |state: &mut State| -> Result<Vec<u64>, PlanError> {
                let names = plan.params().iter().map(|desc| desc.name.as_str());
                names.map(|name| Ok(state.param_on_device(backend, name)?.address())).collect()
            };
            if case.zero == ZeroStage::Three && case.world > 1 {
                let error = places(&mut state).unwrap_err();
                assert!(matches!(error, PlanError::InShards { .. }), "{error}");
                return;
            }
            let before = places(&mut state).unwrap();
            for desc in plan.params() {
                state.grad_on_device(backend, &desc.name).unwrap();
                Run::of(&plan, &mut state, backend, &mut comms).give_view(&desc.name).unwrap();
            }
            Run::of(&plan, &mut state, backend, &mut comms).step().unwrap();
            assert_eq!(places(&mut state).unwrap(), before, "{case:?}");
            let slice = state.param_on_device(backend, &plan.params()[0].name).unwrap();
            assert_eq!(slice.len_bytes() as u64, 4 * plan.params()[0].numel());
        });
    }
    let host = fusestep_cpu::CpuBackend::new(std::num::NonZeroUsize::MIN);
    let plan = small().planner().plan_for(&small().params(), Topology::SOLO).unwrap();
    let mut state = plan.allocate(&host).unwrap();
    let error = state.param_on_device(&host, &plan.params()[0].name).unwrap_err();
    assert!(matches!(error, PlanError::NotOnDevice { .. }), "{error}");
}

#[test]
fn parameters_are_gathered_on_the_device_bucket_by_bucket() {
    for world in worlds() {
        for zero in STAGES {
            let case = Case { world, zero, steps: 1, streams: 2 * (world % 2), ..small() };
            let expected = case.run().params;
            on_each(world, |comm, backend| {
                let rank = comm.rank();
                let (plan, mut state) = started(&case, comm, backend);
                let mut comms = Comms::with_streams(comm, case.streams).unwrap();
                let mut run = Run::of(&plan, &mut state, backend, &mut comms);
                for (param, desc) in plan.params().iter().enumerate() {
                    let bytes = case.gradient(rank, 0, param);
                    run.push_grad(&desc.name, &bytes).unwrap();
                }
                run.step().unwrap();
                let names: Vec<&str> = plan.params().iter().map(|p| p.name.as_str()).collect();
                // Some in another order, again in memory that is there, and all.
                for asked in [&[4, 0][..], &[5, 7], &[0, 1, 2, 3, 4, 5, 6, 7]] {
                    let names: Vec<&str> = asked.iter().map(|&at| names[at]).collect();
                    let mut found = Run::of(&plan, &mut state, backend, &mut comms)
                        .gather_on_device(&names)
                        .unwrap();
                    for (at, &param) in asked.iter().enumerate() {
                        let mut bytes = vec![0; expected[param].len()];
                        let slice = found.slice_mut(at).unwrap();
                        assert_eq!(slice.len_bytes(), bytes.len());
                        found.read(backend, at, &mut bytes).unwrap();
                        assert!(bytes == expected[param], "rank {rank}, {param}: {case:?}");
                    }
                    assert!(found.slice_mut(asked.len()).is_none());
                    comms.use_again(found);
                }
            });
        }
    }
}

//! Steps of many ranks, recorded once with their calls and enqueued by one call of the driver.

use std::num::NonZeroUsize;

use fusestep_collective::Communicator;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::Memory;
use fusestep_planner::{
    Comms, Optimizer, Plan, PlanError, Run, RunAlone, State, TableKind, Topology, ZeroStage,
};
use fusestep_tensor::Role;

use crate::counted::Counted;
use crate::run::{Case, Mixed, whole_params};
use crate::worlds::{gpus, on_each, small, worlds};

fn started(case: &Case, comm: &dyn Communicator, backend: &Counted) -> (Plan, State) {
    let planner = case.planner().limits(backend.limits());
    let plan = planner.table(TableKind::Resident);
    let plan = plan.plan_for(&case.params(), Topology::of(comm)).unwrap();
    let mut state = plan.allocate(backend).unwrap();
    for (param, desc) in plan.params().iter().enumerate() {
        let bytes = case.first_values(param);
        state.write(backend, Role::Param, &desc.name, &bytes).unwrap();
    }
    (plan, state)
}

/// Pushes all gradients of a step.
fn push(case: &Case, run: &mut Run<'_, '_>, step: u64) {
    let plan = run.plan();
    for (param, desc) in plan.params().iter().enumerate() {
        let bytes = case.gradient(plan.topology().rank, step, param);
        run.push_grad(&desc.name, &bytes).unwrap();
    }
}

/// Gives all gradients of a step, every second one through a view.
fn give(case: &Case, run: &mut Run<'_, '_>, step: u64) {
    let (plan, backend) = (run.plan(), run.backend());
    for (param, desc) in plan.params().iter().enumerate() {
        let bytes = case.gradient(plan.topology().rank, step, param);
        if param % 2 == 0 {
            run.push_grad(&desc.name, &bytes).unwrap();
        } else {
            run.state_mut().grad_on_device(backend, &desc.name).unwrap();
            run.state_mut().write(backend, Role::Grad, &desc.name, &bytes).unwrap();
        }
    }
}

/// What each rank ends with, parameters, steps applied and skipped, if these steps are replayed and
/// all others run as the host goes along. The rate changes on the way if `slower` says so.
fn steps_of(
    case: &Case,
    slower: bool,
    replayed: impl Fn(u64) -> bool + Sync,
) -> Vec<(Vec<Vec<u8>>, u64, u64)> {
    on_each(case.world, |comm, backend| {
        let (plan, mut state) = started(case, comm, backend);
        assert_eq!(plan.table(), TableKind::Resident);
        let mut comms = Comms::direct(comm);
        let mut graph = Run::of(&plan, &mut state, backend, &mut comms).capture().unwrap();
        for step in 0..case.steps {
            let mut run = Run::of(&plan, &mut state, backend, &mut comms);
            give(case, &mut run, step);
            if slower && step == 2 {
                run.state_mut().set_lr(1e-4).unwrap();
            }
            if replayed(step) {
                run.replay(&graph).unwrap();
            } else {
                run.settle(&mut graph).unwrap();
                run.step().unwrap();
            }
        }
        Run::of(&plan, &mut state, backend, &mut comms).settle(&mut graph).unwrap();
        let (step, skipped) = (state.step(), state.skipped());
        drop(graph);
        let params = whole_params(&mut Run::of(&plan, &mut state, backend, &mut comms));
        (params, step, skipped)
    })
}

#[test]
fn recorded_steps_give_the_bits_of_threads_on_the_host() {
    let rules: [Optimizer; 4] = [
        Adam::default().into(),
        Sgd::with_momentum().into(),
        Lamb::default().into(),
        Lars::default().into(),
    ];
    let stages = [ZeroStage::None, ZeroStage::One].into_iter().cycle();
    for world in worlds() {
        for (zero, rule) in stages.clone().zip(rules) {
            for (clip, mixed) in [(None, Mixed::No), (Some(0.5), Mixed::Yes)] {
                let case = Case { rule, world, zero, clip, mixed, steps: 4, ..small() };
                let expected = case.run();
                // Recorded steps alone, and between others.
                for every in [1, 2] {
                    for found in steps_of(&case, false, |step| step % every == 0) {
                        assert!(found.0 == expected.params, "{every}: {case:?}");
                        assert_eq!((found.1, found.2), (4, 0));
                    }
                }
            }
        }
    }
}

#[test]
fn devices_skip_recorded_steps_alike() {
    let world = gpus().min(3);
    if world == 1 {
        return;
    }
    let case = Case {
        world,
        zero: ZeroStage::One,
        clip: Some(0.5),
        scaled: Some(1024.0),
        infinite: Some((world - 1, 1, 5)),
        steps: 3,
        ..small()
    };
    let expected = case.run();
    assert_eq!(expected.skipped, 1);
    for found in steps_of(&case, false, |_| true) {
        assert!(found.0 == expected.params, "{case:?}");
        assert_eq!((found.1, found.2), (2, 1));
    }
}

#[test]
fn a_rate_that_is_set_reaches_recorded_steps() {
    let rules: [Optimizer; 2] = [Adam::default().into(), Lamb::default().into()];
    for rule in rules {
        let case = Case { rule, world: gpus().min(2), steps: 4, ..small() };
        let run = steps_of(&case, true, |_| false);
        assert!(run == steps_of(&case, true, |_| true), "{case:?}");
        assert!(run != steps_of(&case, false, |_| true), "{case:?}");
    }
}

/// What the planner reads, writes and waits for between two settled states.
#[test]
fn a_replayed_step_waits_for_nothing() {
    let world = gpus().min(2);
    if world == 1 {
        return;
    }
    let case = Case { world, clip: Some(0.5), ..small() };
    on_each(world, |comm, backend| {
        let (plan, mut state) = started(&case, comm, backend);
        let mut comms = Comms::direct(comm);
        let mut graph = Run::of(&plan, &mut state, backend, &mut comms).capture().unwrap();
        give(&case, &mut Run::of(&plan, &mut state, backend, &mut comms), 0);
        let (waits, calls) = (backend.waits(), comms.calls());
        for _ in 0..3 {
            Run::of(&plan, &mut state, backend, &mut comms).replay(&graph).unwrap();
        }
        assert_eq!((backend.waits(), comms.calls()), (waits, calls));
        Run::of(&plan, &mut state, backend, &mut comms).settle(&mut graph).unwrap();
        assert_eq!(state.step(), 3);
    });
}

#[test]
fn what_cannot_be_recorded_is_refused_and_changes_nothing() {
    let world = gpus().min(2);
    if world == 1 {
        return;
    }
    let group = NonZeroUsize::MIN;
    for (case, found) in [
        (Case { zero: ZeroStage::Two, ..small() }, "its tables are in arguments"),
        (Case { merge: 2, ..small() }, "it adds up micro-steps"),
        (
            Case { zero: ZeroStage::One, shard_group: Some(group), ..small() },
            "shards lie in groups of ranks",
        ),
        (
            Case { streams: 1, ..small() },
            "communication streams make its calls; take `Comms::direct`",
        ),
    ] {
        let case = Case { world, ..case };
        on_each(world, |comm, backend| {
            let (plan, mut state) = started(&case, comm, backend);
            let mut comms = match (case.shard_group, case.streams) {
                (Some(group), streams) => Comms::in_groups(comm, group, streams).unwrap(),
                (None, streams) => Comms::with_streams(comm, streams).unwrap(),
            };
            let refused = Run::of(&plan, &mut state, backend, &mut comms).capture();
            let refused = refused.unwrap_err();
            assert!(
                matches!(&refused, PlanError::NotCapturable { found: text } if *text == found),
                "{refused}"
            );
            let alone = RunAlone::of(&plan, &mut state, backend).capture().unwrap_err();
            assert!(matches!(alone, PlanError::Topology { .. }), "{alone}");
            // The state goes on.
            for step in 0..u64::from(case.merge) {
                let mut run = Run::of(&plan, &mut state, backend, &mut comms);
                push(&case, &mut run, step);
                run.step().unwrap();
            }
            assert_eq!(state.step(), 1);
        });
    }
}

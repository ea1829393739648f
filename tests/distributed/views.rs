//! Gradients written through views into the arena are those that are pushed, bit for bit.

use fusestep_planner::{
    Comms, FuseReduceIntoUpdate, Plan, PlanError, ReducedWhen, Run, State, Topology, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use half::bf16;

use crate::run::{Case, Mixed, whole_params};
use crate::train::{backend, on_ranks, start};

const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

/// Which gradients are written through views.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Viewed {
    None,
    All,
    /// And said to be whole at once, so that streams reduce them before the step.
    Given,
    /// By turns, so that neighbours in a bucket are given in both ways and each parameter in
    /// another with every micro-step.
    Some,
}

impl Viewed {
    fn is(self, step: u64, param: usize) -> bool {
        match self {
            Viewed::None => false,
            Viewed::All | Viewed::Given => true,
            Viewed::Some => (step as usize + param / 2).is_multiple_of(2),
        }
    }
}

/// Whether micro-steps are weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weighed {
    No,
    Yes,
}

fn write_view(state: &mut State, name: &str, case: &Case, bytes: &[u8], param: usize) {
    if case.mixed == Mixed::Yes && param % 2 == 1 {
        let values = bytes.as_chunks::<2>().0.iter();
        let mut view = state.grad_mut::<bf16>(name).unwrap();
        for (to, value) in view.as_mut_slice().iter_mut().zip(values) {
            *to = bf16::from_le_bytes(*value);
        }
        return;
    }
    let values = bytes.as_chunks::<4>().0.iter();
    let mut view = state.grad_mut::<f32>(name).unwrap();
    for (to, value) in view.as_mut_slice().iter_mut().zip(values) {
        *to = f32::from_le_bytes(*value);
    }
}

fn run(case: &Case, viewed: Viewed, weighed: Weighed) -> Vec<Vec<Vec<u8>>> {
    on_ranks(case.world, |comm| {
        let backend = backend();
        let planner = case.planner().with(FuseReduceIntoUpdate);
        let plan = planner.plan_for(&case.params(), Topology::of(comm)).unwrap();
        let rank = comm.rank();
        let mut comms = Comms::with_streams(comm, case.streams).unwrap();
        let mut state = start(case, &plan, &backend);
        for step in 0..case.steps * u64::from(case.merge) {
            if weighed == Weighed::Yes {
                state.set_weight(1.5 + step as f64).unwrap();
            }
            for (param, desc) in plan.params().iter().enumerate().rev() {
                if case.lacks_gradient(rank, step, param) {
                    continue;
                }
                let bytes = case.gradient(rank, step, param);
                if viewed.is(step, param) {
                    write_view(&mut state, &desc.name, case, &bytes, param);
                    if viewed == Viewed::Given {
                        Run::of(&plan, &mut state, &backend, &mut comms)
                            .give_view(&desc.name)
                            .unwrap();
                    }
                } else {
                    let name = &desc.name;
                    Run::of(&plan, &mut state, &backend, &mut comms)
                        .push_grad(name, &bytes)
                        .unwrap();
                }
            }
            Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
        }
        whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    })
}

fn case(world: usize, mixed: Mixed, merge: u32) -> Case {
    let without_gradient = (0..world).map(|rank| (rank, 1, 0));
    Case {
        numels: vec![1_001, 3, 0, 1, 5_003, 130, 257, 64],
        world,
        mixed,
        merge,
        cap: Some(8_000),
        steps: 2,
        without_gradient: without_gradient
            .chain([(0, 0, 4), (world - 1, 3, 5), (0, 2, 6)])
            .collect(),
        ..Case::default()
    }
}

fn same_in_views(case: &Case, weighed: Weighed) {
    let expected = run(case, Viewed::None, weighed);
    for viewed in [Viewed::All, Viewed::Given, Viewed::Some] {
        let found = run(case, viewed, weighed);
        assert!(found == expected, "{viewed:?} {weighed:?}: {case:?}");
    }
}

#[test]
fn views_are_pushed_gradients_at_every_stage() {
    for world in 1..=3 {
        for mixed in [Mixed::No, Mixed::Yes] {
            for zero in STAGES {
                for streams in [0, 2] {
                    let case = Case { zero, streams, ..case(world, mixed, 1) };
                    same_in_views(&case, Weighed::No);
                }
            }
        }
    }
}

#[test]
fn views_of_micro_steps_are_added_as_pushed_gradients_are() {
    for world in 1..=3 {
        for mixed in [Mixed::No, Mixed::Yes] {
            for zero in STAGES {
                for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
                    for weighed in [Weighed::No, Weighed::Yes] {
                        let case = Case { zero, reduced, ..case(world, mixed, 3) };
                        same_in_views(&case, weighed);
                    }
                }
            }
        }
    }
}

#[test]
fn views_go_on_with_clipping_and_streams_where_micro_steps_are_added() {
    for mixed in [Mixed::No, Mixed::Yes] {
        for zero in STAGES {
            let case = Case { zero, streams: 2, clip: Some(0.5), ..case(3, mixed, 2) };
            same_in_views(&case, Weighed::No);
        }
    }
}

fn both_ways(plan: &Plan, state: &mut State, comms: &mut Comms<'_>, case: &Case) {
    let (backend, name) = (backend(), plan.params()[0].name.as_str());
    let bytes = case.gradient(0, 0, 0);
    state.grad_mut::<f32>(name).unwrap().fill(1.0);
    let error = Run::of(plan, state, &backend, comms).push_grad(name, &bytes);
    assert!(matches!(error, Err(PlanError::GradientTwice { .. })));
    // A view may be asked for again: it is the same memory.
    let mut again = state.grad_mut::<f32>(name).unwrap();
    assert!(again.as_mut_slice().iter().all(|&g| g == 1.0));
    drop(again);
    let other = plan.params()[1].name.as_str();
    let bytes = case.gradient(0, 0, 1);
    Run::of(plan, state, &backend, comms).push_grad(other, &bytes).unwrap();
    let error = state.grad_mut::<f32>(other).unwrap_err();
    assert!(matches!(error, PlanError::GradientTwice { .. }));
    let mut run = Run::of(plan, state, &backend, comms);
    let error = run.give_view(other);
    assert!(matches!(error, Err(PlanError::GradientTwice { .. })));
    run.give_view(name).unwrap();
    let error = run.give_view(name);
    assert!(matches!(error, Err(PlanError::GradientTwice { .. })));
    let error = run.give_view("nobody");
    assert!(matches!(error, Err(PlanError::UnknownName { .. })));
}

#[test]
fn a_gradient_given_in_both_ways_is_refused() {
    for zero in STAGES {
        let case = Case { zero, ..case(2, Mixed::No, 1) };
        on_ranks(2, |comm| {
            let backend = backend();
            let plan = case.planner().plan_for(&case.params(), Topology::of(comm));
            let (plan, mut comms) = (plan.unwrap(), Comms::direct(comm));
            let mut state = start(&case, &plan, &backend);
            both_ways(&plan, &mut state, &mut comms, &case);
            Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
            both_ways(&plan, &mut state, &mut comms, &case);
        });
    }
}

#[test]
fn what_has_no_elements_has_an_empty_view() {
    for zero in STAGES {
        let case = Case { zero, ..case(2, Mixed::No, 1) };
        on_ranks(2, |comm| {
            let backend = backend();
            let mut params = case.params();
            let shape = Shape::new([0, 3]).unwrap();
            params.push(ParamDesc::new("empty", shape, DType::F32));
            let plan = case.planner().plan_for(&params, Topology::of(comm));
            let mut state = plan.unwrap().allocate(&backend).unwrap();
            let view = state.view::<f32>(Role::Grad, "empty").unwrap();
            assert!(view.is_empty());
            assert!(state.grad_mut::<f32>("empty").unwrap().is_empty());
        });
    }
}

#[test]
fn rows_that_are_added_or_left_out_have_the_same_bits_at_every_stage() {
    for merge in [1, 3] {
        let mut expected = None;
        for world in [1, 2] {
            for (zero, streams) in STAGES.into_iter().flat_map(|zero| [(zero, 0), (zero, 1)]) {
                let case = Case { zero, streams, ..case(world, Mixed::No, merge) };
                let found = on_ranks(world, |comm| {
                    let backend = backend();
                    let plan = case.planner().plan_for(&case.params(), Topology::of(comm)).unwrap();
                    let mut comms = Comms::with_streams(comm, case.streams).unwrap();
                    let mut state = start(&case, &plan, &backend);
                    for step in 0..3 * u64::from(merge) {
                        for desc in plan.params().iter().rev() {
                            // Every third element is added to, and some gradients are not written.
                            let mut view = state.grad_mut::<f32>(&desc.name).unwrap();
                            if desc.numel() % 5 != step % 5 {
                                let values = view.as_mut_slice().iter_mut();
                                values.step_by(3).for_each(|value| *value += 0.5);
                            }
                            drop(view);
                            let mut again = state.grad_mut::<f32>(&desc.name).unwrap();
                            assert!(again.as_mut_slice().iter().all(|&g| g == 0.0 || g == 0.5));
                        }
                        Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
                    }
                    whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
                });
                for found in found {
                    assert!(found == *expected.get_or_insert_with(|| found.clone()), "{case:?}");
                }
            }
        }
    }
}

//! The calls that a plan lists are those that its steps make, and so are their bytes.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use fusestep_collective::Communicator;
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{
    Averaged, Comms, Distributed, FuseReduceIntoUpdate, Lanes, LocalSgd, Optimizer, Ownership,
    Plan, Planner, ReduceDType, ReducedWhen, Run, Topology, UpdateInBackward, ZeroStage,
};

use crate::run::{Case, Measured, Mixed};
use crate::train::{backend, on_ranks, push, start};

const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

fn case(world: usize, zero: ZeroStage) -> Case {
    Case {
        numels: vec![2_000, 3, 0, 1, 5_003, 130, 70_000],
        world,
        zero,
        cap: Some(40_000),
        steps: 3,
        ..Case::default()
    }
}

/// Asks for every layer before its forward and before its backward pass, as [`Plan::calls`] takes a
/// program to do at stage 3 in every micro-step.
fn gather_layers(run: &mut Run<'_, '_>) {
    let plan = run.plan();
    let layer = |name: &str| name.rsplit_once('.').unwrap().0.to_owned();
    let names = || plan.params().iter().map(|param| param.name.as_str());
    let mut layers: Vec<String> = names().map(layer).collect();
    layers.dedup();
    for asked in layers.iter().chain(layers.iter().rev()) {
        let of_layer: Vec<&str> = names().filter(|name| layer(name) == *asked).collect();
        drop(run.gather(&of_layer).unwrap());
    }
}

/// Calls and bytes that a plan lists for a step with an average, or without one.
fn listed(plan: &Plan, averages: bool) -> (u64, u64) {
    let calls = plan.calls();
    let due = calls.iter().filter(|call| averages || call.every == 1);
    due.fold((0, 0), |(calls, bytes), call| {
        (calls + call.times, bytes + call.times * call.bytes_sent)
    })
}

/// Requires that every step, micro-steps and all, makes the calls that its plan lists.
fn as_listed(case: &Case, planner: &Planner) {
    on_ranks(case.world, |comm| {
        let backend = backend();
        let topology = Topology::of(comm);
        let plan = planner.plan_for(&case.params(), topology).unwrap();
        let mut comms = comms_of(case, comm);
        let mut state = start(case, &plan, &backend);
        let mut made = (comms.calls(), comms.bytes_sent());
        for step in 0..case.steps {
            let mut averaged = false;
            for micro_step in 0..u64::from(case.merge) {
                let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
                if case.zero == ZeroStage::Three {
                    gather_layers(&mut run);
                }
                let at = step * u64::from(case.merge) + micro_step;
                push(case, &mut run, at);
                averaged |= run.step().unwrap().averaged;
            }
            let now = (comms.calls(), comms.bytes_sent());
            let found = (now.0 - made.0, now.1 - made.1);
            assert_eq!(found, listed(&plan, averaged), "step {step}, {topology:?}: {case:?}");
            made = now;
        }
    });
}

fn comms_of<'a>(case: &Case, comm: &'a mut dyn Communicator) -> Comms<'a> {
    match case.shard_group {
        Some(group) => Comms::in_groups(comm, group, case.streams).unwrap(),
        None => Comms::with_streams(comm, case.streams).unwrap(),
    }
}

fn each(test: impl Fn(Case)) {
    for world in 2..=4 {
        for zero in STAGES {
            test(case(world, zero));
        }
    }
}

#[test]
fn steps_at_every_stage_make_the_calls_that_are_listed() {
    each(|case| {
        for (cap, streams) in [(None, 0), (Some(1 << 20), 0), (Some(40_000), 2)] {
            let case = Case { cap, streams, mixed: Mixed::Yes, ..case.clone() };
            as_listed(&case, &case.planner());
        }
    });
}

#[test]
fn norms_clipping_and_measured_updates_make_the_calls_that_are_listed() {
    each(|case| {
        for (clip, measured) in
            [(Some(1.0), Measured::No), (None, Measured::Yes), (Some(1.0), Measured::Yes)]
        {
            let case = Case { clip, measured, ..case.clone() };
            as_listed(&case, &case.planner());
        }
    });
}

#[test]
fn layerwise_rules_make_the_calls_that_are_listed() {
    each(|case| {
        for rule in [Optimizer::from(Lars::default()), Lamb::default().into()] {
            for clip in [None, Some(1.0)] {
                let case = Case { rule, clip, ..case.clone() };
                as_listed(&case, &case.planner());
            }
        }
    });
}

#[test]
fn micro_steps_make_the_calls_that_are_listed() {
    each(|case| {
        for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
            let case = Case { merge: 3, reduced, ..case.clone() };
            as_listed(&case, &case.planner());
        }
    });
}

#[test]
fn fused_reductions_and_broadcasts_make_the_calls_that_are_listed() {
    each(|case| {
        let case = Case { mixed: Mixed::Yes, ..case };
        as_listed(&case, &case.planner().with(FuseReduceIntoUpdate));
        let owned = Case { ownership: Ownership::Tensors, broadcast_cap: Some(10_000), ..case };
        as_listed(&owned, &owned.planner());
    });
}

#[test]
fn shard_groups_and_slices_make_the_calls_that_are_listed() {
    for (world, group) in [(4, 2), (3, 1)] {
        for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            let case = Case {
                shard_group: NonZeroUsize::new(group),
                clip: Some(1.0),
                measured: Measured::Yes,
                ..case(world, zero)
            };
            as_listed(&case, &case.planner());
        }
    }
    for zero in [ZeroStage::None, ZeroStage::Two] {
        for clip in [None, Some(1.0)] {
            let case = Case { clip, measured: Measured::Yes, ..case(3, zero) };
            let slices = Distributed::params(["layer2.weight4", "layer1.weight3"]);
            as_listed(&case, &case.planner().with(slices));
        }
    }
}

#[test]
fn averages_of_parameters_make_the_calls_that_are_listed() {
    let every = |steps| LocalSgd::every(NonZeroU64::new(steps).unwrap());
    let with_state = LocalSgd { averaged: Averaged::ParamsAndState, ..every(2) };
    for world in 2..=4 {
        for rule in [every(1), every(2), with_state] {
            for master in [Master::None, Master::F32, Master::Remainder] {
                for clip in [None, Some(1.0)] {
                    let precision = Precision { master, ..Precision::default() };
                    let case = Case {
                        rule: Adam::default().into(),
                        local_sgd: Some(rule),
                        mixed: Mixed::Yes,
                        precision: Some(precision),
                        clip,
                        ..case(world, ZeroStage::None)
                    };
                    as_listed(&case, &case.planner());
                }
            }
        }
    }
}

#[test]
fn an_interval_that_follows_the_loss_asks_for_it_at_every_average() {
    let rule = LocalSgd::every(NonZeroU64::new(2).unwrap()).adaptive();
    let case = Case { local_sgd: Some(rule), steps: 6, ..case(3, ZeroStage::None) };
    on_ranks(3, |comm| {
        let backend = backend();
        let plan = case.planner().plan_for(&case.params(), Topology::of(comm));
        let (plan, mut comms) = (plan.unwrap(), Comms::direct(comm));
        let mut state = start(&case, &plan, &backend);
        let mut before = 0;
        for step in 0..case.steps {
            state.set_loss(1.0);
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            push(&case, &mut run, step);
            let report = run.step().unwrap();
            // The first step's loss is what later ones are compared with.
            let first = u64::from(step == 0);
            let (calls, _) = listed(&plan, report.averaged);
            assert_eq!(comms.calls() - before, calls + first, "step {step}");
            before = comms.calls();
        }
    });
}

#[test]
fn one_rank_makes_no_calls() {
    let case = case(1, ZeroStage::None);
    let plan = case.planner().plan(&case.params()).unwrap();
    assert!(plan.calls().is_empty());
}

#[test]
fn updates_in_backward_make_the_calls_that_are_listed() {
    for world in 2..=4 {
        for zero in &STAGES[..3] {
            for streams in [0, 2] {
                let case = Case { streams, ..case(world, *zero) };
                let in_backward = || case.planner().with(UpdateInBackward::default());
                as_listed(&case, &in_backward());
                as_listed(&case, &in_backward().with(FuseReduceIntoUpdate));
            }
        }
    }
}

#[test]
fn sums_of_lanes_make_the_calls_that_are_listed() {
    for world in 2..=4 {
        for zero in &STAGES[..3] {
            for (lanes, mixed) in [(4, Mixed::No), (6, Mixed::No), (8, Mixed::No), (4, Mixed::Yes)]
            {
                let case = Case { mixed, ..case(world, *zero) };
                let planner = || case.planner().with(Lanes::new(NonZeroU32::new(lanes).unwrap()));
                lanes_as_listed(&case, &planner());
                lanes_as_listed(&case, &planner().with(FuseReduceIntoUpdate));
            }
        }
    }
}

/// Requires that every update of lanes makes the calls that its plan lists.
fn lanes_as_listed(case: &Case, planner: &Planner) {
    on_ranks(case.world, |comm| {
        let backend = backend();
        let topology = Topology::of(comm);
        let plan = planner.plan_for(&case.params(), topology).unwrap();
        let mut comms = comms_of(case, comm);
        let mut state = start(case, &plan, &backend);
        for update in 0..case.steps {
            let made = (comms.calls(), comms.bytes_sent());
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            loop {
                let micro_batch = run.state().micro_batch().unwrap();
                push(case, &mut run, update * 8 + micro_batch);
                if run.step().unwrap().update.is_some() {
                    break;
                }
            }
            let found = (comms.calls() - made.0, comms.bytes_sent() - made.1);
            assert_eq!(found, listed(&plan, false), "{update}, {topology:?}: {case:?}");
        }
    });
}

#[test]
fn gradients_that_travel_in_sixteen_bits_are_sent_part_by_part() {
    for world in 2..=4 {
        for zero in STAGES {
            for (merge, reduced) in [(1, ReducedWhen::PerWindow), (2, ReducedWhen::PerMicroStep)] {
                for mixed in [Mixed::No, Mixed::Yes] {
                    let reduce_dtype = ReduceDType::Bf16;
                    let case = Case { merge, reduced, mixed, reduce_dtype, ..case(world, zero) };
                    as_listed(&case, &case.planner());
                }
            }
        }
    }
}

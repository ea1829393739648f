//! Pass `update_in_backward`: buckets are updated while gradients are still being given, with the
//! bits of a step that updates them all at its end.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use fusestep_checkpoint::{StateTensors, load, save};
use fusestep_collective::{Communicator, Solo};
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision, Rounding, StateDType};
use fusestep_planner::{
    ClipByGlobalNorm, Comms, Distributed, FuseAllReduce, FuseReduceIntoUpdate,
    GradientAccumulation, LocalSgd, LossScaling, Optimizer, Plan, PlanError, Planner, Reach,
    ReducedWhen, Run, RunAlone, RunToLoad, RunToSave, Shard, Tensors, Topology, UpdateInBackward,
    UpdateNorms, Verdict, When, ZeroStage,
};
use fusestep_tensor::Role;
use fusestep_testkit::each_rule;

use crate::run::{Case, Mixed, lacking, whole_params};
use crate::train::{Trained, backend, on_ranks, push, start, train};

const STAGES: [ZeroStage; 3] = [ZeroStage::None, ZeroStage::One, ZeroStage::Two];

/// Several buckets, an empty tensor, and one longer than a bucket.
fn case(world: usize) -> Case {
    Case {
        numels: vec![2_001, 3, 0, 5_003, 130, 64, 1],
        world,
        cap: Some(8_000),
        steps: 2,
        ..Case::default()
    }
}

fn in_backward() -> UpdateInBackward {
    UpdateInBackward::of_bytes(8_000)
}

fn layerwise(rule: &Optimizer) -> bool {
    matches!(rule, Optimizer::Lars(_) | Optimizer::Lamb(_))
}

fn assert_same(found: &[Trained], expected: &[Trained], text: &str) {
    for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.bits() == expected.bits(), "rank {rank}: {text}");
        let told = |trained: &Trained| -> Vec<_> {
            let updates = trained.reports.iter().map(|report| report.update);
            let told =
                updates.map(|update| update.map(|update| (update.step, update.without_gradient)));
            told.collect()
        };
        assert_eq!(told(found), told(expected), "rank {rank}: {text}");
    }
}

/// Requires a run that updates in backward to be the one that does not, fused and apart.
fn same(base: &Case, with: impl Fn(Planner) -> Planner) {
    for zero in STAGES {
        let case = Case { zero, ..base.clone() };
        let plain = train(&case, &with(case.planner()));
        let separate = with(case.planner()).with(in_backward());
        assert_same(&train(&case, &separate), &plain, &format!("apart, {case:?}"));
        let fused = with(case.planner()).with(FuseReduceIntoUpdate).with(in_backward());
        assert_same(&train(&case, &fused), &plain, &format!("fused, {case:?}"));
    }
}

#[test]
fn every_rule_stage_and_world_gives_the_bits_of_updates_in_the_step() {
    for world in 1..=3 {
        for rule in each_rule() {
            if world > 1 && layerwise(&rule) {
                continue;
            }
            for streams in [0, 2] {
                let base = Case { rule, streams, ..case(world) };
                same(&base, |planner| planner);
            }
        }
    }
}

#[test]
fn micro_steps_and_absent_gradients_change_no_bit() {
    for world in 1..=3 {
        for (merge, streams) in [(1, 0), (3, 0), (1, 2), (3, 1)] {
            let base = Case {
                merge,
                streams,
                without_gradient: lacking(world, merge),
                mixed: Mixed::Yes,
                steps: 3,
                ..case(world)
            };
            same(&base, |planner| planner);
        }
    }
}

#[test]
fn bf16_with_masters_and_rounding_at_random_changes_no_bit() {
    let precision =
        |master, state, rounding| Precision { master, state, rounding, ..Precision::default() };
    for world in 1..=3 {
        for precision in [
            precision(Master::F32, StateDType::Compute, Rounding::default()),
            precision(Master::None, StateDType::Bf16, Rounding::Stochastic { seed: 7 }),
        ] {
            let base =
                Case { mixed: Mixed::Yes, merge: 2, precision: Some(precision), ..case(world) };
            same(&base, |planner| planner);
        }
    }
}

#[test]
fn one_call_for_each_tensor_gives_the_bits_of_updates_in_the_step() {
    for world in 1..=3 {
        let naive = Case { cap: None, ..case(world) };
        same(&naive, |planner| planner);
    }
}

#[test]
fn slices_of_a_ranks_own_and_local_steps_are_updated_in_backward_too() {
    let names = ["layer2.weight4", "layer0.weight1"];
    same(&case(3), |planner| planner.with(Distributed::params(names)));
    let local = LocalSgd::every(NonZeroU64::new(2).unwrap());
    let base = case(3);
    let plain = train(&base, &base.planner().with(local));
    let found = train(&base, &base.planner().with(local).with(in_backward()));
    assert_same(&found, &plain, "local");
}

/// A run in which every rank gives its gradients in an order of its own, with shard groups.
fn in_own_order(case: &Case, planner: &Planner) -> Vec<Vec<Vec<u8>>> {
    on_ranks(case.world, |comm| {
        let plan = planner.plan_for(&case.params(), Topology::of(comm)).unwrap();
        let backend = backend();
        let mut comms = match case.shard_group {
            Some(group) => Comms::in_groups(comm, group, case.streams).unwrap(),
            None => Comms::with_streams(comm, case.streams).unwrap(),
        };
        let mut state = start(case, &plan, &backend);
        let (rank, count) = (plan.topology().rank, plan.params().len());
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        for step in 0..case.steps {
            for at in 0..count {
                let param = (at * (rank + 1) + rank) % count;
                let (name, bytes) = (&plan.params()[param].name, case.gradient(rank, step, param));
                run.push_grad(name, &bytes).unwrap();
            }
            run.step().unwrap();
        }
        whole_params(&mut run)
    })
}

#[test]
fn ranks_that_give_gradients_in_other_orders_make_their_calls_in_one() {
    for (world, group) in [(3, None), (4, NonZeroUsize::new(2))] {
        for streams in [0, 2] {
            let case = Case { streams, zero: ZeroStage::One, shard_group: group, ..case(world) };
            let expected = in_own_order(&case, &case.planner());
            let found = in_own_order(&case, &case.planner().with(in_backward()));
            assert!(found == expected, "{case:?}");
        }
    }
}

fn plan_of(case: &Case, planner: Planner, comm: &dyn Communicator) -> Plan {
    let topology = Topology::of(comm);
    planner.plan_for(&case.params(), topology).unwrap()
}

/// Whether each parameter differs from its first value.
fn moved(case: &Case, plan: &Plan, state: &fusestep_planner::State) -> Vec<bool> {
    let params = plan.params().iter().enumerate();
    let moved = params.map(|(param, desc)| {
        let mut bytes = vec![0; desc.numel() as usize * desc.dtype.len_bytes()];
        let read = state.read(&backend(), Role::Param, &desc.name, &mut bytes);
        read.unwrap();
        bytes != case.first_values(param)
    });
    moved.collect()
}

#[test]
fn a_bucket_is_updated_by_the_call_that_gives_its_last_gradient() {
    for world in 1..=3 {
        for zero in STAGES {
            for fused in [false, true] {
                let case = Case { zero, ..case(world) };
                on_ranks(world, |comm| {
                    let planner = case.planner().with(in_backward());
                    let planner = if fused { planner.with(FuseReduceIntoUpdate) } else { planner };
                    let plan = plan_of(&case, planner, comm);
                    let (backend, rank) = (backend(), plan.topology().rank);
                    let mut comms = Comms::direct(comm);
                    let mut state = start(&case, &plan, &backend);
                    let mut seen = Vec::new();
                    for param in (0..case.numels.len()).rev() {
                        let bytes = case.gradient(rank, 0, param);
                        let name = &plan.params()[param].name;
                        Run::of(&plan, &mut state, &backend, &mut comms)
                            .push_grad(name, &bytes)
                            .unwrap();
                        let moved = moved(&case, &plan, &state);
                        seen.push(moved.into_iter().filter(|&moved| moved).count());
                    }
                    // A bucket has 2,000 elements: 6, 5 and 4 share one, which is full with 4; 3
                    // and 0 are longer, so 1 is alone; 2 is empty.
                    assert_eq!(seen, [0, 0, 3, 4, 4, 5, 6], "{case:?}, fused {fused}");
                    Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
                    assert_eq!(state.step(), 1);
                });
            }
        }
    }
}

#[test]
fn a_second_gradient_and_settings_between_are_refused_and_change_nothing() {
    let case = case(1);
    let expected = train(&case, &case.planner());
    let plan = case.planner().with(in_backward()).plan(&case.params());
    let (plan, backend) = (plan.unwrap(), backend());
    let mut solo = Solo::new();
    let mut comms = Comms::direct(&mut solo);
    let mut state = start(&case, &plan, &backend);
    for step in 0..case.steps {
        push(&case, &mut Run::of(&plan, &mut state, &backend, &mut comms), step);
        let (name, bytes) = (&plan.params()[0].name, case.gradient(0, step, 0));
        let twice = Run::of(&plan, &mut state, &backend, &mut comms).push_grad(name, &bytes);
        let name = name.clone();
        assert_eq!(twice, Err(PlanError::GradientTwice { name }));
        let refused = |what| PlanError::StepUnderWay { what, step: step + 1, updated: 6 };
        assert_eq!(state.set_lr(1.0), Err(refused("learning rate")));
        let other = Adam::default().into();
        assert_eq!(state.set_optimizer(other), Err(refused("optimizer")));
        assert_eq!(RunAlone::of(&plan, &mut state, &backend).step_all(), Err(refused("step_all")));
        let flushed = Run::of(&plan, &mut state, &backend, &mut comms).flush();
        assert_eq!(flushed, Err(refused("flush")));
        let saved = StateTensors::of(&state, &backend).map(|_| ());
        assert_eq!(saved, Err(refused("saving")));
        Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
    }
    state.set_lr(0.5).unwrap();
    let found = whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms));
    assert!(found == expected[0].params);
}

#[test]
fn a_rank_that_fails_half_way_leaves_a_state_that_refuses_to_go_on() {
    let case = Case { zero: ZeroStage::One, ..case(2) };
    on_ranks(2, |comm| {
        let plan = plan_of(&case, case.planner().with(in_backward()), comm);
        let (backend, rank) = (backend(), plan.topology().rank);
        let mut state = start(&case, &plan, &backend);
        let mut comms = Comms::direct(comm);
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        if rank == 1 {
            // Another call than the bucket's.
            let error = run.broadcast_parameters(0);
            assert!(matches!(error, Err(PlanError::Collective(_))), "{error:?}");
            return;
        }
        let mut failed = None;
        for param in (0..case.numels.len()).rev() {
            let (name, bytes) = (&plan.params()[param].name, case.gradient(rank, 0, param));
            let given = run.push_grad(name, &bytes);
            failed = failed.or(given.err());
        }
        assert!(matches!(failed, Some(PlanError::Collective(_))), "{failed:?}");
        let step = run.step();
        assert_eq!(step, Err(PlanError::Poisoned { step: 1 }));
    });
}

/// Requires a plan to be refused, by a message that names both passes.
fn refused(planner: Planner, world: usize, names: [&str; 2]) {
    let topology = Topology { reach: Reach::SharedMemory, ..Topology::new(0, world).unwrap() };
    let planner = planner.with(in_backward());
    let error = planner.plan_for(&case(world).params(), topology);
    let error = error.unwrap_err();
    assert!(matches!(error, PlanError::Conflict { .. }), "{error:?}");
    for name in names {
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn what_needs_all_gradients_first_is_refused_when_the_plan_is_made() {
    let adam = || Planner::new(Adam::default().into()).with(FuseAllReduce::of_bytes(8_000));
    let own = "update_in_backward";
    for world in 1..=2 {
        let clip = adam().with(ClipByGlobalNorm::new(1.0));
        refused(clip, world, ["clip_by_global_norm", own]);
        let scaled = adam().with(LossScaling::dynamic());
        refused(scaled, world, ["loss_scaling", own]);
        refused(adam().with(UpdateNorms), world, ["update_norms", own]);
    }
    for rule in [Lars::default().into(), Lamb::default().into()] {
        refused(Planner::new(rule), 2, ["lars or lamb", own]);
    }
    let each = GradientAccumulation::every(NonZeroU32::new(2).unwrap());
    let each = each.reduced(ReducedWhen::PerMicroStep);
    refused(adam().with(each), 2, ["every micro-step", own]);
    refused(adam().with(Shard::new(ZeroStage::Three)), 2, ["zero stage 3", own]);
    let borrowed = Planner::new(Adam::default().into()).tensors(Tensors::Borrowed);
    refused(borrowed, 1, ["borrowed tensors", own]);
    let twice = adam().with(in_backward()).with(in_backward());
    assert_eq!(twice.plan(&case(1).params()).unwrap_err(), PlanError::PassTwice { pass: own });
}

#[test]
fn a_plan_says_that_it_updates_in_backward_and_ranks_that_differ_do_not_fit() {
    let case = case(2);
    let topology = Topology::new(0, 2).unwrap();
    let plan = |planner: Planner| planner.plan_for(&case.params(), topology).unwrap();
    let (plain, found) = (plan(case.planner()), plan(case.planner().with(in_backward())));
    assert_ne!(plain.hash(), found.hash());
    assert!(found.summary().update_in_backward && !plain.summary().update_in_backward);
    assert!(found.stages().iter().all(|stage| found.when(stage) == When::Ready));
    let note = found.explain().iter().find(|note| note.pass == "update_in_backward");
    let note = note.unwrap();
    assert_eq!(note.verdict, Verdict::Applied);
    assert!(note.reason.contains("no longer read") && note.reason.contains("buckets"), "{note}");
    let text = found.to_string();
    assert!(text.contains("as soon as their gradients are given"), "{text}");
    assert!(found.summary().update_in_backward);
}

#[test]
fn a_step_that_is_left_half_way_is_forgotten_when_a_checkpoint_is_loaded() {
    for (world, zero) in [(1, ZeroStage::None), (2, ZeroStage::One), (2, ZeroStage::Two)] {
        let case = Case { zero, ..case(world) };
        let expected = train(&case, &case.planner());
        let folder = tempfile::tempdir().unwrap();
        let found = on_ranks(world, |comm| {
            let plan = plan_of(&case, case.planner().with(in_backward()), comm);
            let (backend, rank) = (backend(), plan.topology().rank);
            let mut comms = Comms::direct(comm);
            let mut state = start(&case, &plan, &backend);
            let nothing = std::collections::BTreeMap::new();
            save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), nothing)
                .unwrap();
            // The first two buckets of four, with gradients of another step.
            for param in (3..case.numels.len()).rev() {
                let bytes = case.gradient(rank, 7, param);
                let name = &plan.params()[param].name;
                Run::of(&plan, &mut state, &backend, &mut comms).push_grad(name, &bytes).unwrap();
            }
            let begun = moved(&case, &plan, &state);
            assert_eq!(begun.into_iter().filter(|&moved| moved).count(), 4);
            let nothing = std::collections::BTreeMap::new();
            let saved =
                save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), nothing);
            assert!(matches!(saved, Err(PlanError::Conflict { .. })), "{saved:?}");
            load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
            assert!(moved(&case, &plan, &state).into_iter().all(|moved| !moved));
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for step in 0..case.steps {
                push(&case, &mut run, step);
                run.step().unwrap();
            }
            whole_params(&mut run)
        });
        for (found, expected) in found.iter().zip(&expected) {
            assert!(*found == expected.params, "{case:?}");
        }
    }
}

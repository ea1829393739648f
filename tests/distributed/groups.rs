//! Shards within groups of ranks: gradients are averaged in each group, then over groups, in order.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use fusestep_checkpoint::{Manifest, load, save};
use fusestep_collective::{Collectives, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, CostModel, Run, RunToLoad, RunToSave, Topology, ZeroStage};
use fusestep_tensor::Role;
use fusestep_testkit::each_rule;

use crate::run::{Case, Mixed, whole_params};

fn grouped(world: usize, group: usize) -> Case {
    Case {
        numels: vec![70_001, 3, 0, 5_000, 257],
        world,
        shard_group: NonZeroUsize::new(group),
        zero: ZeroStage::Two,
        clip: Some(1.0),
        without_gradient: vec![(1, 1, 1), (0, 2, 0)],
        ..Case::default()
    }
}

#[test]
fn every_stage_and_any_buckets_give_the_bits_of_means_of_means() {
    for (world, group) in [(4, 2), (6, 2), (6, 3), (3, 1), (4, 4)] {
        let base = grouped(world, group);
        let expected = base.by_hand().params;
        for (zero, cap, streams) in [
            (ZeroStage::One, Some(100_000), 0),
            (ZeroStage::Two, Some(4_000), 2),
            (ZeroStage::Two, None, 0),
            (ZeroStage::Three, Some(100_000), 1),
        ] {
            let case = Case { zero, cap, streams, ..base.clone() };
            assert!(case.run().params == expected, "{world} {group} {zero:?} {cap:?} {streams}");
        }
    }
    let (one_group, world) = (grouped(4, 4).by_hand(), Case { shard_group: None, ..grouped(4, 4) });
    assert!(one_group.params == world.run().params, "a group of all ranks is no group");
}

#[test]
fn every_rule_merges_and_skips_alike_in_groups() {
    for rule in each_rule() {
        let base = Case {
            rule,
            mixed: Mixed::Yes,
            merge: 2,
            scaled: Some(8.0),
            infinite: Some((3, 2, 4)),
            zero: ZeroStage::One,
            ..grouped(4, 2)
        };
        let expected = base.run();
        assert_eq!(expected.skipped, 1);
        for zero in [ZeroStage::Two, ZeroStage::Three] {
            let found = Case { zero, ..base.clone() }.run();
            assert!(found.params == expected.params, "{} {zero:?}", rule.name());
        }
    }
}

/// Saves after a step, loads in a plan of other groups, and returns the parameters of both.
#[test]
fn one_group_saves_and_any_world_goes_on() {
    let case = grouped(4, 2);
    let folder = tempfile::tempdir().unwrap();
    let whole = run_ranks(4, &Options::default(), |mut comm| {
        let topology = Topology::of(&comm);
        let plan = case.planner().plan_for(&case.params(), topology).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut comms = Comms::in_groups(&mut comm, NonZeroUsize::new(2).unwrap(), 0).unwrap();
        let mut state = plan.allocate(&backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            let values = case.first_values(param);
            state.write(&backend, Role::Param, &desc.name, &values).unwrap();
            let bytes = case.gradient(topology.rank, 0, param);
            Run::of(&plan, &mut state, &backend, &mut comms).push_grad(&desc.name, &bytes).unwrap();
        }
        Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), BTreeMap::new())
            .unwrap();
        whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    });
    let whole = whole.unwrap().pop().unwrap().unwrap();
    // Those of the first group, and the model's.
    assert_eq!(Manifest::read(folder.path()).unwrap().shards.len(), 3);
    for (world, group) in [(1, 1), (2, 1), (3, 3), (4, 2)] {
        let case = Case { world, ..grouped(4, group) };
        let found = run_ranks(world, &Options::default(), |mut comm| {
            let topology = Topology::of(&comm);
            let plan = case.planner().plan_for(&case.params(), topology).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let group = NonZeroUsize::new(group).unwrap();
            let mut comms = Comms::in_groups(&mut comm, group, 0).unwrap();
            let mut state = plan.allocate(&backend).unwrap();
            load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
            assert_eq!(state.step(), 1);
            whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
        });
        for found in found.unwrap() {
            assert!(found.unwrap() == whole, "{world} {group:?}");
        }
    }
}

#[test]
fn a_rank_keeps_its_groups_part_and_sends_less_within_it() {
    let plan = |group| {
        let case = Case {
            shard_group: NonZeroUsize::new(group),
            // Norms would have parts end with leaves; without them they are even to a few elements.
            clip: None,
            ..grouped(8, 8)
        };
        let topology = Topology::new(5, 8).unwrap();
        case.planner().plan_for(&case.params(), topology).unwrap()
    };
    let state = |group| plan(group).state_bytes();
    let even = |state: u64, other: u64| {
        assert!(state.abs_diff(other) <= 8 * 64, "{state} {other}");
    };
    even(state(4), 2 * state(8));
    even(state(1), 8 * state(8));
    let (world, groups) = (plan(8), plan(4));
    assert_eq!((groups.shard_place().rank, groups.shard_place().world), (1, 4));
    assert_ne!(world.hash(), groups.hash());
    let link = fusestep_collective::Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 };
    let summary = |plan: &fusestep_planner::Plan| plan.rank_summary(CostModel::from(link));
    let buckets = summary(&world).buckets as u64;
    assert_eq!(summary(&groups).collectives, summary(&world).collectives + buckets);
    // In slots of 64 elements: 70,016 and 64 and 5,056 and 320. The same elements as in a plain
    // reduce-scatter and all-gather, a group's at a time, and the mean over two groups of the
    // shard, whose elements have two moments each; besides, 8 ranks tell each other which of 5
    // gradients there are, and two hashes with their complements.
    let (bytes, shard) = (75_456 * 4, groups.state_bytes() / 2);
    even(2 * shard, 2 * bytes / 4);
    let expected = 2 * bytes * 3 / 4 + shard + 2 * ((5 + 32) * 7 / 8);
    // Each call rounds down.
    assert!(expected - summary(&groups).bytes_on_wire <= summary(&groups).collectives);
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    let case = grouped(3, 2);
    let topology = Topology::new(0, 3).unwrap();
    let error = case.planner().plan_for(&case.params(), topology).unwrap_err().to_string();
    assert!(
        error.contains("multiple of a shard group's 2 ranks") && error.contains("3 ranks"),
        "{error}"
    );
    let case = grouped(4, 2);
    let errors = run_ranks(4, &Options::default(), |mut comm| {
        let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        let error = Comms::in_groups(&mut comm, NonZeroUsize::new(3).unwrap(), 0).unwrap_err();
        assert!(error.to_string().contains("multiple"), "{error}");
        let mut comms = Comms::direct(&mut comm);
        let error = Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap_err();
        error.to_string()
    });
    for error in errors.unwrap() {
        let error = error.unwrap();
        assert!(error.contains("in_groups") && error.contains("2 ranks"), "{error}");
    }
}

/// What becomes of a rank that does not take part in the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Absence {
    Panics,
    Leaves,
    /// Until the others' deadlines have passed.
    Stays,
}

/// Trains one step in groups of two; `absent` ranks do not take part in it.
fn one_step(
    (streams, timeout_ms): (usize, u64),
    (absent, absence): (&[usize], Absence),
) -> Vec<(usize, String)> {
    let options = Options { timeout: Duration::from_millis(timeout_ms), ..Options::default() };
    let ended = run_ranks(4, &options, |mut comm| {
        let case = grouped(4, 2);
        let topology = Topology::of(&comm);
        let plan = case.planner().plan_for(&case.params(), topology).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let group = NonZeroUsize::new(2).unwrap();
        let mut comms = Comms::in_groups(&mut comm, group, streams).unwrap();
        let mut state = plan.allocate(&backend).unwrap();
        // Nobody is gone before all have their groups.
        comms.communicator().barrier().unwrap();
        if absent.contains(&topology.rank) {
            match absence {
                Absence::Panics => std::panic::resume_unwind(Box::new("on purpose")),
                Absence::Leaves => return Ok(()),
                Absence::Stays => std::thread::sleep(4 * options.timeout),
            }
        }
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        for (param, desc) in plan.params().iter().enumerate() {
            let bytes = case.gradient(topology.rank, 0, param);
            run.push_grad(&desc.name, &bytes)?;
        }
        run.step().map(drop)
    });
    let ended = ended.unwrap().into_iter().enumerate();
    ended
        .filter(|(rank, _)| !absent.contains(rank))
        .map(|(rank, ended)| (rank, ended.unwrap().unwrap_err().to_string()))
        .collect()
}

#[test]
fn every_rank_of_every_group_names_the_rank_of_the_world_that_is_gone() {
    for (absence, words) in [(Absence::Panics, "rank 2 panicked"), (Absence::Leaves, "rank 2 left")]
    {
        for streams in [0, 2] {
            for (rank, error) in one_step((streams, 20_000), (&[2], absence)) {
                assert!(error.contains(words), "{streams}, rank {rank}: {error}");
            }
        }
    }
}

/// A whole group is late: whoever is named first is one of it, and by its rank in the world.
#[test]
fn every_rank_names_late_ranks_of_another_group_as_the_world_does() {
    for streams in [0, 2] {
        for (rank, error) in one_step((streams, 300), (&[2, 3], Absence::Stays)) {
            let named = ["none of [2]", "none of [3]", "none of [2, 3]"];
            let is_named = named.iter().any(|named| error.contains(named));
            assert!(is_named, "{streams}, rank {rank}: {error}");
        }
    }
}

//! Runs saved in the middle of a merge window and between averages go on as if nothing had happened.

use std::collections::BTreeMap;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;

use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, Interval, LocalSgd, Manifest, Reduced, Topology, Zero};

use crate::run::{Case, Mixed, whole_params};

/// Micro-steps `from..to` of a case, each rank with its own gradients; loads before if `from` is above 0, and saves after if
/// there is a folder. Returns every rank's parameters.
fn part(case: &Case, folder: Option<&Path>, from: u64, to: u64) -> Vec<Vec<Vec<u8>>> {
    let outcomes = run_ranks(case.world, &Options::default(), |mut comm| {
        let topology = Topology::of(&comm);
        let plan = case.planner().plan_for(&case.params(), topology).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN).unwrap();
        let mut comms = Comms::direct(&mut comm);
        let mut state = plan.allocate(&backend).unwrap();
        match folder.filter(|_| from > 0) {
            Some(folder) => drop(plan.load(&mut state, &backend, folder).unwrap()),
            None => {
                for (param, desc) in plan.params().iter().enumerate() {
                    let values = case.first_values(param);
                    plan.write_param(&mut state, &backend, &desc.name, &values)
                        .unwrap();
                }
            }
        }
        for step in from..to {
            if !case.merge.is_multiple_of(2) {
                state.set_weight(1.0 + step as f64);
            }
            for (param, desc) in plan.params().iter().enumerate() {
                if !case.is_absent(topology.rank, step, param) {
                    let bytes = case.gradient(topology.rank, step, param);
                    plan.give_gradient(&mut state, &mut comms, &desc.name, &bytes)
                        .unwrap();
                }
            }
            state.set_loss(1.0 + step as f64 + topology.rank as f64);
            plan.run_with(&mut state, &backend, &mut comms).unwrap();
        }
        if let Some(folder) = folder {
            plan.save(&state, &backend, &mut comms, folder, BTreeMap::new())
                .unwrap();
        }
        whole_params(&plan, &state, &backend, &mut comms)
    });
    let outcomes = outcomes.unwrap().into_iter();
    outcomes
        .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}

fn refusal(case: &Case, folder: &Path) -> String {
    let topology = Topology::new(0, case.world).unwrap();
    let plan = case.planner().plan_for(&case.params(), topology).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    let before = format!("{state:?}");
    let error = plan.load(&mut state, &backend, folder).unwrap_err();
    assert_eq!(
        format!("{state:?}"),
        before,
        "a load that failed has changed the state"
    );
    error.to_string()
}

fn merging(reduced: Reduced, mixed: Mixed) -> Case {
    Case {
        numels: vec![700, 3, 0, 91, 40],
        world: 3,
        merge: 3,
        reduced,
        mixed,
        cap: Some(1_000),
        clip: Some(1.0),
        absent: vec![(0, 3, 1), (1, 4, 0), (0, 4, 3), (1, 4, 3), (2, 4, 3)],
        ..Case::default()
    }
}

#[test]
fn a_run_saved_within_a_window_goes_on_bit_for_bit() {
    for reduced in [Reduced::PerWindow, Reduced::PerMicroStep] {
        for mixed in [Mixed::No, Mixed::Yes] {
            let base = merging(reduced, mixed);
            let whole = part(&base, None, 0, 9);
            for zero in [Zero::Zero0, Zero::Zero1, Zero::Zero2, Zero::Zero3] {
                let case = Case {
                    zero,
                    ..base.clone()
                };
                for at in [1, 4, 5, 8] {
                    let folder = tempfile::tempdir().unwrap();
                    part(&case, Some(folder.path()), 0, at);
                    let manifest = Manifest::read(folder.path()).unwrap();
                    let window = manifest.open.unwrap().window.unwrap();
                    assert_eq!(u64::from(window.micro_steps), at % 3);
                    assert_eq!((manifest.version, manifest.step), (2, at / 3));
                    // At another stage and with other buckets: sums are saved by tensor.
                    let resumed = Case {
                        zero: Zero::of((zero.number() + 1) % 4).unwrap(),
                        cap: Some(400),
                        ..case.clone()
                    };
                    let found = part(&resumed, Some(folder.path()), at, 9);
                    assert!(found == whole, "{zero:?} {reduced:?} {mixed:?} {at}");
                }
            }
        }
    }
}

#[test]
fn one_saves_twice_within_a_window_and_the_newer_counts() {
    let case = merging(Reduced::PerWindow, Mixed::No);
    let folder = tempfile::tempdir().unwrap();
    part(&case, Some(folder.path()), 0, 4);
    part(&case, Some(folder.path()), 4, 5);
    let manifest = Manifest::read(folder.path()).unwrap();
    assert_eq!(
        (manifest.step, manifest.generation.as_str()),
        (1, "step-00000001-b")
    );
    let found = part(&case, Some(folder.path()), 5, 9);
    assert!(found == part(&case, None, 0, 9));
    let manifest = Manifest::read(folder.path()).unwrap();
    assert_eq!(
        (manifest.version, manifest.open),
        (1, None),
        "no window is open"
    );
}

#[test]
fn an_open_window_is_refused_where_it_does_not_fit() {
    let case = merging(Reduced::PerWindow, Mixed::No);
    let folder = tempfile::tempdir().unwrap();
    part(&case, Some(folder.path()), 0, 4);
    let others = [
        (
            Case {
                world: 2,
                ..case.clone()
            },
            ["2 ranks", "flush"],
        ),
        (
            Case {
                merge: 4,
                ..case.clone()
            },
            ["windows of 4", "windows of 3"],
        ),
        (
            Case {
                merge: 1,
                ..case.clone()
            },
            ["no merge", "windows of 3"],
        ),
        (
            Case {
                reduced: Reduced::PerMicroStep,
                ..case.clone()
            },
            ["reduced in every one", "once per window"],
        ),
    ];
    for (other, named) in others {
        let error = refusal(&other, folder.path());
        for part in ["gradient_merge", named[0], named[1]] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

fn averaging(rule: LocalSgd) -> Case {
    Case {
        numels: vec![70, 3, 0, 9],
        world: 3,
        scaled: Some(8.0),
        local_sgd: Some(rule),
        // One rank skips, another leaves a parameter out: their counts differ.
        infinite: Some((1, 2, 0)),
        absent: vec![(2, 1, 3)],
        ..Case::default()
    }
}

#[test]
fn local_sgd_goes_on_bit_for_bit_between_averages() {
    let rule = LocalSgd::every(NonZeroU64::new(4).unwrap());
    for rule in [rule, rule.adaptive()] {
        for merge in [1, 2] {
            let case = Case {
                merge,
                ..averaging(rule)
            };
            let whole = part(&case, None, 0, 22);
            let fixed = rule.interval == Interval::Fixed;
            assert!(
                !fixed || whole[0] != whole[1],
                "ranks differ between averages"
            );
            for at in [1, 3, 5, 12] {
                let folder = tempfile::tempdir().unwrap();
                part(&case, Some(folder.path()), 0, at);
                let found = part(&case, Some(folder.path()), at, 22);
                assert!(found == whole, "{rule:?} {merge} {at}");
            }
        }
    }
}

#[test]
fn a_local_sgd_run_is_refused_by_other_ranks_and_other_plans() {
    let case = averaging(LocalSgd::every(NonZeroU64::new(4).unwrap()));
    let folder = tempfile::tempdir().unwrap();
    part(&case, Some(folder.path()), 0, 3);
    let error = refusal(
        &Case {
            world: 2,
            ..case.clone()
        },
        folder.path(),
    );
    assert!(
        error.contains("2 ranks") && error.contains("average them"),
        "{error}"
    );
    let plain = Case {
        local_sgd: None,
        ..case.clone()
    };
    let error = refusal(&plain, folder.path());
    assert!(
        error.contains("no averages") && error.contains("every 4 steps"),
        "{error}"
    );
    let other = tempfile::tempdir().unwrap();
    part(&plain, Some(other.path()), 0, 3);
    let error = refusal(&case, other.path());
    assert!(
        error.contains("local_sgd") && error.contains("no averages"),
        "{error}"
    );
}

//! Runs saved in the middle of a merge window and between averages go on as if nothing had
//! happened.

use std::collections::BTreeMap;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;

use fusestep_checkpoint::{Manifest, load, save};
use fusestep_collective::{Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Comms, Interval, LocalSgd, ReducedWhen, Run, RunToLoad, RunToSave, Topology, ZeroStage,
};
use fusestep_tensor::Role;

use crate::run::{Case, Exact, Mixed, whole_params};

/// Micro-steps `from..to` of a case, each rank with its own gradients; loads before if `from` is
/// above 0, and saves after if there is a folder. Returns every rank's parameters.
fn part(case: &Case, folder: Option<&Path>, from: u64, to: u64) -> Vec<Vec<Vec<u8>>> {
    part_with(case, folder, (from, to), |rank, _| rank)
}

/// As above, with the gradients that the rank `of` a rank and micro-step has.
fn part_with(
    case: &Case,
    folder: Option<&Path>,
    (from, to): (u64, u64),
    of: fn(usize, u64) -> usize,
) -> Vec<Vec<Vec<u8>>> {
    let outcomes = run_ranks(case.world, &Options::default(), |mut comm| {
        let topology = Topology::of(&comm);
        let plan = case.planner().plan_for(&case.params(), topology).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut comms = Comms::direct(&mut comm);
        let mut state = plan.allocate(&backend).unwrap();
        match folder.filter(|_| from > 0) {
            Some(folder) => drop(load(RunToLoad::of(&plan, &mut state, &backend), folder).unwrap()),
            None => {
                for (param, desc) in plan.params().iter().enumerate() {
                    let values = case.first_values(param);
                    state.write(&backend, Role::Param, &desc.name, &values).unwrap();
                }
            }
        }
        for step in from..to {
            if !case.merge.is_multiple_of(2) {
                state.set_weight(1.0 + step as f64).unwrap();
            }
            for (param, desc) in plan.params().iter().enumerate() {
                let rank = of(topology.rank, step);
                if !case.lacks_gradient(rank, step, param) {
                    let bytes = case.gradient(rank, step, param);
                    Run::of(&plan, &mut state, &backend, &mut comms)
                        .push_grad(&desc.name, &bytes)
                        .unwrap();
                }
            }
            state.set_loss(1.0 + step as f64 + topology.rank as f64);
            Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
        }
        if let Some(folder) = folder {
            save(RunToSave::of(&plan, &state, &backend), &mut comms, folder, BTreeMap::new())
                .unwrap();
        }
        whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    });
    let outcomes = outcomes.unwrap().into_iter();
    outcomes
        .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}

fn refusal(case: &Case, folder: &Path) -> String {
    let topology = Topology::new(0, case.world).unwrap();
    let plan = case.planner().plan_for(&case.params(), topology).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    let before = format!("{state:?}");
    let error = load(RunToLoad::of(&plan, &mut state, &backend), folder).unwrap_err();
    assert_eq!(format!("{state:?}"), before, "a load that failed has changed the state");
    error.to_string()
}

fn merging(reduced: ReducedWhen, mixed: Mixed) -> Case {
    Case {
        numels: vec![700, 3, 0, 91, 40],
        world: 3,
        merge: 3,
        reduced,
        mixed,
        cap: Some(1_000),
        clip: Some(1.0),
        without_gradient: vec![(0, 3, 1), (1, 4, 0), (0, 4, 3), (1, 4, 3), (2, 4, 3)],
        ..Case::default()
    }
}

#[test]
fn a_run_saved_within_a_window_goes_on_bit_for_bit() {
    for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
        for mixed in [Mixed::No, Mixed::Yes] {
            let base = merging(reduced, mixed);
            let whole = part(&base, None, 0, 9);
            for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                let case = Case { zero, ..base.clone() };
                for at in [1, 4, 5, 8] {
                    let folder = tempfile::tempdir().unwrap();
                    part(&case, Some(folder.path()), 0, at);
                    let manifest = Manifest::read(folder.path()).unwrap();
                    let window = manifest.open.unwrap().window.unwrap();
                    assert_eq!(u64::from(window.micro_steps), at % 3);
                    assert_eq!(manifest.step, at / 3);
                    // At another stage and with other buckets: sums are saved by tensor.
                    let resumed = Case {
                        zero: ZeroStage::of((zero.number() + 1) % 4).unwrap(),
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
    let case = merging(ReducedWhen::PerWindow, Mixed::No);
    let folder = tempfile::tempdir().unwrap();
    part(&case, Some(folder.path()), 0, 4);
    part(&case, Some(folder.path()), 4, 5);
    let manifest = Manifest::read(folder.path()).unwrap();
    assert_eq!((manifest.step, manifest.generation.as_str()), (1, "step-00000001-b"));
    let found = part(&case, Some(folder.path()), 5, 9);
    assert!(found == part(&case, None, 0, 9));
    let manifest = Manifest::read(folder.path()).unwrap();
    assert_eq!(manifest.open, None, "no window is open");
}

#[test]
fn an_open_window_is_refused_where_it_does_not_fit() {
    let case = merging(ReducedWhen::PerWindow, Mixed::No);
    let folder = tempfile::tempdir().unwrap();
    part(&case, Some(folder.path()), 0, 4);
    let others = [
        (Case { world: 2, ..case.clone() }, ["2 ranks", "flush"]),
        (Case { merge: 4, ..case.clone() }, ["windows of 4", "windows of 3"]),
        (Case { merge: 1, ..case.clone() }, ["no merge", "windows of 3"]),
        (
            Case { reduced: ReducedWhen::PerMicroStep, ..case.clone() },
            ["reduced in every one", "once per window"],
        ),
    ];
    for (other, named) in others {
        let error = refusal(&other, folder.path());
        for part in ["accumulate", named[0], named[1]] {
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
        // All skip a step for one, and another leaves a parameter out: their counts differ.
        infinite: Some((1, 2, 0)),
        without_gradient: vec![(2, 1, 3)],
        ..Case::default()
    }
}

#[test]
fn local_sgd_goes_on_bit_for_bit_between_averages() {
    let rule = LocalSgd::every(NonZeroU64::new(4).unwrap());
    for rule in [rule, rule.adaptive()] {
        for merge in [1, 2] {
            let case = Case { merge, ..averaging(rule) };
            let whole = part(&case, None, 0, 22);
            let fixed = rule.interval == Interval::Fixed;
            assert!(!fixed || whole[0] != whole[1], "ranks differ between averages");
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
    let error = refusal(&Case { world: 2, ..case.clone() }, folder.path());
    assert!(error.contains("2 ranks") && error.contains("average them"), "{error}");
    let plain = Case { local_sgd: None, ..case.clone() };
    let error = refusal(&plain, folder.path());
    assert!(error.contains("no averages") && error.contains("every 4 steps"), "{error}");
    let other = tempfile::tempdir().unwrap();
    part(&plain, Some(other.path()), 0, 3);
    let error = refusal(&case, other.path());
    assert!(error.contains("local_sgd") && error.contains("no averages"), "{error}");
}

/// Own gradients in the micro-steps before 6, rank 0's on all ranks from then on: their mean is
/// that of any number of ranks.
fn own_then_first(rank: usize, step: u64) -> usize {
    if step < 6 { rank } else { 0 }
}

fn window_of_four(reduced: ReducedWhen, mixed: Mixed) -> Case {
    Case {
        world: 4,
        merge: 4,
        exact: Exact::Yes,
        without_gradient: vec![(1, 4, 0), (3, 5, 0), (2, 4, 1)],
        ..merging(reduced, mixed)
    }
}

#[test]
fn the_mean_of_an_open_window_goes_on_with_any_number_of_ranks() {
    for mixed in [Mixed::No, Mixed::Yes] {
        let case = window_of_four(ReducedWhen::PerWindow, mixed);
        let expected = part_with(&case, None, (0, 12), own_then_first);
        let folder = tempfile::tempdir().unwrap();
        part(&case, Some(folder.path()), 0, 6);
        let two = Case { world: 2, ..case.clone() };
        let error = refusal(&two, folder.path());
        assert!(error.contains("--average") && error.contains("@window"), "{error}");
        let mean = tempfile::tempdir().unwrap();
        let manifest = Manifest::read(folder.path()).unwrap();
        let written = manifest.average(folder.path(), mean.path(), 3).unwrap();
        assert_eq!(written.open.as_ref().unwrap().ranks, 1);
        for world in [1, 2, 4] {
            for zero in [ZeroStage::None, ZeroStage::Two, ZeroStage::Three] {
                let other = Case { world, zero, ..case.clone() };
                let folder = tempfile::tempdir().unwrap();
                written.reshard(mean.path(), folder.path(), 1).unwrap();
                let found = part_with(&other, Some(folder.path()), (6, 12), own_then_first);
                assert!(found[0] == expected[0], "{world} {zero:?} {mixed:?}");
            }
        }
    }
}

#[test]
fn a_window_reduced_in_every_micro_step_goes_on_with_any_number_of_ranks_as_it_is() {
    let case = window_of_four(ReducedWhen::PerMicroStep, Mixed::No);
    let expected = part_with(&case, None, (0, 12), own_then_first);
    for world in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        part(&case, Some(folder.path()), 0, 6);
        let other = Case { world, zero: ZeroStage::One, ..case.clone() };
        let found = part_with(&other, Some(folder.path()), (6, 12), own_then_first);
        assert!(found[0] == expected[0], "{world}");
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let four = bytes.chunks_exact(4);
    four.map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn mean_of(ranks: &[&[u8]]) -> Vec<f32> {
    let ranks: Vec<Vec<f32>> = ranks.iter().map(|bytes| floats(bytes)).collect();
    let mean = |at: usize| {
        let values = ranks.iter().map(|rank| rank[at]);
        values.reduce(|sum, value| sum + value).unwrap() / ranks.len() as f32
    };
    (0..ranks[0].len()).map(mean).collect()
}

#[test]
fn a_local_sgd_run_goes_on_with_other_ranks_once_it_has_been_averaged() {
    let case = averaging(LocalSgd::every(NonZeroU64::new(4).unwrap()));
    let folder = tempfile::tempdir().unwrap();
    let ranks = part(&case, Some(folder.path()), 0, 7);
    let two = Case { world: 2, ..case.clone() };
    let error = refusal(&two, folder.path());
    assert!(error.contains("3 ranks") && error.contains("--average"), "{error}");
    let mean = tempfile::tempdir().unwrap();
    let manifest = Manifest::read(folder.path()).unwrap();
    let written = manifest.average(folder.path(), mean.path(), 2).unwrap();
    let own = manifest.read_tensors(folder.path()).unwrap();
    let averaged = written.read_tensors(mean.path()).unwrap();
    for role in ["param", "moment1", "moment2"] {
        let key = |rank| format!("layer0.weight0@{role}#{rank}");
        let of_ranks: Vec<&[u8]> = (0..3).map(|rank| own[&key(rank)].as_slice()).collect();
        assert!(of_ranks[0] != of_ranks[1]);
        assert_eq!(floats(&averaged[&key(0)]), mean_of(&of_ranks), "{role}");
        assert!(!averaged.contains_key(&key(1)));
    }
    for world in [1, 2, 5] {
        let other = Case { world, ..case.clone() };
        let folder = tempfile::tempdir().unwrap();
        written.reshard(mean.path(), folder.path(), 1).unwrap();
        let found = part(&other, Some(folder.path()), 7, 7);
        for (param, bytes) in found[world - 1].iter().enumerate() {
            let of_ranks: Vec<&[u8]> = ranks.iter().map(|rank| rank[param].as_slice()).collect();
            assert_eq!(floats(bytes), mean_of(&of_ranks), "{world} {param}");
        }
        // It was an average: the next comes four steps later.
        let before = part(&other, Some(folder.path()), 7, 10);
        let after = part(&other, Some(folder.path()), 10, 11);
        assert!(world == 1 || before[0] != before[world - 1], "{world}");
        assert!(after[0] == after[world - 1], "{world}");
    }
    let again = written.average(mean.path(), tempfile::tempdir().unwrap().path(), 1);
    assert_eq!(again.unwrap().open.unwrap().ranks, 1);
}

#[test]
fn what_ranks_have_alike_at_an_average_any_number_of_them_loads() {
    let rule = LocalSgd::every(NonZeroU64::new(4).unwrap());
    let alike = Case { infinite: None, scaled: None, ..averaging(rule) };
    let no_state = Sgd { momentum: 0.0, ..Sgd::default() };
    let plain = Case { rule: no_state.into(), ..alike.clone() };
    let with_state = Case {
        local_sgd: Some(LocalSgd { averaged: fusestep_planner::Averaged::ParamsAndState, ..rule }),
        ..alike.clone()
    };
    for (case, at, loads) in
        [(&plain, 4, true), (&plain, 5, false), (&with_state, 4, true), (&alike, 4, false)]
    {
        let case = Case { without_gradient: Vec::new(), ..case.clone() };
        let folder = tempfile::tempdir().unwrap();
        let ranks = part(&case, Some(folder.path()), 0, at);
        let other = Case { world: 2, ..case.clone() };
        if loads {
            let found = part(&other, Some(folder.path()), at, at);
            assert!(found[0] == ranks[0] && found[1] == ranks[2]);
            continue;
        }
        let error = refusal(&other, folder.path());
        let differs = if at == 4 { "@moment1" } else { "@param" };
        assert!(error.contains(differs), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let closed = Case { local_sgd: None, ..alike };
    part(&closed, Some(folder.path()), 0, 2);
    let manifest = Manifest::read(folder.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let error = manifest.average(folder.path(), out.path(), 1).unwrap_err();
    assert!(error.to_string().contains("any number of ranks"), "{error}");
}

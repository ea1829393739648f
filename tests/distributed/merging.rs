//! Gradient merge and LocalSGD.

use std::num::{NonZeroU32, NonZeroU64};

use fusestep_collective::{Communicator, Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Averaged, Comms, GradientAccumulation, LocalSgd, PlanError, Planner, ReducedWhen, Run, Shard,
    State, Topology, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::run::{Case, Exact, Mixed};
use crate::train::train;

fn every(steps: u64) -> LocalSgd {
    LocalSgd::every(NonZeroU64::new(steps).unwrap())
}

fn same_at_every_stage(base: &Case) {
    let expected = base.run();
    for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        for (cap, streams) in [(Some(40_000), 0), (Some(1 << 20), 2)] {
            let case = Case { zero, cap, streams, ..base.clone() };
            assert!(case.run().params == expected.params, "{case:?}");
        }
    }
}

#[test]
fn merged_steps_give_the_same_bits_at_every_stage_and_with_any_streams() {
    for mixed in [Mixed::No, Mixed::Yes] {
        let base = Case {
            merge: 3,
            world: 3,
            mixed,
            steps: 2,
            cap: None,
            without_gradient: vec![(0, 1, 3), (1, 5, 4), (0, 3, 0), (0, 4, 0)],
            ..Case::default()
        };
        same_at_every_stage(&base);
    }
}

#[test]
fn empty_tensors_take_no_memory_for_sums() {
    // The second and the last are bf16, whose sums are f32; what a plan says is what a run holds.
    for world in [1, 2] {
        for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
            let case = Case {
                numels: vec![0, 0, 5_000, 5_000, 1, 0],
                mixed: Mixed::Yes,
                merge: 2,
                world,
                reduced,
                ..Case::default()
            };
            assert_eq!(case.run().reports.len(), 3);
        }
    }
}

#[test]
fn gradients_reduced_in_every_micro_step_give_the_same_bits_at_every_stage() {
    for mixed in [Mixed::No, Mixed::Yes] {
        let base = Case {
            merge: 3,
            reduced: ReducedWhen::PerMicroStep,
            world: 3,
            mixed,
            steps: 2,
            cap: None,
            clip: Some(1.0),
            without_gradient: vec![(0, 1, 3), (1, 5, 4), (0, 3, 0), (0, 4, 0)],
            ..Case::default()
        };
        same_at_every_stage(&base);
    }
}

#[test]
fn reduced_per_micro_step_or_per_window_sums_are_the_same_where_they_are_exact() {
    for (world, exact) in [(1, Exact::No), (4, Exact::Yes)] {
        let once = Case {
            merge: 4,
            world,
            exact,
            zero: ZeroStage::Two,
            without_gradient: vec![(0, 1, 3), (0, 5, 4)],
            ..Case::default()
        };
        let each = Case { reduced: ReducedWhen::PerMicroStep, ..once.clone() };
        assert!(each.run().params == once.run().params, "{world} ranks");
    }
}

#[test]
fn weights_that_ranks_do_not_share_are_refused_by_all_of_them() {
    for zero in [ZeroStage::None, ZeroStage::Two] {
        let case = Case {
            merge: 2,
            reduced: ReducedWhen::PerMicroStep,
            world: 2,
            zero,
            ..Case::default()
        };
        let outcomes = run_ranks(2, &Options::default(), |mut comm| {
            let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
            let backend = CpuBackend::with_all_threads();
            let rank = comm.rank();
            let mut comms = Comms::direct(&mut comm);
            let mut state = plan.allocate(&backend).unwrap();
            state.set_weight(1.0 + rank as f64).unwrap();
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            run.step().unwrap();
            let error = run.step();
            error.unwrap_err().to_string()
        });
        for error in outcomes.unwrap() {
            assert!(error.unwrap().contains("same weights"));
        }
    }
}

/// One parameter of SGD at rate 1 without momentum, so that an update is the gradient itself.
fn updates(planner: Planner, dtype: DType, micro_steps: &[Option<(f32, f64)>]) -> Vec<f32> {
    let params = [ParamDesc::new("w", Shape::new([3]).unwrap(), dtype)];
    let plan = planner.plan_for(&params, Topology::SOLO).unwrap();
    let backend = CpuBackend::with_all_threads();
    let mut solo = Solo::new();
    let mut comms = Comms::direct(&mut solo);
    let mut state = plan.allocate(&backend).unwrap();
    let read = |state: &State| -> f32 {
        let mut bytes = vec![0; 3 * dtype.len_bytes()];
        state.read(&backend, Role::Param, "w", &mut bytes).unwrap();
        match dtype {
            DType::BF16 => half::bf16::from_le_bytes([bytes[2], bytes[3]]).to_f32(),
            _ => f32::from_le_bytes(bytes[4..8].try_into().unwrap()),
        }
    };
    let mut found = Vec::new();
    for micro_step in micro_steps {
        if let Some((value, weight)) = micro_step {
            if *weight != 1.0 {
                state.set_weight(*weight).unwrap();
            }
            let bytes = match dtype {
                DType::BF16 => half::bf16::from_f32(*value).to_le_bytes().repeat(3),
                _ => value.to_le_bytes().repeat(3),
            };
            Run::of(&plan, &mut state, &backend, &mut comms).push_grad("w", &bytes).unwrap();
        }
        Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
        found.push(-read(&state));
    }
    if Run::of(&plan, &mut state, &backend, &mut comms).flush().unwrap().update.is_some() {
        found.push(-read(&state));
    }
    found
}

fn sgd() -> Planner {
    let rule = Sgd { lr: 1.0, momentum: 0.0, ..Sgd::default() };
    Planner::new(rule.into())
}

fn merge(every: u32) -> GradientAccumulation {
    GradientAccumulation::every(NonZeroU32::new(every).unwrap())
}

#[test]
fn means_sums_weights_and_short_windows() {
    let give = |value| Some((value, 1.0));
    let steps = [give(1.0), give(2.0), give(6.0), give(5.0), give(7.0)];
    assert_eq!(updates(sgd().with(merge(3)), DType::F32, &steps), [0.0, 0.0, 3.0, 3.0, 3.0, 9.0]);
    assert_eq!(
        updates(sgd().with(merge(3).sum()), DType::F32, &steps),
        [0.0, 0.0, 9.0, 9.0, 9.0, 21.0]
    );
    assert_eq!(updates(sgd().with(merge(1)), DType::F32, &steps[..2]), [1.0, 3.0]);
    let weighted = [Some((1.0, 3.0)), Some((5.0, 1.0))];
    assert_eq!(updates(sgd().with(merge(2)), DType::F32, &weighted), [0.0, 2.0]);
    // A micro-step without a gradient counts as zero; a window without any leaves the parameter
    // alone.
    let gaps = [None, give(4.0), give(4.0), None, None, None];
    assert_eq!(updates(sgd().with(merge(2)), DType::F32, &gaps), [0.0, 2.0, 2.0, 4.0, 4.0, 4.0]);
}

#[test]
fn narrow_gradients_are_added_wide() {
    // 256 + 1 is 256 in bf16; in f32 four ones are not lost.
    let steps: Vec<_> = [256.0, 1.0, 1.0, 1.0, 1.0].map(|value| Some((value, 1.0))).into();
    let found = updates(sgd().with(merge(5).sum()), DType::BF16, &steps);
    assert_eq!(found.last(), Some(&260.0));
}

#[test]
fn local_sgd_of_interval_1_averages_parameters_each_step() {
    let base = Case { world: 3, local_sgd: Some(every(1)), ..Case::default() };
    let expected = base.run();
    let begin = LocalSgd { begin: 100, ..every(7) };
    let case = Case { local_sgd: Some(begin), ..base.clone() };
    assert!(case.run().params == expected.params);
    let separate = Case { local_sgd: Some(every(3)), ..base };
    assert!(separate.run().params != expected.params);
}

#[test]
fn local_sgd_of_plain_sgd_is_data_parallel_within_rounding() {
    let rule = Sgd { lr: 0.1, momentum: 0.9, ..Sgd::default() }.into();
    let averaged = LocalSgd { averaged: Averaged::ParamsAndState, ..every(1) };
    let case = Case { rule, world: 4, ..Case::default() };
    let expected = case.run();
    let found = Case { local_sgd: Some(averaged), ..case }.run();
    for (found, expected) in found.params.iter().zip(&expected.params) {
        for (a, b) in found.chunks_exact(4).zip(expected.chunks_exact(4)) {
            let (a, b) = (
                f32::from_le_bytes(a.try_into().unwrap()),
                f32::from_le_bytes(b.try_into().unwrap()),
            );
            assert!((a - b).abs() <= 1e-6, "{a} {b}");
        }
    }
}

#[test]
fn an_average_that_is_due_on_a_skipped_step_still_runs() {
    // Rank 1's gradient of the second step makes all skip it; the average after it counts it.
    let case = Case {
        world: 3,
        local_sgd: Some(every(2)),
        infinite: Some((1, 1, 0)),
        clip: Some(1.0),
        steps: 4,
        ..Case::default()
    };
    let found = train(&case, &case.planner());
    for rank in &found {
        let averaged: Vec<bool> = rank.reports.iter().map(|report| report.averaged).collect();
        assert_eq!(averaged, [false, true, false, true]);
        let updates = rank.reports.iter().map(|report| report.update.unwrap());
        let skipped: Vec<bool> = updates.map(|update| update.skipped).collect();
        assert_eq!(skipped, [false, true, false, false]);
        assert!(rank.params == found[0].params);
    }
}

#[test]
fn an_adaptive_interval_follows_the_mean_loss_on_all_ranks_alike() {
    let case = Case {
        world: 2,
        numels: vec![5, 3],
        local_sgd: Some(every(4).adaptive()),
        ..Case::default()
    };
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
        let backend = CpuBackend::with_all_threads();
        let rank = comm.rank();
        let mut comms = Comms::direct(&mut comm);
        let mut state = plan.allocate(&backend).unwrap();
        let mut found = Vec::new();
        // Means of 8, 2 and 0.5, of ranks that see other losses; the last step has none.
        for step in 0..8 {
            let mean = match step {
                0..=3 => 8.0,
                4..=5 => 2.0,
                _ => 0.5,
            };
            if step < 7 {
                state.set_loss(mean * [0.5, 1.5][rank]);
            }
            let grad = case.gradient(rank, step, 0);
            let name = &plan.params()[0].name;
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            run.push_grad(name, &grad).unwrap();
            let report = run.step().unwrap();
            found.push((report.averaged, state.local_interval()));
        }
        found
    });
    // 4 steps, then ⌈√4⌉ = 2, then ⌈√(2 / 8 · 4)⌉ = 1, then 1; without a loss 1.
    let expected = [
        (false, None),
        (false, None),
        (false, None),
        (true, Some(2)),
        (false, Some(2)),
        (true, Some(1)),
        (true, Some(1)),
        (true, Some(1)),
    ];
    for found in outcomes.unwrap() {
        assert_eq!(found.unwrap(), expected);
    }
}

#[test]
fn passes_that_contradict_each_other_are_both_named() {
    let params = [ParamDesc::new("w", Shape::new([3]).unwrap(), DType::F32)];
    let two = Topology::new(0, 2).unwrap();
    let planner = sgd().with(Shard::new(ZeroStage::Two)).with(every(2));
    let error = planner.plan_for(&params, two).unwrap_err();
    assert_eq!(
        error.to_string(),
        "zero stage 2 and local_sgd both decide how gradients are reduced; remove one"
    );
    let error = sgd().with(merge(2)).with(merge(3)).plan_for(&params, two).unwrap_err();
    assert_eq!(error, PlanError::PassTwice { pass: "accumulate" });
    assert!(Topology::new(2, 2).is_err());
}

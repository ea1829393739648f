//! Ranks that differ in what decides bits hear of it before the first step, all of them alike.

use std::num::NonZeroUsize;

use fusestep_checkpoint::{load_state, save_state};
use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_fused_sgd::{Nesterov, Sgd};
use fusestep_launch::WeightDecay;
use fusestep_planner::{
    ClipByGlobalNorm, Comms, FuseAllReduce, GradientAccumulation, LocalSgd, LossScaling, PlanError,
    Planner, Run, State, Topology, ZeroStage,
};
use fusestep_rmsprop::RmsProp;
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::run::Case;

/// What each rank hears if rank 2 of three plans with `own` in place of `common`.
fn outcomes(
    common: &(dyn Fn() -> Planner + Sync),
    own: &(dyn Fn() -> Planner + Sync),
    caller: [&str; 2],
) -> Vec<Result<(), PlanError>> {
    let case = Case::default();
    let ranks = run_ranks(3, &Options::default(), |mut comm| {
        let odd = comm.rank() == 2;
        let planner = if odd { own() } else { common() };
        let topology = Topology::of(&comm);
        let plan = planner.plan_for(&case.params(), topology).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            let values = case.first_values(param);
            state.write(&backend, Role::Param, &desc.name, &values).unwrap();
        }
        let seed = caller[usize::from(odd)].to_owned();
        let mut comms = Comms::direct(&mut comm);
        let done = Run::of(&plan, &mut state, &backend, &mut comms).handshake(&[("seed", seed)]);
        // Nothing is broken off: ranks may say why they end, or go on to agree.
        let mut one = [1.0f64];
        comms
            .communicator()
            .execute(fusestep_collective::Call {
                operation: fusestep_collective::Operation::AllReduce(
                    fusestep_collective::ReduceOp::Sum,
                ),
                dtype: DType::F64,
                counts: None,
                buffers: fusestep_collective::Buffers::InPlace(bytemuck::cast_slice_mut(&mut one)),
            })
            .unwrap();
        assert_eq!(one, [3.0]);
        done
    });
    ranks.unwrap().into_iter().map(Result::unwrap).collect()
}

fn adam(lr: f64) -> Planner {
    let rule = Adam { lr, ..Adam::default() };
    Planner::new(rule.into()).with(FuseAllReduce::default())
}

fn assert_differs(outcomes: Vec<Result<(), PlanError>>, field: &str, values: [&str; 2]) {
    for outcome in outcomes {
        let Err(PlanError::RanksDiffer { field: found_field, expected, rank, found }) = &outcome
        else {
            panic!("expected ranks that differ, found {outcome:?}");
        };
        assert_eq!((found_field.as_str(), *rank), (field, 2));
        assert!(expected.contains(values[0]), "{expected}");
        assert!(found.contains(values[1]), "{found}");
    }
}

#[test]
fn ranks_that_are_alike_go_on() {
    for outcome in outcomes(&|| adam(0.1), &|| adam(0.1), ["1", "1"]) {
        outcome.unwrap();
    }
}

#[test]
fn the_field_and_both_values_are_named_on_every_rank() {
    let all = outcomes(&|| adam(0.1), &|| adam(0.5), ["1", "1"]);
    assert_differs(all, "lr", ["0.1", "0.5"]);
    let all = outcomes(&|| adam(0.1), &|| adam(0.1), ["1", "2"]);
    assert_differs(all, "seed", ["1", "2"]);
    // Options that are no numbers, by their own names.
    let largest = || {
        let second_moment = SecondMoment::Largest;
        Planner::new(Adam { lr: 0.1, second_moment, ..Adam::default() }.into())
            .with(FuseAllReduce::default())
    };
    let all = outcomes(&|| adam(0.1), &largest, ["1", "1"]);
    assert_differs(all, "second_moment", ["running", "largest"]);
    let nesterov = |nesterov| move || Planner::new(Sgd { nesterov, ..Sgd::with_momentum() }.into());
    let all = outcomes(&nesterov(Nesterov::Plain), &nesterov(Nesterov::Nesterov), ["1", "1"]);
    assert_differs(all, "nesterov", ["plain", "nesterov"]);
    // Settings that a rule has a use for only where they are set.
    let rms = |momentum| move || Planner::new(RmsProp { momentum, ..RmsProp::default() }.into());
    let all = outcomes(&rms(0.0), &rms(0.9), ["1", "1"]);
    assert_differs(all, "momentum", ["0.0", "0.9"]);
    let all = outcomes(&rms(0.9), &rms(0.0), ["1", "1"]);
    assert_differs(all, "momentum", ["0.9", "0.0"]);
    let decay = |weight_decay| move || Planner::new(Sgd { weight_decay, ..Sgd::default() }.into());
    let (l2, decoupled) = (WeightDecay::L2(0.5), WeightDecay::Decoupled(0.5));
    let all = outcomes(&decay(l2), &decay(decoupled), ["1", "1"]);
    assert_differs(all, "weight_decay", ["l2(0.5)", "decoupled(0.5)"]);
    let clipped = || adam(0.1).with(ClipByGlobalNorm::new(1.0));
    let other = || adam(0.1).with(ClipByGlobalNorm::new(2.0));
    assert_differs(outcomes(&clipped, &other, ["1", "1"]), "clip_by_global_norm", ["1", "2"]);
    let local = |begin| {
        move || adam(0.1).with(LocalSgd { begin, ..LocalSgd::every(std::num::NonZeroU64::MIN) })
    };
    assert_differs(
        outcomes(&local(0), &local(7), ["1", "1"]),
        "local_sgd",
        ["parameters every 1 step", "the first 7 steps"],
    );
    let merged = || adam(0.1).with(GradientAccumulation::every(2.try_into().unwrap()));
    assert_differs(
        outcomes(&|| adam(0.1), &merged, ["1", "1"]),
        "accumulate",
        ["1 micro-step", "2 micro-steps, their mean, reduced once per update"],
    );
    let naive = || Planner::new(Adam { lr: 0.1, ..Adam::default() }.into());
    assert_differs(
        outcomes(&|| adam(0.1), &naive, ["1", "1"]),
        "buckets",
        ["at most 26214400 bytes, longer tensors cut", "one for each tensor"],
    );
    let scaled = || adam(0.1).with(LossScaling::dynamic());
    assert_differs(
        outcomes(&|| adam(0.1), &scaled, ["1", "1"]),
        "loss_scaling",
        ["none", "65536 after 0 good"],
    );
    let shard = |zero| move || adam(0.1).with(fusestep_planner::Shard::new(zero));
    assert_differs(
        outcomes(&shard(ZeroStage::One), &shard(ZeroStage::Two), ["1", "1"]),
        "zero stage",
        ["1", "2"],
    );
}

#[test]
fn fields_of_the_caller_alone_are_compared() {
    let ranks = run_ranks(3, &Options::default(), |mut comm| {
        let odd = comm.rank() == 2;
        let mut comms = Comms::direct(&mut comm);
        comms.compare(&[("streams", "2".to_owned())]).unwrap();
        let streams = if odd { "1" } else { "2" };
        comms.compare(&[("saves", "none".to_owned()), ("streams", streams.to_owned())])
    });
    let outcomes = ranks.unwrap().into_iter().map(Result::unwrap);
    assert_differs(outcomes.collect(), "streams", ["2", "1"]);
}

#[test]
fn values_are_compared_by_hash() {
    let params = [ParamDesc::new("w", Shape::new([5]).unwrap(), DType::F32)];
    let ranks = run_ranks(2, &Options::default(), |mut comm| {
        let plan = adam(0.1).plan_for(&params, Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        let values = [1.0f32, 2.0, 3.0, 4.0, 5.0 + comm.rank() as f32];
        let bytes = bytemuck::cast_slice(&values);
        state.write(&backend, Role::Param, "w", bytes).unwrap();
        let mut comms = Comms::direct(&mut comm);
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        let different = run.compare_parameters();
        let different = different.unwrap_err().to_string();
        run.broadcast_parameters(0).unwrap();
        run.handshake(&[]).unwrap();
        different
    });
    for different in ranks.unwrap() {
        let different = different.unwrap();
        assert!(different.starts_with("values of `w`: expected hash "), "{different}");
        assert!(different.contains("on rank 1"), "{different}");
    }
}

/// What each of two ranks hears by a handshake after `change` on rank 1.
fn after_change_on_one(
    zero: ZeroStage,
    change: impl Fn(&mut State, &CpuBackend) + Sync,
) -> Vec<String> {
    let params = ["w", "b"].map(|name| ParamDesc::new(name, Shape::new([5]).unwrap(), DType::F32));
    let ranks = run_ranks(2, &Options::default(), |mut comm| {
        let planner = adam(0.1).with(fusestep_planner::Shard::new(zero));
        let plan = planner.plan_for(&params, Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        state.set_step(3);
        let mut comms = Comms::direct(&mut comm);
        Run::of(&plan, &mut state, &backend, &mut comms).handshake(&[]).unwrap();
        if plan.topology().rank == 1 {
            change(&mut state, &backend);
        }
        let met = Run::of(&plan, &mut state, &backend, &mut comms).handshake(&[]);
        met.map_or_else(|error| error.to_string(), |()| "nothing".to_owned())
    });
    ranks.unwrap().into_iter().map(Result::unwrap).collect()
}

#[test]
fn state_that_one_rank_alone_has_loaded_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let loaded = |state: &mut State, backend: &CpuBackend| {
        let moment1 = [0.5f32; 5];
        state.write(backend, Role::Moment1, "w", bytemuck::cast_slice(&moment1)).unwrap();
        save_state(state, backend, &file).unwrap();
        state.write(backend, Role::Moment1, "w", &[0; 20]).unwrap();
        load_state(state, backend, &file).unwrap();
    };
    for told in after_change_on_one(ZeroStage::None, loaded) {
        assert!(told.starts_with("state `moment1` of `w`: expected hash "), "{told}");
        assert!(told.contains("on rank 1"), "{told}");
    }
    // There each rank keeps a part of what is written.
    for zero in [ZeroStage::One, ZeroStage::Three] {
        let written = |state: &mut State, backend: &CpuBackend| {
            state.write(backend, Role::Moment1, "w", &[1; 20]).unwrap();
        };
        for told in after_change_on_one(zero, written) {
            let named = "state `moment1` of `w`: expected nothing written since the last step";
            assert!(told.starts_with(named) && told.contains("on rank 1"), "{told}");
        }
    }
}

/// What ranks of a plan at ZeRO stage 3 hear that have begun with values of their own.
#[test]
fn first_values_that_differ_are_named_at_zero_3_or_brought_from_one_rank() {
    for (world, group) in [(2, 2), (3, 3), (4, 2)] {
        for dtype in [DType::F32, DType::BF16] {
            let params =
                ["w", "b"].map(|name| ParamDesc::new(name, Shape::new([5]).unwrap(), dtype));
            let master = fusestep_planner::Precision {
                master: fusestep_launch::Master::F32,
                ..Default::default()
            };
            let precision =
                if dtype == DType::BF16 { master } else { fusestep_planner::Precision::default() };
            let group = std::num::NonZeroUsize::new(group).unwrap();
            let ranks = run_ranks(world, &Options::default(), |mut comm| {
                let shard = fusestep_planner::Shard::new(ZeroStage::Three).group(group);
                let planner = adam(0.1).precision(precision).with(shard);
                let plan = planner.plan_for(&params, Topology::of(&comm)).unwrap();
                let backend = CpuBackend::new(NonZeroUsize::MIN);
                let mut state = plan.allocate(&backend).unwrap();
                let rank = comm.rank();
                let own = |rank: usize| vec![rank as u8 + 1; 5 * dtype.len_bytes()];
                state.write(&backend, Role::Param, "b", &own(0)).unwrap();
                state.write(&backend, Role::Param, "w", &own(rank)).unwrap();
                let mut comms = Comms::in_groups(&mut comm, group, 0).unwrap();
                let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
                let met = run.handshake(&[]).unwrap_err();
                // A program that has not met hears of it in the step.
                for name in ["w", "b"] {
                    let grad = vec![0; 5 * dtype.len_bytes()];
                    run.push_grad(name, &grad).unwrap();
                }
                let stepped = run.step().unwrap_err();
                let mut state = plan.allocate(&backend).unwrap();
                state.write(&backend, Role::Param, "w", &own(rank)).unwrap();
                let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
                run.broadcast_parameters(world - 1).unwrap();
                run.handshake(&[]).unwrap();
                assert_eq!(state.memory_bytes(), plan.memory_bytes());
                let whole =
                    Run::of(&plan, &mut state, &backend, &mut comms).gather(&["w", "b"]).unwrap();
                assert!(whole.bytes(0) == own(world - 1));
                assert!(whole.bytes(1).iter().all(|byte| *byte == 0));
                [met.to_string(), stepped.to_string()]
            });
            for told in ranks.unwrap().into_iter().flat_map(Result::unwrap) {
                assert!(told.starts_with("values of `w`: expected hash "), "{told}");
                assert!(told.contains("on rank 1"), "{told}");
            }
        }
    }
}

#[test]
fn what_one_rank_alone_writes_at_zero_3_is_named_by_the_next_step() {
    let params = ["w", "b"].map(|name| ParamDesc::new(name, Shape::new([5]).unwrap(), DType::F32));
    for role in [Role::Param, Role::Moment2] {
        let ranks = run_ranks(2, &Options::default(), |mut comm| {
            let planner = adam(0.1).with(fusestep_planner::Shard::new(ZeroStage::Three));
            let plan = planner.plan_for(&params, Topology::of(&comm)).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut state = plan.allocate(&backend).unwrap();
            let rank = comm.rank();
            let mut comms = Comms::direct(&mut comm);
            let mut step = |state: &mut State| {
                let mut run = Run::of(&plan, state, &backend, &mut comms);
                for name in ["w", "b"] {
                    run.push_grad(name, &[0; 20]).unwrap();
                }
                run.step()
            };
            step(&mut state).unwrap();
            // By all ranks alike, and in another order.
            for name in if rank == 0 { ["w", "b"] } else { ["b", "w"] } {
                state.write(&backend, role, name, &[1; 20]).unwrap();
            }
            step(&mut state).unwrap();
            if rank == 1 {
                state.write(&backend, role, "b", &[2; 20]).unwrap();
            }
            step(&mut state).unwrap_err().to_string()
        });
        for told in ranks.unwrap() {
            let told = told.unwrap();
            assert!(told.contains("of `b`: expected nothing written since"), "{told}");
        }
    }
}

#[test]
fn steps_that_a_parameter_has_missed_on_one_rank_alone_are_named() {
    for zero in [ZeroStage::None, ZeroStage::Two] {
        let behind = |state: &mut State, _: &CpuBackend| state.set_step_of("b", 1).unwrap();
        for told in after_change_on_one(zero, behind) {
            assert!(told.starts_with("steps of `b`: expected 3 as on rank 0, found 1"), "{told}");
        }
    }
}

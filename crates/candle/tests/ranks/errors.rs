//! What is refused, in words that say what would work, with nothing changed.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{AdamW, Initial, Options, Solo};

use super::{Shared, all_bits, gradients, on_ranks, step_ranked, vars};

fn adamw(options: &Options) -> AdamW {
    AdamW::with_options(vars(DType::F32, 7), ParamsAdamW::default(), options).unwrap()
}

fn refused(options: &Options) -> String {
    let vars = vars(DType::F32, 7);
    AdamW::with_options(vars, ParamsAdamW::default(), options).unwrap_err().to_string()
}

#[test]
fn options_that_need_ranks_are_refused_without_them() {
    let zero = Options { zero: 1, ..Options::default() };
    let own = Options { initial: Initial::OwnAndEqual, ..Options::default() };
    for (options, named) in [(zero, "zero of 1"), (own, "initial of own_and_equal")] {
        let vars = vars(DType::F32, 7);
        let mut fused =
            AdamW::with_options(vars.clone(), ParamsAdamW::default(), &options).unwrap();
        let before = all_bits(&vars);
        let error = fused.step(&gradients(&vars, 0, 0..8)).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains(".on(comm)"), "{error}");
        assert_eq!(all_bits(&vars), before);
        // On one rank they work.
        let mut solo = Solo::new();
        let mut ranked = fused.on(&mut solo).unwrap();
        ranked.step(&gradients(&vars, 0, 0..8)).unwrap();
        ranked.step(&gradients(&vars, 1, 0..8)).unwrap();
        assert_ne!(all_bits(&vars), before);
    }
}

#[test]
fn an_open_window_of_micro_steps_is_no_optimizer_for_ranks() {
    let accumulate = Options { accumulate: 2, ..Options::default() };
    let vars = vars(DType::F32, 7);
    let mut fused = AdamW::with_options(vars.clone(), ParamsAdamW::default(), &accumulate).unwrap();
    let before = all_bits(&vars);
    fused.step(&gradients(&vars, 0, 0..8)).unwrap();
    assert_eq!(all_bits(&vars), before);
    // What was given would be lost.
    let mut solo = Solo::new();
    let error = fused.on(&mut solo).unwrap_err().to_string();
    assert!(error.contains("before its first step"), "{error}");
}

#[test]
fn options_out_of_range_and_optimizers_in_use_are_refused() {
    let mut solo = Solo::new();
    let stage = Options { zero: 4, ..Options::default() };
    let error = refused(&stage);
    assert!(error.contains("zero: expected a whole number from 0 to 3, found `4`"), "{error}");
    let vars = vars(DType::F32, 7);
    let mut used = AdamW::new(vars.clone(), ParamsAdamW::default()).unwrap();
    used.step(&gradients(&vars, 0, 0..8)).unwrap();
    let error = used.set_group_learning_rate(0, 0.1).unwrap_err().to_string();
    assert!(error.contains("group 0: expected one of the 0"), "{error}");
    let error = used.on(&mut solo).unwrap_err().to_string();
    assert!(error.contains("before its first step, found one in use, of 1"), "{error}");
    let cap = Options { bucket_cap_mib: Some(f64::NAN), ..Options::default() };
    let error = refused(&cap);
    assert!(error.contains("bucket_cap_mib: expected a finite number above 0"), "{error}");
    let naive = Options { bucket_cap_mib: Some(1.0), naive: true, ..Options::default() };
    let error = refused(&naive);
    assert!(error.contains("bucket_cap_mib and naive"), "{error}");
}

#[test]
fn ranks_that_differ_are_told_in_what() {
    let errors = on_ranks(2, |comm| {
        let options = Options { clip_norm: Some(1.0 + comm.rank() as f64), ..Options::default() };
        adamw(&options).on(comm).unwrap_err().to_string()
    });
    for error in &errors {
        assert!(error.contains("clip") && error.contains('1') && error.contains('2'), "{error}");
    }
}

#[test]
fn ranks_with_other_streams_hear_of_it_before_the_streams_are_founded() {
    let errors = on_ranks(2, |comm| {
        let options = Options { comm_streams: Some(1 + comm.rank()), ..Options::default() };
        adamw(&options).on(comm).unwrap_err().to_string()
    });
    for error in &errors {
        let named = "comm_streams: expected 1 as on rank 0, found 2 on rank 1";
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn ranks_that_would_begin_in_other_ways_hear_of_it() {
    let errors = on_ranks(2, |comm| {
        let initial = [Initial::OfRankZero, Initial::OwnAndEqual][comm.rank()];
        let options = Options { initial, ..Options::default() };
        adamw(&options).on(comm).unwrap_err().to_string()
    });
    for error in &errors {
        let named = "initial: expected of rank 0 as on rank 0, found own and equal on rank 1";
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn settings_that_were_allowed_before_there_were_ranks_stay_allowed() {
    let folder = tempfile::tempdir().unwrap();
    adamw(&Options::default()).save_checkpoint(folder.path(), 3).unwrap();
    let params = ParamsAdamW { beta1: 0.5, ..ParamsAdamW::default() };
    let mut solo = Solo::new();
    for any in [true, false] {
        let mut other = AdamW::new(vars(DType::F32, 7), params.clone()).unwrap();
        if any {
            other.any_settings();
        }
        let mut ranked = other.on(&mut solo).unwrap();
        assert_eq!(ranked.resume(folder.path()).is_ok(), any);
        ranked.same_settings();
        let error = ranked.resume(folder.path()).unwrap_err().to_string();
        assert!(error.contains("beta1"), "{error}");
    }
}

#[test]
fn ranks_begin_with_the_variables_of_rank_0_or_say_that_theirs_differ() {
    let shared = Shared { world: 2, zero: 1, micro: 1 };
    let run = |initial: Initial| {
        on_ranks(2, |comm| {
            let vars = vars(DType::F32, 7 + comm.rank() as u64);
            let options = Options { initial, zero: 1, ..Options::default() };
            let fused = AdamW::with_options(vars.clone(), ParamsAdamW::default(), &options);
            let mut ranked = fused.unwrap().on(comm).unwrap();
            let first = all_bits(&vars);
            let stepped = step_ranked(&mut ranked, shared, 0..1);
            (first, stepped.map_err(|error| error.to_string()))
        })
    };
    let of_rank_0 = all_bits(&vars(DType::F32, 7));
    for (first, stepped) in run(Initial::OfRankZero) {
        assert!(first == of_rank_0);
        stepped.unwrap();
    }
    let own = run(Initial::OwnAndEqual);
    assert!(own[0].0 != own[1].0);
    for (_, stepped) in own {
        let error = stepped.unwrap_err();
        assert!(error.contains("values"), "{error}");
    }
}

#[test]
fn gradients_missing_on_some_ranks_are_zero_there_and_on_all_left_out() {
    let ranks = on_ranks(2, |comm| {
        let vars = vars(DType::F32, 7);
        let before = all_bits(&vars);
        let fused = AdamW::new(vars.clone(), ParamsAdamW::default()).unwrap();
        let rank = comm.rank();
        let mut ranked = fused.on(comm).unwrap();
        let mut store = gradients(&vars, 0, 0..8);
        store.remove(vars[0].1.as_tensor());
        if rank == 1 {
            store = GradStore::default();
        }
        ranked.step(&store).unwrap();
        // Of those without elements nobody can tell.
        assert_eq!(ranked.report().without_gradient, 1);
        (before, all_bits(&vars))
    });
    let vars = vars(DType::F32, 7);
    let mut alone = AdamW::new(vars.clone(), ParamsAdamW::default()).unwrap();
    let mut halves = GradStore::default();
    let all = gradients(&vars, 0, 0..8);
    for (_, var) in &vars[1..] {
        halves.insert(var, (all.get(var).unwrap() / 2.0).unwrap());
    }
    alone.step(&halves).unwrap();
    for (before, after) in ranks {
        assert_eq!(before[0], after[0]);
        assert!(after == all_bits(&vars));
    }
}

#[test]
fn a_gradient_that_does_not_fit_is_named_and_strides_are_copied() {
    let vars = vars(DType::F32, 7);
    let fused = AdamW::new(vars.clone(), ParamsAdamW::default()).unwrap();
    let mut solo = Solo::new();
    let mut ranked = fused.on(&mut solo).unwrap();
    let before = all_bits(&vars);
    let mut store = gradients(&vars, 0, 0..8);
    let wrong = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    store.insert(vars[6].1.as_tensor(), wrong);
    let error = ranked.step(&store).unwrap_err().to_string();
    assert!(error.contains("gradient of `head.weight`") && error.contains("[40, 9]"), "{error}");
    assert_eq!(all_bits(&vars), before);
    let mut store = gradients(&vars, 0, 0..8);
    let grad = store.remove(vars[6].1.as_tensor()).unwrap();
    let strided = grad.t().unwrap().contiguous().unwrap().t().unwrap();
    assert!(!strided.is_contiguous());
    store.insert(vars[6].1.as_tensor(), strided);
    ranked.step(&store).unwrap();
    assert_eq!(ranked.report().copied_gradients, 1);
    let own = super::vars(DType::F32, 7);
    let mut alone = AdamW::new(own.clone(), ParamsAdamW::default()).unwrap();
    alone.step(&gradients(&own, 0, 0..8)).unwrap();
    assert!(all_bits(&vars) == all_bits(&own));
}

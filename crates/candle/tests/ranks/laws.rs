//! One rank has the bits of [`Fused`], and so have many, at every ZeRO stage.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use fusestep::{ThreadFigures, WorldFigures};
use fusestep_candle::{
    AnyRule, Communicator, Figures, Fused, LossScale, Master, Options, Params, ParamsLamb,
    ParamsLars, ParamsLion, ParamsSgd, Precision, Rounding, Sgd, Solo, group,
};
use fusestep_planner::Optimizer as Rule;

use super::{
    Shared, all_bits, bits, exact, gradients, on_ranks, sharing, step_ranked, step_whole, vars,
};

const STEPS: u64 = 3;

/// The ways to share out a run that are held to the bits of one process.
fn ways() -> Vec<Shared> {
    let mut ways = Vec::new();
    for world in [1, 2, 4] {
        for zero in 0..=3 {
            for micro in [1, 2] {
                ways.push(Shared { world, zero, micro });
            }
        }
    }
    ways
}

/// The bits of one process that has the whole batch.
fn whole(params: &impl Params, options: &Options, dtype: DType) -> Vec<Vec<u64>> {
    let vars = vars(dtype, 7);
    let mut fused = Fused::with_options(vars.clone(), params.clone(), options).unwrap();
    step_whole(&mut fused, &vars, 0..STEPS).unwrap();
    all_bits(&vars)
}

fn shared_out(
    params: &(impl Params + Sync),
    options: &Options,
    (dtype, shared): (DType, Shared),
) -> Vec<Vec<u64>> {
    let options = sharing(options, shared);
    let ranks = on_ranks(shared.world, |comm| {
        let vars = vars(dtype, 7);
        let fused = Fused::with_options(vars.clone(), params.clone(), &options).unwrap();
        let mut ranked = fused.on(comm).unwrap();
        step_ranked(&mut ranked, shared, 0..STEPS).unwrap();
        assert_eq!(ranked.report().step, STEPS);
        assert_eq!(ranked.report().copied_gradients, 0);
        all_bits(&vars)
    });
    for rank in &ranks {
        assert!(*rank == ranks[0], "ranks differ: {shared:?}");
    }
    ranks.into_iter().next().unwrap()
}

fn check(name: &str, params: &(impl Params + Sync), options: &Options, dtype: DType) {
    let expected = whole(params, options, dtype);
    assert!(expected != all_bits(&vars(dtype, 7)), "{name}: no step");
    for shared in ways() {
        let found = shared_out(params, options, (dtype, shared));
        assert!(found == expected, "{name}: {shared:?}");
    }
}

#[test]
fn figures_of_a_machine_change_no_bit_whichever_rank_has_them() {
    let link =
        |alpha_seconds| fusestep_collective::Link { alpha_seconds, beta_bytes_per_second: 5e9 };
    let costs = fusestep_collective::Costs {
        all_reduce: link(0.01),
        reduce_scatter: link(0.02),
        all_gather: link(0.001),
        memory_bytes_per_second: 1e10,
        fresh_bytes_per_second: 2e9,
    };
    let mut figures = Figures::unmeasured();
    let (engine, measured) = ("thread".to_owned(), "2026-11-29".to_owned());
    figures.add(WorldFigures { engine, ranks: 2, shares_memory: true, measured, costs });
    figures.threads = vec![ThreadFigures { threads: 1, bytes_per_second: 1e10 }];
    let params = ParamsAdamW::default();
    let with = Options { figures: Some(figures), ..Options::default() };
    let expected = whole(&params, &Options::default(), DType::F32);
    assert!(whole(&params, &with, DType::F32) == expected, "one process");
    for first in [0, 1] {
        let shared = Shared { world: 2, zero: 1, micro: 1 };
        let ranks = on_ranks(2, |comm| {
            let known = if comm.rank() == first { &with } else { &Options::default() };
            let vars = vars(DType::F32, 7);
            let options = sharing(known, shared);
            let fused = Fused::with_options(vars.clone(), params.clone(), &options).unwrap();
            let mut ranked = fused.on(comm).unwrap();
            step_ranked(&mut ranked, shared, 0..STEPS).unwrap();
            all_bits(&vars)
        });
        assert!(ranks.iter().all(|rank| *rank == expected), "rank {first} has figures");
    }
}

fn groups() -> Options {
    let lion = ParamsLion { lr: 3e-4, ..ParamsLion::default() };
    let slow = ParamsAdamW { lr: 1e-5, weight_decay: 0.0, ..ParamsAdamW::default() };
    Options {
        groups: vec![group(["embedding"], lion), group(["bias"], slow)],
        clip_norm: Some(0.5),
        ..Options::default()
    }
}

#[test]
fn ranks_and_stages_and_micro_steps_have_the_bits_of_one_process() {
    let adamw = ParamsAdamW::default();
    check("adamw", &adamw, &Options::default(), DType::F32);
    let clipped =
        Options { clip_norm: Some(0.5), exclude: vec!["bias".to_owned()], ..Options::default() };
    check("clip", &adamw, &clipped, DType::F32);
    check("groups", &adamw, &groups(), DType::F32);
}

#[test]
fn sixteen_bits_with_masters_and_a_scaled_loss_have_the_bits_of_one_process() {
    let options = Options {
        precision: Precision { master: Master::F32, ..Precision::default() },
        loss_scale: Some(LossScale::fixed(1.0).unwrap()),
        ..Options::default()
    };
    check("masters", &ParamsAdamW::default(), &options, DType::BF16);
    let random = Options {
        precision: Precision { rounding: Rounding::Stochastic { seed: 3 }, ..Precision::default() },
        ..Options::default()
    };
    check("random", &ParamsSgd::with_momentum(), &random, DType::BF16);
}

#[test]
fn rules_with_norms_have_the_bits_of_one_process() {
    let options = Options::default();
    check("lars", &ParamsLars::default(), &options, DType::F32);
    check("lamb", &ParamsLamb::default(), &options, DType::F32);
}

#[test]
fn buckets_streams_and_naive_plans_change_no_bit() {
    let adamw = ParamsAdamW::default();
    let expected = whole(&adamw, &groups(), DType::F32);
    let shared = Shared { world: 4, zero: 2, micro: 1 };
    for options in [
        Options { bucket_cap_mib: Some(0.01), ..groups() },
        Options { comm_streams: Some(2), bucket_cap_mib: Some(0.05), ..groups() },
        Options { naive: true, ..groups() },
    ] {
        let found = shared_out(&adamw, &options, (DType::F32, shared));
        assert!(found == expected, "{options:?}");
    }
}

#[test]
fn a_group_has_the_rule_and_the_rate_it_was_given() {
    let vars = vars(DType::F32, 7);
    let mut fused = Fused::with_options(vars.clone(), ParamsAdamW::default(), &groups()).unwrap();
    step_whole(&mut fused, &vars, 0..1).unwrap();
    let (expected, found) = (all_bits(&vars), |only: Rule, name: &str| {
        let own = super::vars(DType::F32, 7);
        let options = Options { clip_norm: Some(0.5), ..Options::default() };
        let mut alone = AnyRule::with_options(own.clone(), only, &options).unwrap();
        step_whole(&mut alone, &own, 0..1).unwrap();
        let (_, var) = own.iter().find(|(known, _)| known == name).unwrap().clone();
        bits(var.as_tensor())
    });
    let rules = &groups().groups;
    let at = |name: &str| vars.iter().position(|(known, _)| known == name).unwrap();
    for (name, rule) in [
        ("embedding.weight", rules[0].rule),
        ("head.bias", rules[1].rule),
        ("head.weight", ParamsAdamW::default().rule()),
    ] {
        assert_eq!(expected[at(name)], found(rule, name), "{name}");
    }
    // And another rate from the next step on.
    let before = bits(vars[at("head.bias")].1.as_tensor());
    fused.set_group_learning_rate(1, 0.0).unwrap();
    step_whole(&mut fused, &vars, 1..2).unwrap();
    assert_eq!(bits(vars[at("head.bias")].1.as_tensor()), before);
    assert_ne!(all_bits(&vars)[at("head.weight")], expected[at("head.weight")]);
}

#[test]
fn a_rate_that_was_set_for_a_group_is_the_groups() {
    let options = |params: ParamsAdamW| Options {
        groups: vec![group(["head"], params)],
        ..Options::default()
    };
    let own = ParamsAdamW::default();
    let other = ParamsAdamW { lr: 0.5, ..own.clone() };
    for (group, body_stays) in [(own.clone(), true), (other, false)] {
        let of = || {
            let vars = vars(DType::F32, 7);
            let options = options(group.clone());
            (Fused::with_options(vars.clone(), own.clone(), &options).unwrap(), vars)
        };
        let begun = all_bits(&vars(DType::F32, 7));
        let stays = |vars: &[(String, Var)]| {
            for ((name, var), begun) in vars.iter().zip(&begun) {
                let expected = name.contains("head") || body_stays || begun.is_empty();
                assert_eq!(bits(var.as_tensor()) == *begun, expected, "{name}");
            }
        };
        let (mut fused, vars) = of();
        fused.set_group_learning_rate(0, 0.0).unwrap();
        assert_eq!(fused.params().lr == 0.0, body_stays);
        step_whole(&mut fused, &vars, 0..1).unwrap();
        stays(&vars);
        // Set before ranks are, and after.
        for before in [true, false] {
            let ((mut fused, vars), mut solo) = (of(), Solo::new());
            if before {
                fused.set_group_learning_rate(0, 0.0).unwrap();
            }
            let mut ranked = fused.on(&mut solo).unwrap();
            if !before {
                ranked.set_group_learning_rate(0, 0.0).unwrap();
            }
            let shared = Shared { world: 1, zero: 0, micro: 1 };
            step_ranked(&mut ranked, shared, 0..1).unwrap();
            stays(&vars);
        }
    }
}

#[test]
fn groups_whose_rates_have_become_equal_before_ranks_are_still_two() {
    let at = |lr| ParamsAdamW { lr, ..ParamsAdamW::default() };
    let groups = vec![group(["head"], at(0.5)), group(["embedding"], at(0.25))];
    let options = Options { groups, ..Options::default() };
    let vars = vars(DType::F32, 7);
    let begun = all_bits(&vars);
    let mut fused = Fused::with_options(vars.clone(), at(0.125), &options).unwrap();
    fused.set_group_learning_rate(0, 0.25).unwrap();
    let mut solo = Solo::new();
    let mut ranked = fused.on(&mut solo).unwrap();
    ranked.set_group_learning_rate(0, 0.0).unwrap();
    step_ranked(&mut ranked, Shared { world: 1, zero: 0, micro: 1 }, 0..1).unwrap();
    for ((name, var), begun) in vars.iter().zip(&begun) {
        let stays = name.contains("head") || begun.is_empty();
        assert_eq!(bits(var.as_tensor()) == *begun, stays, "{name}");
    }
}

#[test]
fn a_model_of_candle_trains_alike_on_ranks_and_in_micro_steps() {
    // A real backward pass, whose gradients are no exact numbers: ranks and micro-steps add the
    // same terms in the same order.
    let part = |part: u64| {
        let x = super::tensor(&[4, 6], DType::F32, |at| exact([part, 1, at]));
        let y = super::tensor(&[4, 2], DType::F32, |at| exact([part, 2, at]));
        (x, y)
    };
    let run = |comm: &mut dyn fusestep_candle::Communicator, micro: u32| {
        let (rank, world) = (comm.rank() as u64, comm.world_size() as u64);
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let first = candle_nn::linear(6, 9, vb.pp("first")).unwrap();
        let second = candle_nn::linear(9, 2, vb.pp("second")).unwrap();
        // Any process draws other values: they are set to be alike.
        let data = varmap.data().lock().unwrap();
        for (at, name) in
            ["first.bias", "first.weight", "second.bias", "second.weight"].iter().enumerate()
        {
            let var: &Var = &data[*name];
            let values = super::tensor(var.dims(), DType::F32, |e| exact([9, at as u64, e]));
            var.set(&values).unwrap();
        }
        drop(data);
        let options = Options { accumulate: micro, ..Options::default() };
        let fused = Fused::with_options(&varmap, ParamsAdamW::default(), &options).unwrap();
        let mut ranked = fused.on(comm).unwrap();
        for step in 0..5 {
            for at in 0..u64::from(micro) {
                let (x, y) = part(4 * step + at * world + rank);
                let hidden: Tensor = first.forward(&x).unwrap().tanh().unwrap();
                let loss = (second.forward(&hidden).unwrap() - y).unwrap();
                let loss = loss.sqr().unwrap().mean_all().unwrap();
                ranked.backward_step(&loss).unwrap();
            }
        }
        let vars: Vec<_> = ranked.variables().map(|(_, var)| bits(var.as_tensor())).collect();
        vars
    };
    let alone = run(&mut Solo::new(), 4);
    for rank in on_ranks(4, |comm| run(comm, 1)) {
        assert!(rank == alone);
    }
}

#[test]
fn averages_every_few_steps_end_alike_on_all_ranks() {
    let options = Options { local_sgd: Some(2), ..Options::default() };
    let ranks = on_ranks(2, |comm| {
        let vars = vars(DType::F32, 7);
        let fused = Fused::with_options(vars.clone(), ParamsAdamW::default(), &options).unwrap();
        let mut ranked = fused.on(comm).unwrap();
        let shared = Shared { world: 2, zero: 0, micro: 1 };
        step_ranked(&mut ranked, shared, 0..1).unwrap();
        let separate = all_bits(&vars);
        step_ranked(&mut ranked, shared, 1..2).unwrap();
        (separate, all_bits(&vars))
    });
    assert!(ranks[0].0 != ranks[1].0);
    assert!(ranks[0].1 == ranks[1].1);
}

#[test]
fn a_flush_takes_the_rate_of_the_moment_as_a_step_does() {
    let ranks = on_ranks(2, |comm| {
        let run = |comm: &mut dyn Communicator, micro: u32| {
            let (vars, rank) = (vars(DType::F32, 7), comm.rank() as u64);
            let options = Options { accumulate: micro, ..Options::default() };
            let fused = Sgd::with_options(vars.clone(), ParamsSgd::default(), &options).unwrap();
            let mut ranked = fused.on(comm).unwrap();
            for step in 0..2 {
                // Two of the first, whose mean is each of them, and one of the second.
                for _ in 0..[micro, 1][step as usize] {
                    let own = gradients(&vars, step, rank..rank + 1);
                    ranked.step(&own).unwrap();
                }
                // Behind the first update, whose gradient the flush below has or the step had.
                if step + 1 == u64::from(micro) {
                    ranked.set_learning_rate(0.125);
                }
                ranked.flush().unwrap();
            }
            all_bits(&vars)
        };
        [run(comm, 1), run(comm, 2)]
    });
    for [stepped, flushed] in ranks {
        assert!(stepped == flushed);
    }
}

#[test]
fn programs_that_train_by_candles_trait_train_on_ranks_too() {
    fn train(optimizer: &mut impl Optimizer, vars: &[(String, Var)], rank: usize) {
        optimizer.set_learning_rate(0.25);
        assert_eq!(optimizer.learning_rate(), 0.25);
        for step in 0..3 {
            let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
            for (at, (_, var)) in vars.iter().enumerate() {
                let factor = exact([rank as u64 + 1, step, at as u64]);
                loss = (loss + (var.as_tensor() * f64::from(factor)).unwrap().sum_all()).unwrap();
            }
            optimizer.backward_step(&loss).unwrap();
        }
    }

    let params = || ParamsAdamW { lr: 0.5, ..ParamsAdamW::default() };
    let alone = vars(DType::F32, 9);
    train(&mut Fused::new(alone.clone(), params()).unwrap(), &alone, 0);
    let of_one = vars(DType::F32, 9);
    let only: Vec<Var> = of_one.iter().map(|(_, var)| var.clone()).collect();
    train(&mut <Fused<'_, ParamsAdamW> as Optimizer>::new(only, params()).unwrap(), &of_one, 0);
    assert_eq!(all_bits(&of_one), all_bits(&alone));
    let mut of_two = on_ranks(2, |comm| {
        let (own, rank) = (vars(DType::F32, 9), comm.rank());
        train(&mut Fused::new(own.clone(), params()).unwrap().on(comm).unwrap(), &own, rank);
        all_bits(&own)
    });
    let (second, first) = (of_two.pop(), of_two.pop());
    assert_eq!(first, second);
    assert!(first != Some(all_bits(&alone)));
}

//! The adapter against the planner's own state, against candle's AdamW, and at its edges.

use std::num::NonZeroUsize;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::AdamW;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, WeightDecay};
use fusestep_planner::{Optimizer as Rule, Planner, RunAlone};
use fusestep_tensor::{ParamDesc, Role, Shape};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

#[path = "../examples/quickstart.rs"]
mod quickstart;

/// Edges of vectors, of what the pool shares, and one tensor that the whole pool works on.
const NUMELS: [usize; 9] = [1, 0, 15, 17, 4096, 65_537, 131_071, 131_072, 300_001];

fn values(numel: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..numel).map(|_| rng.random::<f32>() * 0.2 - 0.1).collect()
}

fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

fn vars() -> Vec<(String, Var)> {
    let var = |(index, &numel): (usize, &usize)| {
        let values = values(numel, index as u64);
        (format!("v{index}"), Var::new(values, &Device::Cpu).unwrap())
    };
    NUMELS.iter().enumerate().map(var).collect()
}

fn grads(vars: &[(String, Var)], step: u64) -> GradStore {
    let mut store = GradStore::default();
    for (index, (_, var)) in vars.iter().enumerate() {
        let values = values(var.elem_count(), 1000 * step + index as u64);
        let grad = Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap();
        store.insert(var, grad);
    }
    store
}

fn bits(vars: &[(String, Var)]) -> Vec<Vec<u32>> {
    let of = |(_, var): &(String, Var)| {
        let values: Vec<f32> = var.flatten_all().unwrap().to_vec1().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    vars.iter().map(of).collect()
}

fn params() -> ParamsAdamW {
    ParamsAdamW { lr: 1e-2, ..ParamsAdamW::default() }
}

#[test]
fn the_adapter_has_the_bits_of_a_planned_state() {
    let rule = Rule::Adam(Adam {
        lr: 1e-2,
        weight_decay: WeightDecay::Decoupled(0.01),
        ..Adam::default()
    });
    let descs: Vec<ParamDesc> = NUMELS
        .iter()
        .enumerate()
        .map(|(index, &numel)| {
            let shape = Shape::new([numel as u64]).unwrap();
            ParamDesc::new(format!("v{index}"), shape, fusestep_tensor::DType::F32)
        })
        .collect();
    let backend = CpuBackend::new(threads(1));
    let plan = Planner::new(rule).plan(&descs).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    for (index, param) in descs.iter().enumerate() {
        let values = values(param.numel() as usize, index as u64);
        let view = state.view_mut::<f32>(Role::Param, &param.name).unwrap();
        view.copy_from_slice(&values);
    }
    for step in 1..=3 {
        for (index, param) in descs.iter().enumerate() {
            let values = values(param.numel() as usize, 1000 * step + index as u64);
            let mut view = state.grad_mut::<f32>(&param.name).unwrap();
            view.copy_from_slice(&values);
        }
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    }
    let expected: Vec<Vec<u32>> = descs
        .iter()
        .map(|param| {
            let values = state.param::<f32>(&param.name).unwrap();
            values.iter().map(|value| value.to_bits()).collect()
        })
        .collect();
    for count in [1, 2, 3] {
        for naive in [false, true] {
            let vars = vars();
            let make = if naive { AdamW::naive } else { AdamW::with_threads };
            let mut optimizer = make(vars.clone(), params(), threads(count)).unwrap();
            for step in 1..=3 {
                optimizer.step(&grads(&vars, step)).unwrap();
            }
            for ((found, expected), numel) in bits(&vars).iter().zip(&expected).zip(NUMELS) {
                let first = found.iter().zip(expected).position(|(a, b)| a != b);
                assert_eq!(first, None, "{numel} elements, {count} threads, naive {naive}");
            }
            let launches = if naive { NUMELS.len() as u64 - 1 } else { 1 };
            assert_eq!(optimizer.report().launches, launches);
        }
    }
}

#[test]
fn ten_steps_agree_with_candles_own_adamw() {
    let (mut ours, mut theirs) = (vars(), vars());
    // candle refuses arithmetic on empty tensors.
    ours.remove(1);
    theirs.remove(1);
    let before = bits(&ours);
    let mut optimizer = AdamW::new(ours.clone(), params()).unwrap();
    let bare: Vec<Var> = theirs.iter().map(|(_, var)| var.clone()).collect();
    let mut peer = candle_nn::AdamW::new(bare, params()).unwrap();
    for step in 1..=10 {
        optimizer.step(&grads(&ours, step)).unwrap();
        peer.step(&grads(&theirs, step)).unwrap();
    }
    for ((ours, theirs), before) in bits(&ours).iter().zip(&bits(&theirs)).zip(&before) {
        let (mut difference, mut update) = (0.0f64, 0.0f64);
        for ((&a, &b), &first) in ours.iter().zip(theirs).zip(before) {
            let (a, b) = (f64::from(f32::from_bits(a)), f64::from(f32::from_bits(b)));
            difference += (a - b) * (a - b);
            update += (b - f64::from(f32::from_bits(first))).powi(2);
        }
        assert!(difference.sqrt() <= 1e-5 * update.sqrt(), "{difference} of {update}");
    }
}

#[test]
fn a_variable_without_a_gradient_is_untouched_and_has_not_stepped() {
    let vars = vars();
    let mut optimizer = AdamW::new(vars.clone(), params()).unwrap();
    optimizer.step(&grads(&vars, 1)).unwrap();
    let before = bits(&vars);
    let moment = optimizer.moment(Role::Moment1, "v4").unwrap();
    let mut some = grads(&vars, 2);
    some.remove(&vars[4].1);
    optimizer.step(&some).unwrap();
    let after = bits(&vars);
    assert_eq!(before[4], after[4]);
    assert_ne!(before[5], after[5]);
    assert_eq!(optimizer.report().without_gradient, 1);
    let same = optimizer.moment(Role::Moment1, "v4").unwrap();
    assert_eq!(moment.to_vec1::<f32>().unwrap(), same.to_vec1::<f32>().unwrap());

    // It takes its second step at t = 2, as a lone variable would.
    optimizer.step(&grads(&vars, 3)).unwrap();
    let alone = vec![("v4".to_owned(), Var::new(values(4096, 4), &Device::Cpu).unwrap())];
    let mut single = AdamW::new(alone.clone(), params()).unwrap();
    for step in [1, 3] {
        let mut store = GradStore::default();
        let grad = Tensor::from_vec(values(4096, 1000 * step + 4), 4096, &Device::Cpu).unwrap();
        store.insert(&alone[0].1, grad);
        single.step(&store).unwrap();
    }
    assert_eq!(bits(&vars)[4], bits(&alone)[0]);
}

#[test]
fn gradients_that_are_not_contiguous_or_lie_in_a_variable_are_copied_and_counted() {
    let data: Vec<f32> = values(12, 1);
    let make = || Var::from_vec(data.clone(), (3, 4), &Device::Cpu).unwrap();
    let (strided, plain, own) = (make(), make(), make());
    let grad = Tensor::from_vec(values(12, 2), (4, 3), &Device::Cpu).unwrap();
    let step = |var: &Var, grad: Tensor| {
        let mut optimizer = AdamW::new(vec![("w".to_owned(), var.clone())], params()).unwrap();
        let mut store = GradStore::default();
        store.insert(var, grad);
        optimizer.step(&store).unwrap();
        optimizer.report().copied_gradients
    };
    assert_eq!(step(&strided, grad.t().unwrap()), 1);
    assert_eq!(step(&plain, grad.t().unwrap().contiguous().unwrap()), 0);
    let after = |var: &Var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(after(&strided), after(&plain));
    assert_eq!(step(&own, own.as_tensor().clone()), 1);
    assert!(after(&own).iter().zip(&data).all(|(a, b)| a.abs() < b.abs()));
}

#[test]
fn a_saved_state_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let (whole, resumed) = (vars(), vars());
    let mut optimizer = AdamW::new(whole.clone(), params()).unwrap();
    let mut first = AdamW::new(resumed.clone(), params()).unwrap();
    for step in 1..=3 {
        optimizer.step(&grads(&whole, step)).unwrap();
        if step == 1 {
            first.step(&grads(&resumed, step)).unwrap();
            first.save(&path).unwrap();
        }
    }
    let mut second = AdamW::new(resumed.clone(), params()).unwrap();
    second.load(&path).unwrap();
    for step in 2..=3 {
        second.step(&grads(&resumed, step)).unwrap();
    }
    assert!(bits(&whole) == bits(&resumed));

    let fewer = vec![whole[0].clone()];
    let mut other = AdamW::new(fewer, params()).unwrap();
    let error = other.load(&path).unwrap_err().to_string();
    assert!(error.contains("`v1@moment1`: expected no such tensor"), "{error}");
    let bare: Vec<Var> = whole.iter().map(|(_, var)| var.clone()).collect();
    let error = AdamW::new(bare, params()).unwrap().save(&path).unwrap_err();
    assert!(error.to_string().contains("build the optimizer from the VarMap"));
}

#[test]
fn what_does_not_fit_is_named_and_nothing_changes() {
    let vars = vars();
    let twice = vec![vars[0].clone(), ("again".to_owned(), vars[0].1.clone())];
    let eighth = Var::zeros(3, DType::F8E4M3, &Device::Cpu).unwrap();
    let refused =
        |vars: Vec<(String, Var)>, params| AdamW::new(vars, params).unwrap_err().to_string();
    assert!(refused(twice, params()).contains("found the same one as `again`"));
    assert!(
        refused(vec![("h".into(), eighth)], params())
            .contains("variable `h`: expected f32, f64, f16 or bf16, found F8E4M3")
    );
    let bad = ParamsAdamW { beta1: 1.0, ..params() };
    assert!(refused(vars.clone(), bad).contains("beta1: expected a value in [0, 1), found 1"));

    let mut optimizer = AdamW::new(vars.clone(), params()).unwrap();
    optimizer.step(&grads(&vars, 1)).unwrap();
    let before = bits(&vars);
    let mut wrong = grads(&vars, 2);
    wrong.insert(&vars[8].1, Tensor::zeros(5, DType::F32, &Device::Cpu).unwrap());
    let error = optimizer.step(&wrong).unwrap_err().to_string();
    assert!(error.contains("gradient of `v8`"), "{error}");
    optimizer.set_learning_rate(f64::NAN);
    let error = optimizer.step(&grads(&vars, 2)).unwrap_err().to_string();
    assert!(error.contains("lr: expected a finite value of at least 0, found NaN"), "{error}");
    assert!(before == bits(&vars));
    optimizer.set_learning_rate(1e-3);
    optimizer.step(&grads(&vars, 2)).unwrap();
    assert_eq!(optimizer.report().step, 2);
}

#[test]
fn integer_variables_are_left_out_and_no_variable_at_all_is_refused() {
    let count = Var::zeros(3, DType::U32, &Device::Cpu).unwrap();
    let weight = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
    let vars = vec![("n".to_owned(), count.clone()), ("w".to_owned(), weight)];
    let mut optimizer = AdamW::new(vars, params()).unwrap();
    assert_eq!(optimizer.variables().count(), 1);
    optimizer.step(&GradStore::default()).unwrap();
    assert_eq!(optimizer.report().launches, 0);
    let refused = AdamW::new(vec![("n".to_owned(), count)], params());
    let error = refused.expect_err("nothing to train").to_string();
    assert!(error.contains("expected at least one of floating point"), "{error}");
}

#[test]
fn the_quickstart_learns_before_and_after() {
    quickstart::main().unwrap();
}

#[test]
fn a_hook_hears_of_every_update_and_of_the_loss_of_its_backward_step() {
    let weight = Var::new(&[1.0f32, -2.0], &Device::Cpu).unwrap();
    let mut optimizer = AdamW::new(vec![("w".to_owned(), weight.clone())], params()).unwrap();
    assert_eq!(optimizer.report(), fusestep_candle::Report::default());
    let loss = || weight.as_tensor().sqr().unwrap().sum_all().unwrap();
    optimizer.backward_step(&loss()).unwrap();
    // Nobody hears, so nobody has waited for the loss.
    assert_eq!((optimizer.report().step, optimizer.report().loss), (1, None));
    let (tell, told) = std::sync::mpsc::channel();
    optimizer.on_step(move |report| tell.send(*report).unwrap());
    optimizer.time_steps();
    let expected = f64::from(loss().to_scalar::<f32>().unwrap());
    optimizer.backward_step(&loss()).unwrap();
    let report = told.try_recv().unwrap();
    assert_eq!((report.step, report.loss, report.lr), (2, Some(expected), params().lr));
    assert!(report.seconds.unwrap().update > 0.0, "{report:?}");
    assert_eq!((report, told.try_recv().ok()), (optimizer.report(), None));
}

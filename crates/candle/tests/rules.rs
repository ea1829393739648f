//! SGD, momentum and Lion through the adapter: against a planned state, candle's own SGD, and a
//! saved state.

use std::num::NonZeroUsize;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::Optimizer;
use fusestep_candle::{
    AnyRule, Fused, Lion, Nesterov, Params, ParamsAdagrad, ParamsLamb, ParamsLars, ParamsLion,
    ParamsRmsProp, ParamsScheduleFree, ParamsSgd, Sgd, WeightDecay,
};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Planner, RunAlone};
use fusestep_tensor::{ParamDesc, Role, Shape};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Edges of vectors, of what the pool shares, and one tensor that the whole pool works on.
const NUMELS: [usize; 7] = [1, 0, 17, 4096, 65_537, 131_072, 300_001];

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
    for (name, var) in vars {
        let index: u64 = name[1..].parse().unwrap();
        let values = values(var.elem_count(), 1000 * step + index);
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

fn momentum() -> ParamsSgd {
    ParamsSgd {
        lr: 1e-2,
        dampening: 0.1,
        weight_decay: WeightDecay::L2(0.01),
        ..ParamsSgd::with_momentum()
    }
}

fn lion() -> ParamsLion {
    ParamsLion { lr: 1e-3, weight_decay: 0.1, ..ParamsLion::default() }
}

/// The parameters after three steps of a state that keeps them itself.
fn planned(params: &impl Params) -> Vec<Vec<u32>> {
    let descs: Vec<ParamDesc> = NUMELS
        .iter()
        .enumerate()
        .map(|(index, &numel)| {
            let shape = Shape::new([numel as u64]).unwrap();
            ParamDesc::new(format!("v{index}"), shape, fusestep_tensor::DType::F32)
        })
        .collect();
    let backend = CpuBackend::new(threads(1));
    let plan = Planner::new(params.rule()).plan(&descs).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    for step in 0..=3 {
        for (index, param) in descs.iter().enumerate() {
            let values = values(param.numel() as usize, 1000 * step + index as u64);
            let role = if step == 0 { Role::Param } else { Role::Grad };
            let view = state.view_mut::<f32>(role, &param.name).unwrap();
            view.copy_from_slice(&values);
        }
        if step > 0 {
            RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
        }
    }
    let bits = descs.iter().map(|param| {
        let values = state.param::<f32>(&param.name).unwrap();
        values.iter().map(|value| value.to_bits()).collect()
    });
    bits.collect()
}

fn has_the_bits_of_a_planned_state<P: Params>(params: P) {
    let expected = planned(&params);
    for count in [1, 2, 3] {
        for make in [Fused::naive, Fused::with_threads] {
            let vars = vars();
            let mut optimizer = make(vars.clone(), params.clone(), threads(count)).unwrap();
            for step in 1..=3 {
                optimizer.step(&grads(&vars, step)).unwrap();
            }
            assert!(bits(&vars) == expected, "{params:?}, {count} threads");
        }
    }
}

#[test]
fn every_rule_has_the_bits_of_a_planned_state() {
    has_the_bits_of_a_planned_state(momentum());
    has_the_bits_of_a_planned_state(ParamsSgd::default());
    has_the_bits_of_a_planned_state(lion());
    has_the_bits_of_a_planned_state(fusestep_planner::Optimizer::Lion(lion()));
    has_the_bits_of_a_planned_state(ParamsAdagrad::default());
    has_the_bits_of_a_planned_state(ParamsRmsProp::default());
    has_the_bits_of_a_planned_state(ParamsScheduleFree::default());
    has_the_bits_of_a_planned_state(ParamsLars { lr: 2.0, ..ParamsLars::default() });
    has_the_bits_of_a_planned_state(ParamsLamb::default());
}

#[test]
fn ten_steps_agree_with_candles_own_sgd() {
    let (mut ours, mut theirs) = (vars(), vars());
    // candle refuses arithmetic on empty tensors.
    ours.remove(1);
    theirs.remove(1);
    let bare: Vec<Var> = theirs.iter().map(|(_, var)| var.clone()).collect();
    let mut optimizer = Sgd::new_lr(ours.clone(), 0.1).unwrap();
    let mut peer = candle_nn::SGD::new(bare, 0.1).unwrap();
    for step in 1..=10 {
        optimizer.step(&grads(&ours, step)).unwrap();
        peer.step(&grads(&theirs, step)).unwrap();
    }
    let all = bits(&ours).concat().into_iter().zip(bits(&theirs).concat());
    for (ours, theirs) in all {
        let (ours, theirs) = (f32::from_bits(ours), f32::from_bits(theirs));
        assert!((ours - theirs).abs() <= 1e-7, "{ours} {theirs}");
    }
}

fn goes_on_where_it_stopped<P: Params>(params: P, role: Role) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let (whole, resumed) = (vars(), vars());
    let mut optimizer = Fused::new(whole.clone(), params.clone()).unwrap();
    let mut first = Fused::new(resumed.clone(), params.clone()).unwrap();
    optimizer.step(&grads(&whole, 1)).unwrap();
    first.step(&grads(&resumed, 1)).unwrap();
    first.save(&path).unwrap();
    let mut second = Fused::new(resumed.clone(), params).unwrap();
    second.load(&path).unwrap();
    optimizer.step(&grads(&whole, 2)).unwrap();
    second.step(&grads(&resumed, 2)).unwrap();
    assert!(bits(&whole) == bits(&resumed));
    let own = |optimizer: &Fused<'_, P>| {
        let tensor = optimizer.moment(role, "v3").unwrap();
        tensor.to_vec1::<f32>().unwrap()
    };
    assert_eq!(own(&optimizer), own(&second));
    assert!(optimizer.moment(Role::Moment2, "v3").is_err());
}

#[test]
fn a_saved_state_goes_on_where_it_stopped() {
    goes_on_where_it_stopped(momentum(), Role::Velocity);
    goes_on_where_it_stopped(lion(), Role::Moment1);
    goes_on_where_it_stopped(ParamsLars::default(), Role::Velocity);
    goes_on_where_it_stopped(ParamsAdagrad::default(), Role::Sum);
}

#[test]
fn a_variable_without_a_gradient_is_untouched_and_has_not_stepped() {
    let vars = vars();
    let mut optimizer = Sgd::new(vars.clone(), momentum()).unwrap();
    let before = bits(&vars);
    let mut some = grads(&vars, 1);
    some.remove(&vars[3].1);
    optimizer.step(&some).unwrap();
    assert_eq!(bits(&vars)[3], before[3]);
    assert_ne!(bits(&vars)[4], before[4]);
    // Its first step is not dampened, though it is the optimizer's second.
    optimizer.step(&grads(&vars, 2)).unwrap();
    let velocity = optimizer.moment(Role::Velocity, "v3").unwrap();
    let start = values(4096, 3);
    for ((u, g), p) in velocity.to_vec1::<f32>().unwrap().iter().zip(values(4096, 2003)).zip(start)
    {
        assert!((u - (g + 0.01 * p)).abs() <= 1e-7, "{u} {g} {p}");
    }
}

#[test]
fn hyper_parameters_out_of_range_are_named_and_the_rate_can_change() {
    let vars = vars();
    let bad = ParamsSgd { nesterov: Nesterov::Nesterov, ..ParamsSgd::default() };
    let error = Sgd::new(vars.clone(), bad).unwrap_err().to_string();
    assert!(
        error.contains("momentum: expected a value in (0, 1) with nesterov, found 0"),
        "{error}"
    );
    let mut optimizer = Lion::new(vars.clone(), lion()).unwrap();
    optimizer.set_learning_rate(0.0);
    let before = bits(&vars);
    optimizer.step(&grads(&vars, 1)).unwrap();
    assert!(before == bits(&vars));
    optimizer.set_params(ParamsLion { beta1: 2.0, ..lion() });
    assert!(optimizer.step(&grads(&vars, 2)).is_err());

    let mut any = AnyRule::new(vars.clone(), momentum().rule()).unwrap();
    any.set_learning_rate(0.5);
    assert_eq!(any.learning_rate(), 0.5);
    // The state of one rule is no other's.
    any.set_params(lion().rule());
    let error = any.step(&grads(&vars, 1)).unwrap_err().to_string();
    assert!(
        error.contains(
            "expected a rule of the lists param, grad, velocity, found one of param, grad, moment1"
        ),
        "{error}"
    );
}

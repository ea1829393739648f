//! State of 8 bits, rule by rule: a step on codes is reading, a step in f32, and writing.

use fusestep_adagrad::{Adagrad, AdagradTensors, CodedAdagradTensors};
use fusestep_adamax::{Adamax, AdamaxTensors, CodedAdamaxTensors};
use fusestep_elementwise::coded::{
    CodedState, Coding, Dither, GROUP, ParamSlices, reference, units_of,
};
use fusestep_fused_adam::{Adam, AdamTensors, CodedAdamTensors, SecondMoment, WeightDecay};
use fusestep_fused_sgd::{CodedSgdTensors, Nesterov, Sgd, SgdTensors};
use fusestep_lamb::{CodedLambTensors, Lamb, LambTensors};
use fusestep_lars_momentum::{CodedLarsTensors, Lars, LarsTensors};
use fusestep_launch::{Precision, StateDType};
use fusestep_lion::{CodedLionTensors, Lion, LionTensors};
use fusestep_nadam::{CodedNAdamTensors, NAdam, NAdamTensors};
use fusestep_planner::Optimizer;
use fusestep_rmsprop::{Centering, CodedRmsPropTensors, RmsProp, RmsPropTensors};
use fusestep_simd::{Pool, join_bf16_24, split_bf16_24};
use fusestep_tensor::DType;
use half::bf16;

#[path = "coded/golden.rs"]
mod golden;
#[path = "coded/plans.rs"]
mod plans;

/// A step in f32 of a parameter, by its gradient and lists of state.
type Plain = fn(u64, &mut [f32], &[f32], &mut [Vec<f32>]);

/// A rule's entries for slices, coded and in f32.
struct Rule {
    name: &'static str,
    optimizer: Optimizer,
    codings: &'static [Coding],
    coded: fn(&Pool, u64, ParamSlices<'_>, Vec<CodedState<'_>>),
    plain: Plain,
}

/// Lists by position.
fn taken<T, const N: usize>(lists: impl IntoIterator<Item = T>) -> [T; N] {
    let lists: Vec<T> = lists.into_iter().collect();
    lists.try_into().unwrap_or_else(|_| panic!("expected {N} lists"))
}

const ADAM: Adam = Adam {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: WeightDecay::L2(0.1),
    second_moment: SecondMoment::Largest,
    objective: fusestep_launch::Objective::Minimize,
};

fn rules() -> [Rule; 11] {
    use Coding::{Positive, Root, Signed};
    [
        Rule {
            name: "adamw",
            optimizer: Adam::default().into(),
            codings: &[Signed, Root],
            coded: |pool, step, param, state| {
                let [moment1, moment2] = taken(state);
                let tensor = CodedAdamTensors { param, moment1, moment2, max_moment2: None };
                Adam::default().step_coded_with(pool, step, &mut [tensor]).unwrap();
            },
            plain: |step, param, grad, state| {
                let [moment1, moment2] = taken(state);
                let tensor = AdamTensors { param, grad, moment1, moment2, max_moment2: None };
                Adam::default().step(step, &mut [tensor]).unwrap();
            },
        },
        amsgrad(),
        Rule {
            name: "nadam",
            optimizer: NAdam::default().into(),
            codings: &[Signed, Root],
            coded: |pool, step, param, state| {
                let [moment1, moment2] = taken(state);
                let tensor = CodedNAdamTensors { param, moment1, moment2 };
                NAdam::default().step_coded_with(pool, step, &mut [tensor]).unwrap();
            },
            plain: |step, param, grad, state| {
                let [moment1, moment2] = taken(state);
                let tensor = NAdamTensors { param, grad, moment1, moment2 };
                NAdam::default().step(step, &mut [tensor]).unwrap();
            },
        },
        Rule {
            name: "adamax",
            optimizer: Adamax::default().into(),
            codings: &[Signed, Positive],
            coded: |pool, step, param, state| {
                let [moment1, max_grad] = taken(state);
                let tensor = CodedAdamaxTensors { param, moment1, max_grad };
                Adamax::default().step_coded_with(pool, step, &mut [tensor]).unwrap();
            },
            plain: |step, param, grad, state| {
                let [moment1, max_grad] = taken(state);
                let tensor = AdamaxTensors { param, grad, moment1, max_grad };
                Adamax::default().step(step, &mut [tensor]).unwrap();
            },
        },
        lion(),
        momentum(),
        rmsprop(),
        rmsprop_with_momentum(),
        adagrad(),
        lars(),
        lamb(),
    ]
}

/// Rates that are those of a ratio of norms, and large enough to tell.
fn lars() -> Rule {
    const RULE: fn() -> Lars = || Lars { trust_coefficient: 0.1, rescale: 0.5, ..Lars::default() };
    Rule {
        name: "lars",
        optimizer: RULE().into(),
        codings: &[Coding::Signed],
        coded: |pool, step, param, state| {
            let [velocity] = taken(state);
            let tensor = CodedLarsTensors::new(param, velocity);
            assert!(RULE().step_coded_with(pool, step, &mut [tensor]).unwrap().is_empty());
        },
        plain: |_, param, grad, state| {
            let [velocity] = taken(state);
            RULE().step(&mut [LarsTensors::new(param, grad, velocity)]).unwrap();
        },
    }
}

fn lamb() -> Rule {
    Rule {
        name: "lamb",
        optimizer: Lamb::default().into(),
        codings: &[Coding::Signed, Coding::Root],
        coded: |pool, step, param, state| {
            let [moment1, moment2] = taken(state);
            let tensor = CodedLambTensors::new(param, moment1, moment2);
            let skipped = Lamb::default().step_coded_with(pool, step, &mut [tensor]).unwrap();
            assert!(skipped.is_empty());
        },
        plain: |step, param, grad, state| {
            let [moment1, moment2] = taken(state);
            let tensor = LambTensors::new(param, grad, moment1, moment2);
            Lamb::default().step(step, &mut [tensor]).unwrap();
        },
    }
}

fn amsgrad() -> Rule {
    Rule {
        name: "amsgrad",
        optimizer: ADAM.into(),
        codings: &[Coding::Signed, Coding::Root, Coding::Root],
        coded: |pool, step, param, state| {
            let [moment1, moment2, largest] = taken(state);
            let max_moment2 = Some(largest);
            let tensor = CodedAdamTensors { param, moment1, moment2, max_moment2 };
            ADAM.step_coded_with(pool, step, &mut [tensor]).unwrap();
        },
        plain: |step, param, grad, state| {
            let [moment1, moment2, largest] = taken(state);
            let max_moment2 = Some(&mut largest[..]);
            let tensor = AdamTensors { param, grad, moment1, moment2, max_moment2 };
            ADAM.step(step, &mut [tensor]).unwrap();
        },
    }
}

fn lion() -> Rule {
    Rule {
        name: "lion",
        optimizer: Lion::default().into(),
        codings: &[Coding::Signed],
        coded: |pool, step, param, state| {
            let [moment1] = taken(state);
            let tensor = CodedLionTensors { param, moment1 };
            Lion::default().step_coded_with(pool, step, &mut [tensor]).unwrap();
        },
        plain: |step, param, grad, state| {
            let [moment1] = taken(state);
            Lion::default().step(step, &mut [LionTensors { param, grad, moment1 }]).unwrap();
        },
    }
}

const MOMENTUM: Sgd = Sgd {
    lr: 0.01,
    momentum: 0.9,
    dampening: 0.0,
    nesterov: Nesterov::Nesterov,
    weight_decay: WeightDecay::Decoupled(0.1),
    rescale: 0.5,
    objective: fusestep_launch::Objective::Maximize,
};

fn momentum() -> Rule {
    Rule {
        name: "momentum",
        optimizer: MOMENTUM.into(),
        codings: &[Coding::Signed],
        coded: |pool, step, param, state| {
            let [velocity] = taken(state);
            let tensor = CodedSgdTensors { param, velocity };
            MOMENTUM.step_coded_with(pool, step, &mut [tensor]).unwrap();
        },
        plain: |step, param, grad, state| {
            let [velocity] = taken(state);
            let tensor = SgdTensors { param, grad, velocity: Some(velocity) };
            MOMENTUM.step(step, &mut [tensor]).unwrap();
        },
    }
}

fn rmsprop() -> Rule {
    Rule {
        name: "rmsprop",
        optimizer: RmsProp::default().into(),
        codings: &[Coding::Root],
        coded: |pool, step, param, state| {
            let [moment2] = taken(state);
            let tensor = CodedRmsPropTensors { param, moment2, velocity: None };
            RmsProp::default().step_coded_with(pool, step, &mut [tensor]).unwrap();
        },
        plain: |step, param, grad, state| {
            let [moment2] = taken(state);
            let tensor = RmsPropTensors { param, grad, moment2, moment1: None, velocity: None };
            RmsProp::default().step(step, &mut [tensor]).unwrap();
        },
    }
}

fn rmsprop_with_momentum() -> Rule {
    const RULE: fn() -> RmsProp = || RmsProp { momentum: 0.9, ..RmsProp::default() };
    Rule {
        name: "rmsprop with momentum",
        optimizer: RULE().into(),
        codings: &[Coding::Root, Coding::Signed],
        coded: |pool, step, param, state| {
            let [moment2, velocity] = taken(state);
            let tensor = CodedRmsPropTensors { param, moment2, velocity: Some(velocity) };
            RULE().step_coded_with(pool, step, &mut [tensor]).unwrap();
        },
        plain: |step, param, grad, state| {
            let [moment2, velocity] = taken(state);
            let velocity = Some(&mut velocity[..]);
            let tensor = RmsPropTensors { param, grad, moment2, moment1: None, velocity };
            RULE().step(step, &mut [tensor]).unwrap();
        },
    }
}

fn adagrad() -> Rule {
    const RULE: fn() -> Adagrad = || Adagrad { initial_sum: 0.1, ..Adagrad::default() };
    Rule {
        name: "adagrad",
        optimizer: RULE().into(),
        codings: &[Coding::Root],
        coded: |pool, step, param, state| {
            let [sum] = taken(state);
            RULE().step_coded_with(pool, step, &mut [CodedAdagradTensors { param, sum }]).unwrap();
        },
        plain: |step, param, grad, state| {
            let [sum] = taken(state);
            RULE().step(step, &mut [AdagradTensors { param, grad, sum }]).unwrap();
        },
    }
}

/// A coded list.
#[derive(Clone)]
struct List {
    codes: Vec<u8>,
    units: Vec<f32>,
}

impl List {
    fn zeros(numel: usize) -> Self {
        Self { codes: vec![0; numel], units: vec![0.0; units_of(numel)] }
    }

    fn read(&self, coding: Coding) -> Vec<f32> {
        let codes = self.codes.iter().enumerate();
        codes.map(|(at, code)| reference::decode(coding, *code, self.units[at / GROUP])).collect()
    }

    fn written(coding: Coding, values: &[f32], dither: &Dither) -> Self {
        let groups = values.chunks(GROUP).map(|values| reference::encode(coding, values, dither));
        let (codes, units): (Vec<_>, _) = groups.unzip();
        Self { codes: codes.concat(), units }
    }
}

fn draw(seed: usize) -> f32 {
    let h = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let h = (h ^ h >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
    h as f32 / 16_777_216.0 - 0.5
}

/// Gradients of very different magnitudes, one in eight of them 0.
fn grads(numel: usize, step: u64) -> Vec<f32> {
    let of = |at: usize| draw(at * 64 + step as usize) * 10f32.powf(4.0 * draw(at) - 2.0);
    (0..numel).map(|at| if (at + step as usize).is_multiple_of(8) { 0.0 } else { of(at) }).collect()
}

#[test]
fn a_list_has_one_coding_in_all_rules() {
    let int8 = Precision { state: StateDType::Int8, ..Precision::default() };
    for Rule { name, optimizer, codings, .. } in rules() {
        let kernel = optimizer.rule().kernel(DType::F32, int8).unwrap();
        let coded = kernel.lists().iter().filter(|list| list.dtype == DType::U8);
        let found: Vec<Coding> = coded.map(|list| Coding::of(list.role).unwrap()).collect();
        assert_eq!(found, codings, "{name}");
    }
}

#[test]
fn a_coded_step_reads_steps_in_f32_and_writes() {
    let pool = Pool::new(std::num::NonZeroUsize::new(3).unwrap());
    for Rule { name, codings, coded, plain, .. } in rules() {
        for numel in [0, 1, 31, 32, 33, 65, 40_000] {
            let mut param: Vec<f32> = (0..numel).map(draw).collect();
            let mut lists = vec![List::zeros(numel); codings.len()];
            let (mut expected, mut expected_lists) = (param.clone(), lists.clone());
            for step in 1..=5 {
                let grad = grads(numel, step);
                let state = lists.iter_mut();
                let state = state.map(|l| CodedState { codes: &mut l.codes, units: &mut l.units });
                let slices = ParamSlices::F32 { param: &mut param, grad: &grad };
                coded(&pool, step, slices, state.collect());
                let dither = Dither::of_step(step);
                let read = expected_lists.iter().zip(codings);
                let mut state: Vec<Vec<f32>> =
                    read.map(|(list, coding)| list.read(*coding)).collect();
                plain(step, &mut expected, &grad, &mut state);
                for ((list, coding), values) in expected_lists.iter_mut().zip(codings).zip(&state) {
                    *list = List::written(*coding, values, &dither);
                }
            }
            assert!(param == expected, "{name}, {numel}");
            for (list, expected) in lists.iter().zip(&expected_lists) {
                assert!(list.codes == expected.codes, "{name}, {numel}");
                assert!(list.units == expected.units, "{name}, {numel}");
            }
        }
    }
}

#[test]
fn a_remainder_of_8_bits_is_the_f32_rule_rounded_to_24_bits() {
    let pool = Pool::new(std::num::NonZeroUsize::MIN);
    for Rule { name, codings, coded, plain, .. } in rules() {
        let numel = 100;
        let split = (0..numel).map(|at| split_bf16_24(draw(at)));
        let (mut param, mut remainder): (Vec<bf16>, Vec<i8>) =
            split.map(|(param, remainder)| (bf16::from_bits(param), remainder)).unzip();
        let mut lists = vec![List::zeros(numel); codings.len()];
        for step in 1..=4 {
            let grad: Vec<bf16> = grads(numel, step).into_iter().map(bf16::from_f32).collect();
            let joined = param.iter().zip(&remainder);
            let mut expected: Vec<f32> =
                joined.map(|(param, rest)| join_bf16_24(param.to_bits(), *rest)).collect();
            let wide: Vec<f32> = grad.iter().map(|grad| grad.to_f32()).collect();
            let read = lists.iter().zip(codings);
            let mut state: Vec<Vec<f32>> = read.map(|(list, coding)| list.read(*coding)).collect();
            plain(step, &mut expected, &wide, &mut state);
            let slices = ParamSlices::Bf16Remainder8 {
                param: &mut param,
                remainder: &mut remainder,
                grad: &grad,
            };
            let state = lists.iter_mut();
            let state = state.map(|l| CodedState { codes: &mut l.codes, units: &mut l.units });
            coded(&pool, step, slices, state.collect());
            for (at, value) in expected.into_iter().enumerate() {
                let found = (param[at].to_bits(), remainder[at]);
                assert_eq!(found, split_bf16_24(value), "{name}, step {step}, element {at}");
            }
        }
    }
}

#[test]
fn a_tensor_with_a_norm_that_is_not_finite_keeps_every_code() {
    let numel = 70_000;
    let mut grad = grads(numel, 1);
    grad[66_000] = f32::INFINITY;
    let mut param: Vec<f32> = (0..numel).map(draw).collect();
    let before = param.clone();
    let mut lists = vec![List::zeros(numel); 2];
    for list in &mut lists {
        list.codes.fill(3);
        list.units.fill(1e-6);
    }
    let kept = lists.clone();
    let state = lists.iter_mut();
    let [moment1, moment2] =
        taken(state.map(|l| CodedState { codes: &mut l.codes, units: &mut l.units }));
    let slices = ParamSlices::F32 { param: &mut param, grad: &grad };
    let tensor = CodedLambTensors::new(slices, moment1, moment2);
    assert_eq!(Lamb::default().step_coded(2, &mut [tensor]).unwrap(), [0]);
    assert!(param == before);
    for (list, kept) in lists.iter().zip(&kept) {
        assert!(list.codes == kept.codes && list.units == kept.units);
    }
    let [velocity] = taken([&mut lists[0]]);
    let (codes, units) = (&mut velocity.codes, &mut velocity.units);
    let slices = ParamSlices::F32 { param: &mut param, grad: &grad };
    let mut tensor = CodedLarsTensors::new(slices, CodedState { codes, units });
    tensor.lr_scale = -1.0;
    let error = Lars::default().step_coded(1, &mut [tensor]).unwrap_err().to_string();
    assert_eq!(error, "lr_scale of tensor 0: expected a finite value of at least 0, found -1");
}

#[test]
fn rules_whose_state_8_bits_cannot_keep_are_refused() {
    let error = Sgd::default().step_coded(1, &mut []).unwrap_err().to_string();
    assert_eq!(error, "momentum: expected a value in (0, 1) with a velocity of 8 bits, found 0");
    let centered = RmsProp { centering: Centering::Centered, ..RmsProp::default() };
    let error = centered.step_coded(1, &mut []).unwrap_err().to_string();
    assert_eq!(error, "centered: expected 0 with state of 8 bits, found 1");
    let mut list = List::zeros(1);
    let tensor = CodedRmsPropTensors {
        param: ParamSlices::F32 { param: &mut [1.0], grad: &[1.0] },
        moment2: CodedState { codes: &mut list.codes, units: &mut list.units },
        velocity: None,
    };
    let with_momentum = RmsProp { momentum: 0.9, ..RmsProp::default() };
    let error = with_momentum.step_coded(1, &mut [tensor]).unwrap_err().to_string();
    let message = "velocity of tensor 0: expected a list, because momentum is above 0, found none";
    assert_eq!(error, message);
}

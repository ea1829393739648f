//! Fused Adam against PyTorch, against its own f64 reference, and its slice entry against bad input.

use std::collections::HashMap;

use bytemuck::pod_collect_to_vec;
use fusestep_fused_adam::device::Compute;
use fusestep_fused_adam::reference::{Element, update};
use fusestep_fused_adam::{Adam, AdamError, AdamTensors, Objective, SecondMoment, WeightDecay};
use fusestep_planner::{Optimizer, Planner};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, EDGE_NUMELS, backends, outcome};
use safetensors::SafeTensors;
use serde::Deserialize;

/// What `tests/golden/fused_adam.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/fused_adam.safetensors");

/// One tensor in training through the slice entry.
struct Trained<T> {
    adam: Adam,
    step: u64,
    /// Parameter, moment1, moment2, max_moment2.
    lists: [Vec<T>; 4],
}

impl<T: Compute> Trained<T> {
    fn new(adam: Adam, param: Vec<T>) -> Self {
        let zeros = vec![T::zeroed(); param.len()];
        let lists = [param, zeros.clone(), zeros.clone(), zeros];
        Self {
            adam,
            step: 0,
            lists,
        }
    }

    fn step(&mut self, grad: &[T]) {
        self.step += 1;
        let [param, moment1, moment2, max_moment2] = &mut self.lists;
        let amsgrad = self.adam.second_moment == SecondMoment::Largest;
        let tensor = AdamTensors {
            param,
            grad,
            moment1,
            moment2,
            max_moment2: amsgrad.then_some(max_moment2.as_mut_slice()),
        };
        self.adam.step(self.step, &mut [tensor]).unwrap();
    }
}

/// Settings of one golden case, as its script writes them.
#[derive(Deserialize)]
struct Settings {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    decay: String,
    amsgrad: bool,
    maximize: bool,
}

impl Settings {
    fn adam(&self) -> Adam {
        Adam {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: match self.decay.as_str() {
                "decoupled" => WeightDecay::Decoupled(self.weight_decay),
                "l2" => WeightDecay::L2(self.weight_decay),
                other => panic!("unknown decay `{other}`"),
            },
            second_moment: match self.amsgrad {
                true => SecondMoment::Largest,
                false => SecondMoment::Running,
            },
            objective: match self.maximize {
                true => Objective::Maximize,
                false => Objective::Minimize,
            },
        }
    }
}

/// ‖found − expected‖ / ‖expected − start‖, or 0 if nothing differs.
fn relative_difference(start: &[f64], expected: &[f64], found: &[f64]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let norm = |a: &[f64], b: &[f64]| {
        let squares = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b));
        squares.sum::<f64>().sqrt()
    };
    match norm(found, expected) {
        0.0 => 0.0,
        difference => difference / norm(expected, start),
    }
}

/// Trains as the golden case did and returns the largest relative difference of the total update of any list.
fn differ_from_golden<T: Compute + Into<f64>>(
    golden: &SafeTensors<'_>,
    case: &str,
    adam: Adam,
    numel: usize,
) -> f64 {
    let read = |name: String| pod_collect_to_vec::<u8, T>(golden.tensor(&name).unwrap().data());
    let wide = |values: &[T]| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let key = format!("{}.{numel}", T::DTYPE);
    let start = read(format!("{key}.param.0"));
    assert_eq!(start.len(), numel);
    let mut trained = Trained::new(adam, start.clone());
    let mut worst = 0.0f64;
    for step in 1..=10 {
        trained.step(&read(format!("{key}.grad.{step}")));
        if [1, 2, 10].contains(&step) {
            let expected = wide(&read(format!("{case}.{key}.param.{step}")));
            let found = wide(&trained.lists[0]);
            worst = worst.max(relative_difference(&wide(&start), &expected, &found));
        }
    }
    let lists = match adam.second_moment {
        SecondMoment::Running => 2,
        SecondMoment::Largest => 3,
    };
    let names = ["moment1", "moment2", "max_moment2"];
    for (name, found) in names.iter().zip(&trained.lists[1..]).take(lists) {
        let expected = wide(&read(format!("{case}.{key}.{name}.10")));
        let zeros = vec![0.0; numel];
        worst = worst.max(relative_difference(&zeros, &expected, &wide(found)));
    }
    worst
}

#[test]
fn ten_steps_agree_with_pytorch() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    let (_, header) = SafeTensors::read_metadata(GOLDEN).unwrap();
    let metadata: &HashMap<String, String> = header.metadata().as_ref().unwrap();
    let (mut cases, mut worst) = (0, (0.0f64, 0.0f64));
    for (key, settings) in metadata {
        let Some(case) = key.strip_prefix("case.") else {
            continue;
        };
        cases += 1;
        let adam = serde_json::from_str::<Settings>(settings).unwrap().adam();
        for numel in [0, 1, 17, 257] {
            let single = differ_from_golden::<f32>(&golden, case, adam, numel);
            assert!(single <= 1e-5, "{case}, f32, {numel} elements: {single:e}");
            let double = differ_from_golden::<f64>(&golden, case, adam, numel);
            assert!(double <= 1e-12, "{case}, f64, {numel} elements: {double:e}");
            worst = (worst.0.max(single), worst.1.max(double));
        }
    }
    println!(
        "largest relative difference: f32 {:e}, f64 {:e}",
        worst.0, worst.1
    );
    assert_eq!(
        cases,
        9,
        "the script's cases; {:?}",
        metadata.get("versions")
    );
}

#[test]
fn the_golden_comparison_can_fail() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    let wrong = Adam {
        lr: 1.00002e-3,
        ..Adam::default()
    };
    assert!(differ_from_golden::<f32>(&golden, "adamw", Adam::default(), 257) <= 1e-5);
    assert!(differ_from_golden::<f32>(&golden, "adamw", wrong, 257) > 1e-5);
    assert!(differ_from_golden::<f64>(&golden, "adamw", wrong, 257) > 1e-12);
}

fn configurations() -> Vec<Adam> {
    let mut all = Vec::new();
    for (lr, eps) in [(1e-3, 1e-8), (1e-2, 1e-4), (1e-1, 0.0)] {
        for weight_decay in [
            WeightDecay::Decoupled(0.01),
            WeightDecay::L2(0.1),
            WeightDecay::L2(0.0),
        ] {
            for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
                all.push(Adam {
                    lr,
                    eps,
                    weight_decay,
                    second_moment,
                    ..Adam::default()
                });
            }
        }
    }
    all
}

/// The distance between neighbouring f32 at `scale`.
fn unit_in_the_last_place(scale: f64) -> f64 {
    let scale = scale as f32;
    f64::from(scale.next_up()) - f64::from(scale)
}

/// Largest error of a parameter after each of `marks`, in units in the last place of the largest value it has had.
fn errors_in_units(adam: Adam, marks: &[u64]) -> Vec<f64> {
    let case = Case::new([33], DType::F32);
    let start: Vec<f32> = pod_collect_to_vec(&case.param_bytes(0));
    let mut trained = Trained::new(adam, start.clone());
    let mut elements: Vec<Element> = start.iter().map(|&p| element(p)).collect();
    let mut scales: Vec<f64> = start.iter().map(|&p| f64::from(p.abs())).collect();
    let mut errors = Vec::new();
    for step in 1..=*marks.last().unwrap() {
        let grad: Vec<f32> = pod_collect_to_vec(&case.grad_bytes(0, step));
        trained.step(&grad);
        for ((element, scale), &g) in elements.iter_mut().zip(&mut scales).zip(&grad) {
            *element = update(&adam, step, *element, g.into());
            *scale = scale.max(element.param.abs());
        }
        if marks.contains(&step) {
            let found = trained.lists[0].iter().zip(&elements).zip(&scales);
            let units = found
                .map(|((&p, e), &s)| (f64::from(p) - e.param).abs() / unit_in_the_last_place(s));
            errors.push(units.fold(0.0, f64::max));
        }
    }
    errors
}

fn element(param: f32) -> Element {
    Element {
        param: param.into(),
        ..Element::default()
    }
}

/// Units in the last place that `steps` f32 steps may be away from the reference; `README.md` of the kernel states the same.
///
/// The first step is worst where eps is 0 and lr as large as the parameter: nine roundings meet in m, v, the root, the
/// quotients and the step. Later steps add less, because errors of the moments fade with β; what adds up without fading is the
/// decay factor 1 − lr·λ, rounded to f32 once and applied at each step. The largest values measured were 3.8, 4.0, 4.9, 24
/// and 177 units after 1, 2, 10, 100 and 1000 steps; every platform computes the same bits, so they cannot drift.
fn bound_in_units(steps: u64) -> f64 {
    4.0 + steps as f64 / 4.0
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let marks = [1, 2, 10, 100, 1000];
    for adam in configurations() {
        for (&steps, units) in marks.iter().zip(errors_in_units(adam, &marks)) {
            let bound = bound_in_units(steps);
            assert!(
                units <= bound,
                "{adam:?} after {steps} steps: {units} units, expected at most {bound}"
            );
        }
    }
}

#[test]
fn slices_give_the_bits_of_a_plan() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let adam = Adam::default();
    let mut expected = Vec::<u8>::new();
    for index in 0..case.params.len() {
        let mut trained = Trained::<f32>::new(adam, pod_collect_to_vec(&case.param_bytes(index)));
        let mut grad = Vec::new();
        for step in 1..=case.steps {
            grad = pod_collect_to_vec(&case.grad_bytes(index, step));
            trained.step(&grad);
        }
        let [param, moment1, moment2, _] = &trained.lists;
        for list in [param, &grad, moment1, moment2] {
            expected.extend_from_slice(bytemuck::cast_slice(list));
        }
    }
    let plan = Planner::new(Optimizer::Adam(adam))
        .plan(&case.params)
        .unwrap();
    let (_, backend) = backends().pop().unwrap();
    assert!(outcome(&plan, &case, backend.as_ref()) == expected);
}

#[test]
fn bad_lists_are_named_and_nothing_is_written() {
    for (list, numels) in [
        ("grad", [5, 4, 5, 5]),
        ("moment1", [5, 5, 0, 5]),
        ("moment2", [5, 5, 5, 6]),
    ] {
        let found = *numels[1..].iter().find(|&&n| n != 5).unwrap();
        let mut good = vec![vec![0.5f32; 3]; 4];
        let mut bad: Vec<Vec<f32>> = numels.iter().map(|&n| vec![0.25; n]).collect();
        let before = (good.clone(), bad.clone());
        let error = Adam::default()
            .step(1, &mut [tensors(&mut good), tensors(&mut bad)])
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{list} of tensor 1: expected 5 elements, found {found}")
        );
        assert_eq!((good, bad), before);
    }
}

fn tensors(lists: &mut [Vec<f32>]) -> AdamTensors<'_, f32> {
    let [param, grad, moment1, moment2] = lists else {
        panic!("four lists")
    };
    AdamTensors {
        param,
        grad,
        moment1,
        moment2,
        max_moment2: None,
    }
}

#[test]
fn step_0_and_bad_settings_are_refused_before_anything_is_written() {
    let good = Adam::default();
    let largest = Adam {
        second_moment: SecondMoment::Largest,
        ..good
    };
    for (adam, step, message) in [
        (
            good,
            0,
            "step: expected at least 1, found 0; steps count from 1",
        ),
        (
            Adam {
                lr: f64::INFINITY,
                ..good
            },
            1,
            "lr: expected a finite value of at least 0, found inf",
        ),
        (
            Adam { beta2: 1.0, ..good },
            1,
            "beta2: expected a value in [0, 1), found 1",
        ),
        (
            largest,
            1,
            "max_moment2 of tensor 0: expected a slice, because the second moment is `Largest`, found none",
        ),
    ] {
        let mut lists = vec![vec![0.5f32; 3]; 4];
        let error = adam.step(step, &mut [tensors(&mut lists)]).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!(lists, vec![vec![0.5f32; 3]; 4], "{message}");
    }
}

#[test]
fn a_largest_moment_is_refused_without_amsgrad_and_checked_with_it() {
    let mut lists = vec![vec![0.5f32; 3]; 4];
    let mut largest = vec![0.5f32; 2];
    let mut tensor = tensors(&mut lists);
    tensor.max_moment2 = Some(&mut largest);
    let mut tensor = [tensor];
    let error = Adam::default().step(1, &mut tensor).unwrap_err();
    assert!(matches!(error, AdamError::MaxMoment2 { tensor: 0, .. }));
    let amsgrad = Adam {
        second_moment: SecondMoment::Largest,
        ..Adam::default()
    };
    let error = amsgrad.step(1, &mut tensor).unwrap_err();
    assert_eq!(
        error.to_string(),
        "max_moment2 of tensor 0: expected 3 elements, found 2"
    );
    assert_eq!(lists, vec![vec![0.5f32; 3]; 4]);
}

#[test]
fn no_tensors_and_empty_tensors_are_a_step() {
    Adam::default().step::<f32>(1, &mut []).unwrap();
    let mut lists = vec![Vec::new(); 4];
    Adam::default().step(1, &mut [tensors(&mut lists)]).unwrap();
}

//! Fused Adam against PyTorch, against its own f64 reference, and its slice entry against bad
//! input.

use bytemuck::pod_collect_to_vec;
use fusestep_elementwise::Compute;
use fusestep_fused_adam::reference::{Element, update};
use fusestep_fused_adam::{Adam, AdamTensors, SecondMoment, StepError, WeightDecay};
use fusestep_planner::{Optimizer, Planner};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, EDGE_NUMELS, backends, outcome};

#[path = "fused_adam/pytorch.rs"]
mod pytorch;

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
        Self { adam, step: 0, lists }
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

fn configurations() -> Vec<Adam> {
    let mut all = Vec::new();
    for (lr, eps) in [(1e-3, 1e-8), (1e-2, 1e-4), (1e-1, 0.0)] {
        for weight_decay in
            [WeightDecay::Decoupled(0.01), WeightDecay::L2(0.1), WeightDecay::L2(0.0)]
        {
            for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
                all.push(Adam { lr, eps, weight_decay, second_moment, ..Adam::default() });
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

/// Largest error of a parameter after each of `marks`, in units in the last place of the largest
/// value it has had.
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
    Element { param: param.into(), ..Element::default() }
}

/// Units in the last place that `steps` f32 steps may be away from the reference; `README.md` of
/// the kernel states the same.
///
/// The first step is worst where eps is 0 and lr as large as the parameter: nine roundings meet in
/// m, v, the root, the quotients and the step. Later steps add less, because errors of the moments
/// fade with β; what adds up without fading is the decay factor 1 − lr·λ, rounded to f32 once and
/// applied at each step. The largest values measured were 3.8, 4.0, 4.9, 24 and 177 units after 1,
/// 2, 10, 100 and 1000 steps; every platform computes the same bits, so they cannot drift.
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
    let plan = Planner::new(Optimizer::Adam(adam)).plan(&case.params).unwrap();
    let (_, backend) = backends().pop().unwrap();
    assert!(outcome(&plan, &case, backend.as_ref()) == expected);
}

#[test]
fn bad_lists_are_named_and_nothing_is_written() {
    for (list, numels) in
        [("grad", [5, 4, 5, 5]), ("moment1", [5, 5, 0, 5]), ("moment2", [5, 5, 5, 6])]
    {
        let found = *numels[1..].iter().find(|&&n| n != 5).unwrap();
        let mut good = vec![vec![0.5f32; 3]; 4];
        let mut bad: Vec<Vec<f32>> = numels.iter().map(|&n| vec![0.25; n]).collect();
        let before = (good.clone(), bad.clone());
        let error =
            Adam::default().step(1, &mut [tensors(&mut good), tensors(&mut bad)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{list} of tensor 1: expected 5 elements, found {found}")
        );
        assert_eq!((good, bad), before);
    }
}

fn tensors(lists: &mut [Vec<f32>]) -> AdamTensors<'_, f32> {
    let [param, grad, moment1, moment2] = lists else { panic!("four lists") };
    AdamTensors { param, grad, moment1, moment2, max_moment2: None }
}

#[test]
fn step_0_and_bad_settings_are_refused_before_anything_is_written() {
    let good = Adam::default();
    let largest = Adam { second_moment: SecondMoment::Largest, ..good };
    for (adam, step, message) in [
        (good, 0, "step: expected at least 1, found 0; steps count from 1"),
        (
            Adam { lr: f64::INFINITY, ..good },
            1,
            "lr: expected a finite value of at least 0, found inf",
        ),
        (Adam { beta2: 1.0, ..good }, 1, "beta2: expected a value in [0, 1), found 1"),
        (
            largest,
            1,
            "max_moment2 of tensor 0: expected a slice, because the second moment is `Largest`, \
             found none",
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
    assert!(matches!(error, StepError::List { tensor: 0, .. }));
    let amsgrad = Adam { second_moment: SecondMoment::Largest, ..Adam::default() };
    let error = amsgrad.step(1, &mut tensor).unwrap_err();
    assert_eq!(error.to_string(), "max_moment2 of tensor 0: expected 3 elements, found 2");
    assert_eq!(lists, vec![vec![0.5f32; 3]; 4]);
}

#[test]
fn no_tensors_and_empty_tensors_are_a_step() {
    Adam::default().step::<f32>(1, &mut []).unwrap();
    let mut lists = vec![Vec::new(); 4];
    Adam::default().step(1, &mut [tensors(&mut lists)]).unwrap();
}

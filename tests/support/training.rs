//! One tensor in training by a plan, and how far it gets from other implementations.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use bytemuck::pod_collect_to_vec;
use fusestep_cpu::CpuBackend;
use fusestep_elementwise::Compute;
use fusestep_planner::{Optimizer, Plan, Planner, RunAlone, State};
use fusestep_tensor::{DType, Element, ParamDesc, Role, Shape};
use fusestep_testkit::Case;
use safetensors::SafeTensors;
use serde::de::DeserializeOwned;

const NAME: &str = "w";

/// Element counts of the golden files.
const NUMELS: [usize; 4] = [0, 1, 17, 257];

/// Steps after which the golden files have the parameter.
const KEPT: [u64; 3] = [1, 2, 10];

/// One tensor in training.
pub(crate) struct Trained {
    plan: Plan,
    state: State,
    backend: CpuBackend,
}

impl Trained {
    pub(crate) fn new<T: Element>(rule: Optimizer, start: &[T]) -> Self {
        let shape = Shape::new([start.len() as u64]).unwrap();
        let params = [ParamDesc::new(NAME, shape, T::DTYPE)];
        let plan = Planner::new(rule).plan(&params).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        let param = state.view_mut(Role::Param, NAME).unwrap();
        param.copy_from_slice(start);
        Self { plan, state, backend }
    }

    pub(crate) fn step<T: Element>(&mut self, grad: &[T]) {
        self.state.grad_mut(NAME).unwrap().copy_from_slice(grad);
        RunAlone::of(&self.plan, &mut self.state, &self.backend).step_all().unwrap();
    }

    pub(crate) fn list<T: Element>(&self, role: Role) -> &[T] {
        self.state.view(role, NAME).unwrap()
    }

    fn state_roles(&self) -> Vec<Role> {
        let roles = self.state.roles(NAME).unwrap().into_iter();
        roles.filter(|role| role.is_state()).collect()
    }
}

/// ‖a − b‖.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b));
    squares.sum::<f64>().sqrt()
}

/// ‖found − expected‖ in units of `length`, or 0 if nothing differs.
fn relative_difference(length: f64, expected: &[f64], found: &[f64]) -> f64 {
    match distance(found, expected) {
        0.0 => 0.0,
        difference => difference / length,
    }
}

/// Trains as the golden case did and returns the largest difference of any list, relative to the
/// length of its update: the longest so far, because steps may lead back to where they began.
pub(crate) fn differ_from_golden<T: Element + Compute + Into<f64>>(
    golden: &[u8],
    case: &str,
    rule: Optimizer,
    numel: usize,
) -> f64 {
    let golden = SafeTensors::deserialize(golden).unwrap();
    let read = |name: String| pod_collect_to_vec::<u8, T>(golden.tensor(&name).unwrap().data());
    let wide = |values: &[T]| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let key = format!("{}.{numel}", <T as Element>::DTYPE);
    let start = read(format!("{key}.param.0"));
    assert_eq!(start.len(), numel);
    let mut trained = Trained::new(rule, &start);
    let (mut worst, mut longest) = (0.0f64, 0.0f64);
    for step in 1..=10 {
        trained.step(&read(format!("{key}.grad.{step}")));
        if KEPT.contains(&step) {
            let expected = wide(&read(format!("{case}.{key}.param.{step}")));
            let found = wide(trained.list(Role::Param));
            longest = longest.max(distance(&expected, &wide(&start)));
            worst = worst.max(relative_difference(longest, &expected, &found));
        }
    }
    for role in trained.state_roles() {
        let expected = wide(&read(format!("{case}.{key}.{role}.10")));
        let found = wide(trained.list(role));
        let length = distance(&expected, &vec![0.0; numel]);
        worst = worst.max(relative_difference(length, &expected, &found));
    }
    worst
}

/// Requires that every case of a golden file differs by at most 1e-5 in f32 and 1e-12 in f64;
/// `Settings` are the script's.
pub(crate) fn check_golden<Settings: DeserializeOwned>(
    golden: &[u8],
    cases: usize,
    rule: impl Fn(Settings) -> Optimizer,
) {
    let (_, header) = SafeTensors::read_metadata(golden).unwrap();
    let metadata: &HashMap<String, String> = header.metadata().as_ref().unwrap();
    let (mut found, mut worst) = (0, (0.0f64, 0.0f64));
    for (key, settings) in metadata {
        let Some(case) = key.strip_prefix("case.") else {
            continue;
        };
        found += 1;
        let rule = rule(serde_json::from_str(settings).unwrap());
        for numel in NUMELS {
            let single = differ_from_golden::<f32>(golden, case, rule, numel);
            assert!(single <= 1e-5, "{case}, f32, {numel} elements: {single:e}");
            let double = differ_from_golden::<f64>(golden, case, rule, numel);
            assert!(double <= 1e-12, "{case}, f64, {numel} elements: {double:e}");
            worst = (worst.0.max(single), worst.1.max(double));
        }
    }
    println!("largest relative difference: f32 {:e}, f64 {:e}", worst.0, worst.1);
    assert_eq!(found, cases, "the script's cases; {:?}", metadata.get("versions"));
}

/// Steps after which errors are measured.
pub(crate) const MARKS: [u64; 5] = [1, 2, 10, 100, 1000];

/// Largest error of a parameter after each of [`MARKS`], in units in the last place of the largest
/// value it has had.
///
/// `update` is the reference: the element after a step with a gradient; `param` reads its
/// parameter.
pub(crate) fn errors_in_units<E: Copy>(
    rule: Optimizer,
    element: impl Fn(f64) -> E,
    update: impl Fn(u64, E, f64) -> E,
    param: impl Fn(&E) -> f64,
) -> [f64; MARKS.len()] {
    let case = Case::new([33], DType::F32);
    let start: Vec<f32> = pod_collect_to_vec(&case.param_bytes(0));
    let mut trained = Trained::new(rule, &start);
    let mut elements: Vec<E> = start.iter().map(|&p| element(p.into())).collect();
    let mut scales: Vec<f64> = start.iter().map(|&p| f64::from(p.abs())).collect();
    let mut errors = [0.0f64; MARKS.len()];
    for step in 1..=MARKS[MARKS.len() - 1] {
        let grad: Vec<f32> = pod_collect_to_vec(&case.grad_bytes(0, step));
        trained.step(&grad);
        for ((element, scale), &g) in elements.iter_mut().zip(&mut scales).zip(&grad) {
            *element = update(step, *element, g.into());
            *scale = scale.max(param(element).abs());
        }
        let Some(mark) = MARKS.iter().position(|&mark| mark == step) else {
            continue;
        };
        let found = trained.list::<f32>(Role::Param);
        for ((&p, element), &scale) in found.iter().zip(&elements).zip(&scales) {
            let unit = f64::from((scale as f32).next_up()) - f64::from(scale as f32);
            errors[mark] = errors[mark].max((f64::from(p) - param(element)).abs() / unit);
        }
    }
    errors
}

/// Requires of each rule that its errors stay below `bound(steps)`, and prints the largest.
pub(crate) fn check_errors(
    all: impl IntoIterator<Item = (String, [f64; MARKS.len()])>,
    bound: impl Fn(u64) -> f64,
) {
    let mut largest = [0.0f64; MARKS.len()];
    let mut broken = Vec::new();
    for (rule, errors) in all {
        for ((&steps, units), largest) in MARKS.iter().zip(errors).zip(&mut largest) {
            *largest = largest.max(units);
            if units.is_nan() || units > bound(steps) {
                broken.push(format!(
                    "{rule} after {steps} steps: {units} units, expected at most {}",
                    bound(steps)
                ));
            }
        }
    }
    println!("largest errors after {MARKS:?} steps: {largest:.2?}");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

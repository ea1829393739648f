//! Checks of a rule that is its equation: PyTorch's numbers, the f64 reference, and plain slices.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use bytemuck::pod_collect_to_vec;
use fusestep_elementwise::StepError;
use fusestep_launch::SettingValue;
use fusestep_planner::{Optimizer, Planner};
use fusestep_simd::Pool;
use fusestep_tensor::DType;
use fusestep_testkit::{Case, EDGE_NUMELS, ElementState, backends, outcome, reference_step};
use serde_json::Value;

use crate::training::{check_errors, check_golden, differ_from_golden, errors_in_units};

/// Settings of a golden case by their names.
type Settings = HashMap<String, Value>;

/// The rule with the settings of a golden case, all of which it has.
fn with_settings(mut rule: Optimizer, mut settings: Settings) -> Optimizer {
    rule.each(&mut |setting| {
        let given = settings.remove(setting.name);
        let given = given.unwrap_or_else(|| panic!("{}: expected in the case", setting.name));
        match setting.value {
            SettingValue::Number(value, _) => *value = given.as_f64().unwrap(),
            SettingValue::Count(value) => *value = given.as_u64().unwrap().try_into().unwrap(),
            SettingValue::Switch(switch) => switch.turn(given.as_bool().unwrap()),
        }
    });
    assert!(settings.is_empty(), "{settings:?} of {}", rule.name());
    rule
}

/// Requires PyTorch's numbers of every case, and that those of case `case`, which `right` is, are
/// not those of `wrong`.
pub(crate) fn check_pytorch(
    golden: &[u8],
    cases: usize,
    case: &str,
    right: impl Into<Optimizer>,
    wrong: impl Into<Optimizer>,
) {
    let (right, wrong) = (right.into(), wrong.into());
    check_golden(golden, cases, |settings: Settings| with_settings(right, settings));
    assert!(differ_from_golden::<f32>(golden, case, right, 257) <= 1e-5);
    assert!(differ_from_golden::<f32>(golden, case, wrong, 257) > 1e-5);
    assert!(differ_from_golden::<f64>(golden, case, wrong, 257) > 1e-12);
}

/// Requires of each rule that f32 stays within `bound(steps)` units of the f64 reference.
pub(crate) fn check_reference<R: Into<Optimizer>>(
    rules: impl IntoIterator<Item = R>,
    bound: impl Fn(u64) -> f64,
) {
    let errors = rules.into_iter().map(|rule| {
        let rule = rule.into();
        let element = |param: f64| (param, ElementState::default());
        let next = |step, (param, mut state): (f64, ElementState), grad| {
            (reference_step(&rule, step, param, &mut state, grad), state)
        };
        (rule.to_string(), errors_in_units(rule, element, next, |(param, _)| *param))
    });
    check_errors(errors, bound);
}

/// The slices of one parameter, handed to a rule's own entry.
pub(crate) struct Slices<'a, const N: usize> {
    pub(crate) pool: Option<&'a Pool>,
    pub(crate) step: u64,
    pub(crate) param: &'a mut [f32],
    pub(crate) grad: &'a [f32],
    pub(crate) state: [&'a mut [f32]; N],
}

/// Requires of a rule's entry for slices the bits of a plan, with any team, and that it refuses
/// what does not fit before it writes.
pub(crate) fn check_slices<const N: usize>(
    rule: impl Into<Optimizer>,
    entry: impl Fn(Slices<'_, N>) -> Result<(), StepError>,
) {
    let rule = rule.into();
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let pool = Pool::new(NonZeroUsize::new(3).unwrap());
    let mut expected = Vec::<u8>::new();
    for index in 0..case.params.len() {
        let mut param: Vec<f32> = pod_collect_to_vec(&case.param_bytes(index));
        let mut state: [Vec<f32>; N] = std::array::from_fn(|_| vec![0.0; param.len()]);
        let mut grad = Vec::new();
        for step in 1..=case.steps {
            grad = pod_collect_to_vec(&case.grad_bytes(index, step));
            let pool = (step % 2 == 1).then_some(&pool);
            let state = state.each_mut().map(|list| list.as_mut_slice());
            entry(Slices { pool, step, param: &mut param, grad: &grad, state }).unwrap();
        }
        for list in [param, grad].iter().chain(&state) {
            expected.extend_from_slice(bytemuck::cast_slice(list));
        }
    }
    let plan = Planner::new(rule).plan(&case.params).unwrap();
    let (_, backend) = backends().pop().unwrap();
    assert!(outcome(&plan, &case, backend.as_ref()) == expected, "{rule}");

    for (step, grad, message) in [
        (1, 4, "grad of tensor 0: expected 5 elements, found 4"),
        (0, 5, "step: expected at least 1, found 0; steps count from 1"),
    ] {
        let (mut param, mut state) = ([1.0; 5], [[0.5; 5]; N]);
        let grad = vec![0.25; grad];
        let lists = state.each_mut().map(|list| list.as_mut_slice());
        let slices = Slices { pool: None, step, param: &mut param, grad: &grad, state: lists };
        assert_eq!(entry(slices).unwrap_err().to_string(), message);
        assert_eq!((param, state), ([1.0; 5], [[0.5; 5]; N]));
    }
}

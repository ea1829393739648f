//! What a case must come out as, computed by the f64 references alone.
//!
//! Without it, every law would hold for kernels that do nothing.

use fusestep_adagrad::{Adagrad, reference as adagrad};
use fusestep_fused_adam::{Adam, SecondMoment, reference as adam};
use fusestep_fused_sgd::{Sgd, reference as sgd};
use fusestep_lion::{Lion, reference as lion};
use fusestep_planner::Optimizer;
use fusestep_tensor::{DType, ParamDesc};

use crate::Case;
use crate::normed_reference::{near_lamb, near_lars};

/// Gradients of these sizes, as ordinary ones are, must lead near the reference in every dtype.
const ORDINARY: std::ops::Range<f64> = 1e-7..1.0;

/// One element after all steps of a case: for each list but the gradient its value, and the size of what rounding may move.
struct Expected {
    param: Near,
    state: Vec<Near>,
}

/// A value, and what its rounding errors are proportional to.
#[derive(Clone, Copy)]
pub(crate) struct Near {
    pub(crate) value: f64,
    pub(crate) scale: f64,
}

/// Requires the values of the reference, up to rounding; `found` is laid out as by [`crate::outcome`].
///
/// Elements that meet an extreme gradient are left out: f32 overflows there where f64 does not.
///
/// # Panics
/// If a value is further from the reference than rounding explains, naming tensor and element.
pub(crate) fn near_reference(optimizer: &Optimizer, case: &Case, found: &[u8]) {
    match optimizer {
        Optimizer::Lars(lars) => near_lars(lars, case, found),
        Optimizer::Lamb(lamb) => near_lamb(lamb, case, found),
        elementwise => near_elementwise(elementwise, case, found),
    }
}

/// The rules whose elements do not know of each other.
fn near_elementwise(optimizer: &Optimizer, case: &Case, found: &[u8]) {
    let (mut rest, mut compared) = (found, 0);
    for (index, param) in case.params.iter().enumerate() {
        let optimizer = own_hyper_parameters(optimizer, param);
        let numel = param.numel() as usize;
        let first = values(&case.param_bytes(index), param.dtype);
        let grads: Vec<Vec<f64>> = (1..=case.steps)
            .map(|step| values(&case.grad_bytes(index, step), param.dtype))
            .collect();
        let lists = 2 + expected(&optimizer, 0.0, &[]).state.len();
        let (own, behind) = rest.split_at(numel * lists * param.dtype.len_bytes());
        rest = behind;
        let found = values(own, param.dtype);
        for at in 0..numel {
            let grads: Vec<f64> = grads.iter().map(|grads| grads[at]).collect();
            if grads.iter().any(|g| !ORDINARY.contains(&g.abs())) {
                continue;
            }
            compared += 1;
            let expected = expected(&optimizer, first[at], &grads);
            let grad = Near {
                value: grads.last().copied().unwrap_or(0.0),
                scale: 0.0,
            };
            let expected = [expected.param, grad].into_iter().chain(expected.state);
            for (list, near) in expected.enumerate() {
                let found = found[list * numel + at];
                assert!(
                    is_near(found, near, param.dtype),
                    "list {list} of `{}`, element {at}: expected {}, found {found}",
                    param.name,
                    near.value
                );
            }
        }
    }
    assert!(rest.is_empty(), "{} bytes of no list", rest.len());
    assert!(
        compared > 0 || case.params.iter().all(|param| param.numel() == 0),
        "no element had ordinary gradients only"
    );
}

/// The element that starts at `param` after one step for each gradient.
fn expected(optimizer: &Optimizer, param: f64, grads: &[f64]) -> Expected {
    let steps = (1..).zip(grads.iter().copied());
    match optimizer {
        Optimizer::Adam(rule) => expected_of_adam(rule, param, steps),
        Optimizer::Sgd(rule) => expected_of_sgd(rule, param, steps),
        Optimizer::Lion(rule) => expected_of_lion(rule, param, steps),
        Optimizer::Adagrad(rule) => expected_of_adagrad(rule, param, steps),
        other => panic!("the runner has no reference for {}", other.name()),
    }
}

fn expected_of_adam(rule: &Adam, param: f64, steps: impl Iterator<Item = (u64, f64)>) -> Expected {
    let mut element = adam::Element {
        param,
        ..adam::Element::default()
    };
    for (step, grad) in steps {
        element = adam::update(rule, step, element, grad);
    }
    // A gradient that L2 decay nearly cancels leaves few correct digits in the update, which is at most lr, and decay carries
    // them into the moments.
    let moment = |value| Near {
        value,
        scale: rule.lr * rule.weight_decay.lambda(),
    };
    let mut state = vec![moment(element.moment1), moment(element.moment2)];
    if rule.second_moment == SecondMoment::Largest {
        state.push(moment(element.max_moment2));
    }
    let param = Near {
        value: element.param,
        scale: rule.lr,
    };
    Expected { param, state }
}

fn expected_of_sgd(rule: &Sgd, param: f64, steps: impl Iterator<Item = (u64, f64)>) -> Expected {
    let mut element = sgd::Element {
        param,
        ..sgd::Element::default()
    };
    for (step, grad) in steps {
        element = sgd::update(rule, step, element, grad);
    }
    let near = |value| Near { value, scale: 0.0 };
    let mut state = Vec::new();
    if rule.has_velocity() {
        state.push(near(element.velocity));
    }
    let param = near(element.param);
    Expected { param, state }
}

fn expected_of_lion(rule: &Lion, param: f64, steps: impl Iterator<Item = (u64, f64)>) -> Expected {
    /// Below this certainty the rounding of f32 may decide the sign.
    const UNDECIDED: f64 = 1e-6;
    let mut element = lion::Element {
        param,
        ..lion::Element::default()
    };
    let mut scale = 0.0;
    for (_, grad) in steps {
        if lion::certainty(rule, element, grad) < UNDECIDED {
            // The other sign is 2·lr away, and `is_near` takes a thousandth of the scale.
            scale += 2e3 * rule.lr;
        }
        element = lion::update(rule, element, grad);
    }
    let param = Near {
        value: element.param,
        scale,
    };
    let state = vec![Near {
        value: element.moment1,
        scale: 0.0,
    }];
    Expected { param, state }
}

fn expected_of_adagrad(
    rule: &Adagrad,
    param: f64,
    steps: impl Iterator<Item = (u64, f64)>,
) -> Expected {
    let mut element = adagrad::Element {
        param,
        ..adagrad::Element::default()
    };
    for (step, grad) in steps {
        element = adagrad::update(rule, step, element, grad);
    }
    // As with Adam: decay may nearly cancel the gradient.
    let param = Near {
        value: element.param,
        scale: rule.lr,
    };
    let state = vec![Near {
        value: element.sum,
        scale: rule.lr * rule.weight_decay,
    }];
    Expected { param, state }
}

fn own_hyper_parameters(optimizer: &Optimizer, param: &ParamDesc) -> Optimizer {
    let own = |lambda| param.weight_decay.unwrap_or(lambda);
    let optimizer = optimizer.with_lr(optimizer.lr() * param.lr_scale);
    match optimizer {
        Optimizer::Adam(rule) => Optimizer::Adam(Adam {
            weight_decay: rule
                .weight_decay
                .with_lambda(own(rule.weight_decay.lambda())),
            ..rule
        }),
        Optimizer::Sgd(rule) => Optimizer::Sgd(Sgd {
            weight_decay: rule
                .weight_decay
                .with_lambda(own(rule.weight_decay.lambda())),
            ..rule
        }),
        Optimizer::Lion(rule) => Optimizer::Lion(Lion {
            weight_decay: own(rule.weight_decay),
            ..rule
        }),
        Optimizer::Adagrad(rule) => Optimizer::Adagrad(Adagrad {
            weight_decay: own(rule.weight_decay),
            ..rule
        }),
        other => panic!("the runner has no reference for {}", other.name()),
    }
}

/// Some roundings of the dtype apart, or apart by little of the scale.
pub(crate) fn is_near(found: f64, Near { value, scale }: Near, dtype: DType) -> bool {
    let (max_relative, epsilon) = match dtype {
        DType::F64 => (1e-13, 1e-16 + 1e-11 * scale),
        _ => (1e-5, 1e-8 + 1e-3 * scale),
    };
    approx::relative_eq!(found, value, max_relative = max_relative, epsilon = epsilon)
}

pub(crate) fn values(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::F64 => bytemuck::pod_collect_to_vec(bytes),
        _ => {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
            values.into_iter().map(f64::from).collect()
        }
    }
}

//! What a case must come out as, computed by the f64 references alone.
//!
//! Without it, every law would hold for kernels that do nothing.

use fusestep_fused_adam::reference::{Element, update};
use fusestep_fused_adam::{Adam, SecondMoment, WeightDecay};
use fusestep_planner::Optimizer;
use fusestep_tensor::{DType, ParamDesc};

use crate::normed_reference::{near_lamb, near_lars};
use crate::{Case, Gradients};

/// Requires the values of the reference, up to rounding; `found` is laid out as by [`crate::outcome`].
///
/// With extreme gradients f32 overflows where f64 does not, so those cases only have to change every value.
///
/// # Panics
/// If a value is further from the reference than rounding explains, naming tensor and element.
pub(crate) fn near_reference(optimizer: &Optimizer, case: &Case, found: &[u8]) {
    match optimizer {
        Optimizer::Adam(adam) => near_adam(adam, case, found),
        Optimizer::Lars(lars) => near_lars(lars, case, found),
        Optimizer::Lamb(lamb) => near_lamb(lamb, case, found),
        other => panic!("the runner has no reference for {}", other.name()),
    }
}

fn near_adam(adam: &Adam, case: &Case, found: &[u8]) {
    let mut rest = found;
    for (index, param) in case.params.iter().enumerate() {
        let adam = own_hyper_parameters(adam, param);
        let numel = param.numel() as usize;
        let (own, behind) = rest.split_at(numel * lists(&adam) * param.dtype.len_bytes());
        rest = behind;
        let found = values(own, param.dtype);
        let first = values(&case.param_bytes(index), param.dtype);
        let grads: Vec<Vec<f64>> = (1..=case.steps)
            .map(|step| values(&case.grad_bytes(index, step), param.dtype))
            .collect();
        for at in 0..numel {
            let mut element = Element {
                param: first[at],
                ..Element::default()
            };
            for (step, grads) in (1..).zip(&grads) {
                element = update(&adam, step, element, grads[at]);
            }
            let Element {
                param: p,
                moment1,
                moment2,
                max_moment2,
            } = element;
            let grad = grads.last().map_or(0.0, |grads| grads[at]);
            let expected = [p, grad, moment1, moment2, max_moment2];
            for (list, expected) in expected.iter().take(lists(&adam)).enumerate() {
                let value = found[list * numel + at];
                // A gradient that L2 decay nearly cancels leaves few correct digits in the update, which is at most lr, and decay
                // carries them into the moments.
                let scale = match list {
                    0 => adam.lr,
                    _ => adam.lr * adam.weight_decay.lambda(),
                };
                let near = match case.gradients {
                    Gradients::Ordinary => is_near(value, *expected, param.dtype, scale),
                    Gradients::Extreme => list > 0 || value != first[at],
                };
                assert!(
                    near,
                    "list {list} of `{}`, element {at}: expected {expected}, found {value}",
                    param.name
                );
            }
        }
    }
}

/// Parameter, gradient and the moments.
fn lists(adam: &Adam) -> usize {
    match adam.second_moment {
        SecondMoment::Running => 4,
        SecondMoment::Largest => 5,
    }
}

fn own_hyper_parameters(adam: &Adam, param: &ParamDesc) -> Adam {
    let own = |lambda| param.weight_decay.unwrap_or(lambda);
    Adam {
        lr: adam.lr * param.lr_scale,
        weight_decay: match adam.weight_decay {
            WeightDecay::L2(lambda) => WeightDecay::L2(own(lambda)),
            WeightDecay::Decoupled(lambda) => WeightDecay::Decoupled(own(lambda)),
        },
        ..*adam
    }
}

/// Some roundings of the dtype apart, or apart by little of `scale`.
pub(crate) fn is_near(found: f64, expected: f64, dtype: DType, scale: f64) -> bool {
    let (max_relative, epsilon) = match dtype {
        DType::F64 => (1e-13, 1e-16 + 1e-11 * scale),
        _ => (1e-5, 1e-8 + 1e-3 * scale),
    };
    approx::relative_eq!(
        found,
        expected,
        max_relative = max_relative,
        epsilon = epsilon
    )
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

//! What a case must come out as under rules that take norms, tensor by tensor.

use fusestep_lamb::Lamb;
use fusestep_lars_momentum::{Excluded, Lars, Trust};
use fusestep_launch::SetValues;
use fusestep_tensor::ParamDesc;

use crate::reference::{Near, is_near, values};
use crate::{Case, Gradients};

/// Requires of every list the values of the LARS reference.
pub(crate) fn near_lars(lars: &Lars, case: &Case, found: &[u8]) {
    each_tensor(case, 3, found, |tensor| {
        let own = Lars {
            lr: lars.lr * tensor.param.lr_scale,
            weight_decay: tensor.param.weight_decay.unwrap_or(lars.weight_decay),
            ..*lars
        };
        let trust = trust_of(lars.excluded, tensor.param);
        let mut p = tensor.first.clone();
        let mut u = vec![0.0; p.len()];
        let mut changed = false;
        for grad in &tensor.grads {
            changed |= fusestep_lars_momentum::reference::update(&own, trust, &mut p, grad, &mut u);
        }
        (vec![p, tensor.last_grad(), u], own.lr, changed)
    });
}

/// Requires of every list the values of the LAMB reference.
pub(crate) fn near_lamb(lamb: &Lamb, case: &Case, found: &[u8]) {
    each_tensor(case, 4, found, |tensor| {
        let own = Lamb {
            lr: lamb.lr * tensor.param.lr_scale,
            weight_decay: tensor.param.weight_decay.unwrap_or(lamb.weight_decay),
            ..*lamb
        };
        let trust = trust_of(lamb.excluded, tensor.param);
        let zeros = vec![0.0; tensor.first.len()];
        let mut state = fusestep_lamb::reference::Tensor {
            param: tensor.first.clone(),
            moment1: zeros.clone(),
            moment2: zeros,
        };
        let mut changed = false;
        for (step, grad) in (1..).zip(&tensor.grads) {
            changed |= fusestep_lamb::reference::update(&own, trust, step, &mut state, grad);
        }
        let lists = vec![
            state.param,
            tensor.last_grad(),
            state.moment1,
            state.moment2,
        ];
        (lists, own.lr, changed)
    });
}

/// One tensor of a case.
struct CaseTensor<'a> {
    param: &'a ParamDesc,
    first: Vec<f64>,
    /// The gradients of each step.
    grads: Vec<Vec<f64>>,
}

impl CaseTensor<'_> {
    fn last_grad(&self) -> Vec<f64> {
        self.grads.last().cloned().unwrap_or_default()
    }
}

/// Compares each tensor of `lists` lists with what `expect` makes of it: the lists, the scale of an update, and whether any step
/// changed the tensor.
fn each_tensor(
    case: &Case,
    lists: usize,
    found: &[u8],
    expect: impl Fn(&CaseTensor<'_>) -> (Vec<Vec<f64>>, f64, bool),
) {
    let mut rest = found;
    for (index, param) in case.params.iter().enumerate() {
        let numel = param.numel() as usize;
        let (own, behind) = rest.split_at(numel * lists * param.dtype.len_bytes());
        rest = behind;
        let steps = 1..=case.steps;
        let tensor = CaseTensor {
            param,
            first: values(&case.param_bytes(index), param.dtype),
            grads: steps
                .map(|step| values(&case.grad_bytes(index, step), param.dtype))
                .collect(),
        };
        let found = values(own, param.dtype);
        let (expected, scale, changed) = expect(&tensor);
        // With extreme gradients f32 overflows where f64 does not; what is skipped in every step must stand exactly as it was.
        if case.gradients == Gradients::Extreme && changed {
            continue;
        }
        for (list, expected) in expected.iter().enumerate() {
            let found = &found[list * numel..][..numel];
            for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                let near = match case.gradients {
                    Gradients::Ordinary => {
                        let near = Near {
                            value: expected,
                            scale,
                        };
                        is_near(found, near, param.dtype)
                    }
                    Gradients::Extreme => list == 1 || found == expected,
                };
                assert!(
                    near,
                    "list {list} of `{}`, element {at}: expected {expected}, found {found}",
                    param.name
                );
            }
        }
    }
}

fn trust_of(excluded: Excluded, param: &ParamDesc) -> Trust {
    excluded.trust(&SetValues {
        lr: 1.0,
        lr_scale: param.lr_scale,
        weight_decay: param.weight_decay,
        trust: param.trust,
        step: 1,
    })
}

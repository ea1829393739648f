//! Expected values of a case under rules that take norms, tensor by tensor.

use fusestep_lamb::Lamb;
use fusestep_lars_momentum::{Excluded, Lars, Trust};
use fusestep_launch::GroupValues;
use fusestep_planner::Plan;
use fusestep_tensor::{DType, ParamDesc, Role};

use crate::case::GRAD;
use crate::reference::{Kept, Near, join, values};
use crate::{Case, Gradients};

/// Requires of every list the values of the LARS reference.
pub(crate) fn near_lars(lars: &Lars, plan: &Plan, case: &Case, found: &[u8]) {
    each_tensor(plan, case, &[Role::Velocity], found, |tensor| {
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
        Expected { param: p, state: vec![u], scale: own.lr, changed }
    });
}

/// Requires of every list the values of the LAMB reference.
pub(crate) fn near_lamb(lamb: &Lamb, plan: &Plan, case: &Case, found: &[u8]) {
    let roles = [Role::Moment1, Role::Moment2];
    each_tensor(plan, case, &roles, found, |tensor| {
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
        Expected {
            param: state.param,
            state: vec![state.moment1, state.moment2],
            scale: own.lr,
            changed,
        }
    });
}

/// One tensor of a case.
struct CaseTensor<'a> {
    param: &'a ParamDesc,
    first: Vec<f64>,
    /// The gradients of each step.
    grads: Vec<Vec<f64>>,
}

/// Expected values of one tensor after all steps.
struct Expected {
    param: Vec<f64>,
    state: Vec<Vec<f64>>,
    /// The size of an update.
    scale: f64,
    /// Whether any step changed the tensor.
    changed: bool,
}

/// Compares each tensor of a rule, which has the lists `state`, with the values that `expect`
/// computes for it.
fn each_tensor(
    plan: &Plan,
    case: &Case,
    state: &[Role],
    found: &[u8],
    expect: impl Fn(&CaseTensor<'_>) -> Expected,
) {
    let mut rest = found;
    for (index, param) in case.params.iter().enumerate() {
        let kept = Kept::new(plan, state, param.dtype, case.steps);
        let columns = kept.columns(&mut rest, param);
        let grad = plan.grad_dtype(index);
        let tensor = CaseTensor {
            param,
            first: values(&case.param_bytes(index), param.dtype),
            grads: (1..=case.steps)
                .map(|step| values(&case.grad_bytes_as(index, step, grad), grad))
                .collect(),
        };
        let expected = expect(&tensor);
        // With extreme gradients f32 overflows where f64 does not. A tensor that every step skips
        // must be exactly as it was.
        if case.gradients == Gradients::Extreme && expected.changed {
            continue;
        }
        let scales = Scales::new(&kept, &tensor, &expected);
        for (list, &(role, dtype)) in kept.lists.iter().enumerate() {
            for (at, &stored) in columns[list].iter().enumerate() {
                let (found, value) = match role {
                    Role::Grad => continue,
                    Role::Remainder => (join(columns[0][at], stored), expected.param[at]),
                    Role::Param | Role::Master => (stored, expected.param[at]),
                    _ => (stored, expected.state[list - 2][at]),
                };
                let near = match case.gradients {
                    Gradients::Ordinary => scales.is_near(role, dtype, found, value),
                    Gradients::Extreme => found == value,
                };
                assert!(
                    near,
                    "{role} of `{}`, element {at}: expected {value}, found {found}",
                    param.name
                );
            }
        }
    }
}

/// Sizes to which the rounding errors of a tensor's lists are proportional.
struct Scales<'a> {
    kept: &'a Kept,
    /// The size of an update, as the rule bounds it.
    update: f64,
    /// Longest distance that an element moved, and the largest velocity.
    moved: f64,
    velocity: f64,
}

impl<'a> Scales<'a> {
    fn new(kept: &'a Kept, tensor: &CaseTensor<'_>, expected: &Expected) -> Self {
        let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let moves = tensor.first.iter().zip(&expected.param);
        Self {
            kept,
            update: expected.scale,
            moved: largest(&mut moves.map(|(first, last)| (first - last).abs())),
            velocity: largest(&mut expected.state[0].iter().map(|x| x.abs())),
        }
    }

    fn is_near(&self, role: Role, dtype: DType, found: f64, value: f64) -> bool {
        let Kept { param_error, state_error, steps, .. } = *self.kept;
        let coarse = match role {
            // The rate follows the norms, which are off by as much as their elements.
            Role::Velocity => self.velocity * steps * (param_error + state_error),
            Role::Moment1 => 3.0 * GRAD * state_error,
            Role::Moment2 => 0.0,
            _ => self.moved * steps * (param_error + 10.0 * state_error),
        };
        self.kept.is_near(dtype, found, Near { value, scale: self.update }, coarse)
    }
}

fn trust_of(excluded: Excluded, param: &ParamDesc) -> Trust {
    excluded.trust(&GroupValues {
        lr: 1.0,
        lr_scale: param.lr_scale,
        weight_decay: param.weight_decay,
        trust: param.trust,
        step: 1,
    })
}

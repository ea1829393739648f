//! Expected values of a case, computed by the f64 references alone.
//!
//! Without this comparison, every law would hold for kernels that do nothing.

use fusestep_launch::Format;
use fusestep_planner::{Optimizer, Plan};
use fusestep_simd::join_bf16;
use fusestep_tensor::{DType, ParamDesc, Role};
use half::{bf16, f16};

use crate::Case;
use crate::case::GRAD;
use crate::rules::{
    ElementState, Sensitivity, reference_step, sensitivity, undecided, with_own_hyper_parameters,
};

/// Sizes of ordinary gradients, which must lead near the reference in every dtype.
const ORDINARY: std::ops::Range<f64> = 1e-7..1.0;

/// Magnitude of a case's parameters.
const PARAM: f64 = 0.1;

/// One element after all steps of a case: for each list but the gradient its value, and the scale
/// of its rounding errors.
struct Expected {
    param: Near,
    state: Vec<Near>,
}

/// A value, and the scale to which its rounding errors are proportional.
#[derive(Clone, Copy)]
pub(crate) struct Near {
    pub(crate) value: f64,
    pub(crate) scale: f64,
}

/// Compares the elements of a rule that updates each of them on its own.
pub(crate) fn near_elementwise(plan: &Plan, case: &Case, found: &[u8]) {
    let (mut rest, mut compared) = (found, 0);
    for (index, param) in case.params.iter().enumerate() {
        let optimizer = with_own_hyper_parameters(plan.optimizer(), param);
        let rounding = Rounding::new(plan, optimizer, param.dtype, case.steps);
        let kept = &rounding.kept;
        let first = values(&case.param_bytes(index), param.dtype);
        let grad = plan.grad_dtype(index);
        let grads: Vec<Vec<f64>> = (1..=case.steps)
            .map(|step| values(&case.grad_bytes_as(index, step, grad), grad))
            .collect();
        let columns = kept.columns(&mut rest, param);
        for at in 0..param.numel() as usize {
            let grads: Vec<f64> = grads.iter().map(|grads| grads[at]).collect();
            if grads.iter().any(|g| !ORDINARY.contains(&g.abs())) {
                continue;
            }
            compared += 1;
            let expected = expected(&optimizer, first[at], &grads, kept.state_error);
            let grad = Near { value: grads.last().copied().unwrap_or(0.0), scale: 0.0 };
            let param_again = expected.param;
            let expected = [expected.param, grad].into_iter().chain(expected.state);
            let expected = expected.chain([param_again]);
            for ((&(role, dtype), column), near) in kept.lists.iter().zip(&columns).zip(expected) {
                let found = match role {
                    // The remainder makes the parameter a master, and only the master has a value.
                    Role::Remainder => join(columns[0][at], column[at]),
                    _ => column[at],
                };
                assert!(
                    rounding.is_near(role, dtype, found, near),
                    "{role} of `{}`, element {at}: expected {}, found {found}",
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
fn expected(optimizer: &Optimizer, param: f64, grads: &[f64], state_error: f64) -> Expected {
    let (mut value, mut state) = (param, ElementState::default());
    for (step, &grad) in (1..).zip(grads) {
        value = reference_step(optimizer, step, value, &mut state, grad);
    }
    // A gradient that L2 decay nearly cancels leaves few correct digits in the update. The update
    // is as large as its rate all the same, and decay carries the errors into the moments.
    let Sensitivity { state: roles, update, velocity, l2, is_normalized } = sensitivity(optimizer);
    let rate = if is_normalized { update } else { 0.0 };
    // `is_near` takes a thousandth of the scale.
    let jumps = 1e3 * undecided(optimizer, param, grads, state_error);
    let near = |(&role, value): (&Role, f64)| Near {
        value,
        scale: match role {
            Role::Velocity if is_normalized => velocity,
            Role::Base => rate,
            _ => rate * l2,
        },
    };
    Expected {
        param: Near { value, scale: rate + jumps },
        state: roles.iter().zip(state).map(near).collect(),
    }
}

/// Lists of one parameter, and the relative errors of rounding their elements.
pub(crate) struct Kept {
    pub(crate) lists: Vec<(Role, DType)>,
    /// Relative cost of rounding the parameter and the state over all steps; 0 if they are kept as
    /// computed.
    pub(crate) param_error: f64,
    pub(crate) state_error: f64,
    pub(crate) steps: f64,
}

impl Kept {
    /// The tensors of a parameter under a rule with this state.
    pub(crate) fn new(plan: &Plan, state: &[Role], dtype: DType, steps: u64) -> Self {
        let format = Format::new("reference", dtype, plan.precision(dtype));
        let format = format.expect("a precision of the plan");
        let lists = format.lists(state);
        let alone = lists.len() == 2 + state.len();
        let steps = steps as f64;
        Self {
            lists: lists.iter().map(|list| (list.role, list.dtype)).collect(),
            param_error: if alone { unit(dtype) * steps } else { 0.0 },
            state_error: unit(format.state()) * steps,
            steps,
        }
    }

    /// The values of each list of a parameter, whose bytes are taken off the front of `rest`.
    pub(crate) fn columns(&self, rest: &mut &[u8], param: &ParamDesc) -> Vec<Vec<f64>> {
        let column = |&(_, dtype): &(Role, DType)| {
            let (own, behind) = rest.split_at(param.numel() as usize * dtype.len_bytes());
            *rest = behind;
            values(own, dtype)
        };
        self.lists.iter().map(column).collect()
    }

    /// Whether a value is as near as a few roundings of its dtype, a small share of `near.scale`,
    /// or `coarse` beyond that.
    pub(crate) fn is_near(&self, dtype: DType, found: f64, near: Near, coarse: f64) -> bool {
        let (relative, epsilon) = match dtype {
            DType::F64 => (1e-13, 1e-16 + 1e-11 * near.scale),
            _ => (1e-5, 1e-8 + 1e-3 * near.scale),
        };
        approx::relative_eq!(
            found,
            near.value,
            max_relative = relative + unit(dtype) * self.steps,
            epsilon = epsilon + coarse
        )
    }
}

/// Distances by which rounding may take the tensors of an element-wise rule from the reference.
struct Rounding {
    kept: Kept,
    /// Longest distance that one step moves a parameter.
    update: f64,
    /// The size of a velocity.
    velocity: f64,
    /// Part of the parameter's error that L2 decay carries into the gradient.
    decayed: f64,
}

impl Rounding {
    fn new(plan: &Plan, optimizer: Optimizer, dtype: DType, steps: u64) -> Self {
        let Sensitivity { state, update, velocity, l2, .. } = sensitivity(&optimizer);
        let kept = Kept::new(plan, state, dtype, steps);
        let decayed = PARAM * l2 * kept.param_error;
        Self { kept, update, velocity, decayed }
    }

    fn is_near(&self, role: Role, dtype: DType, found: f64, near: Near) -> bool {
        let Kept { param_error, state_error, steps, .. } = self.kept;
        let coarse = match role {
            Role::Param | Role::Master | Role::Remainder | Role::Base if self.decayed > 0.0 => {
                self.update * steps / 2.0
            }
            // A parameter on its way through zero was rounded at values as large as the updates.
            Role::Param | Role::Master | Role::Remainder | Role::Base => {
                self.update * (10.0 * state_error + steps * param_error)
            }
            Role::Moment1 => 3.0 * GRAD * state_error + self.decayed,
            // A gradient's magnitude takes all of the error that decay carries into it.
            Role::MaxGrad => self.decayed,
            Role::Velocity => self.velocity * (state_error + self.decayed / GRAD),
            _ => GRAD * self.decayed,
        };
        self.kept.is_near(dtype, found, near, coarse)
    }
}

/// Unit in the last place of a 16-bit type, relative to the value. Stochastic rounding may cost a
/// whole unit.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 128.0,
        DType::F16 => 1.0 / 1024.0,
        _ => 0.0,
    }
}

/// The master of a bf16 parameter and its remainder, both given as values.
pub(crate) fn join(param: f64, remainder: f64) -> f64 {
    join_bf16(bf16::from_f64(param).to_bits(), remainder as u16).into()
}

pub(crate) fn values(bytes: &[u8], dtype: DType) -> Vec<f64> {
    fn all<T: bytemuck::AnyBitPattern>(bytes: &[u8], value: impl Fn(T) -> f64) -> Vec<f64> {
        let values = bytes.chunks_exact(size_of::<T>());
        let values = values.map(bytemuck::pod_read_unaligned);
        values.map(value).collect()
    }
    match dtype {
        DType::F64 => all(bytes, |x: f64| x),
        DType::F16 => all(bytes, f16::to_f64),
        DType::BF16 => all(bytes, bf16::to_f64),
        DType::U16 => all(bytes, |x: u16| x.into()),
        _ => all(bytes, |x: f32| x.into()),
    }
}

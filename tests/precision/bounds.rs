//! How far 16-bit formats get from an f64 reference that rounds what is kept in 16 bits, and
//! nothing else.

use fusestep_lamb::reference as lamb;
use fusestep_lars_momentum::reference as lars;
use fusestep_launch::random_bits::{element_word, step_key, tensor_key};
use fusestep_launch::{Format, Master, Rounding};
use fusestep_planner::{Optimizer, Planner, RunAlone, State};
use fusestep_simd::{join_bf16, narrow_bf16_at_random};
use fusestep_tensor::{DType, Role, Trust};
use fusestep_testkit::{Case, ElementState, reference_step, rules};
use half::{bf16, f16};

use crate::rules::ready;
use crate::{cpu, formats, read};

/// Steps after which errors are measured, and the most that they may be there: units in the last
/// place of the format's 16-bit type at the largest magnitude that an element has had.
const BOUNDS: [(u64, f64); 5] = [(1, 1.0), (2, 1.0), (10, 2.0), (100, 4.0), (1000, 8.0)];

/// A tensor under the reference.
struct Reference {
    rule: Optimizer,
    format: Format,
    param: Vec<f64>,
    state: Vec<Vec<f64>>,
}

impl Reference {
    fn step(&mut self, step: u64, grad: &[f64]) {
        self.update(step, grad);
        let Rounding::Stochastic { seed } = self.format.rounding() else {
            return self.round(|_, _| None);
        };
        let key = tensor_key(step_key(seed, step), 0);
        self.round(|element, list| {
            let word = element_word(key, element as u32, 0, list as u32 / 2);
            Some(word >> (16 * (list % 2)))
        });
    }

    /// The rule's own reference, element by element or on the whole tensor.
    fn update(&mut self, step: u64, grad: &[f64]) {
        let (param, state) = (&mut self.param, &mut self.state);
        match &self.rule {
            Optimizer::Lars(rule) => {
                lars::update(rule, Trust::Ratio, param, grad, &mut state[0]);
            }
            Optimizer::Lamb(rule) => {
                let mut tensor = lamb::Tensor {
                    param: param.clone(),
                    moment1: state[0].clone(),
                    moment2: state[1].clone(),
                };
                lamb::update(rule, Trust::Ratio, step, &mut tensor, grad);
                (*param, state[0], state[1]) = (tensor.param, tensor.moment1, tensor.moment2);
            }
            rule => {
                for (at, &g) in grad.iter().enumerate() {
                    let mut own = ElementState::default();
                    for (own, list) in own.iter_mut().zip(&*state) {
                        *own = list[at];
                    }
                    param[at] = reference_step(rule, step, param[at], &mut own, g);
                    for (list, value) in state.iter_mut().zip(own) {
                        list[at] = value;
                    }
                }
            }
        }
    }

    /// Rounds what is kept in 16 bits; `draw` gives the random bits of an element of a list, if it
    /// is rounded at random.
    fn round(&mut self, draw: impl Fn(usize, usize) -> Option<u32>) {
        let alone = self.format.master() == Master::None;
        let param = if alone { self.format.param() } else { DType::F32 };
        let lists = std::iter::once((param, &mut self.param));
        let state = self.state.iter_mut().map(|list| (self.format.state(), list));
        for (list, (dtype, values)) in lists.chain(state).enumerate() {
            for (at, value) in values.iter_mut().enumerate() {
                *value = match (dtype, draw(at, list)) {
                    (DType::F16, _) => f16::from_f64(*value).to_f64(),
                    (DType::BF16, None) => bf16::from_f64(*value).to_f64(),
                    (DType::BF16, Some(draw)) => {
                        bf16::from_bits(narrow_bf16_at_random(*value as f32, draw)).to_f64()
                    }
                    _ => *value,
                };
            }
        }
    }
}

/// A tensor's values in f64.
fn values(state: &State, role: Role, numel: usize) -> Vec<f64> {
    let name = "tensor.0";
    let dtype = state.dtype(role, name).unwrap();
    wide(&read(state, role, name, numel * dtype.len_bytes()), dtype)
}

fn wide(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let all = bytes.chunks_exact(dtype.len_bytes());
    all.map(|bytes| match dtype {
        DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DType::U16 => u16::from_le_bytes([bytes[0], bytes[1]]).into(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
    })
    .collect()
}

/// The parameter as its master, if it has one.
fn param(state: &State, numel: usize) -> Vec<f64> {
    let roles = state.roles("tensor.0").unwrap();
    if roles.contains(&Role::Master) {
        return values(state, Role::Master, numel);
    }
    let own = values(state, Role::Param, numel);
    if !roles.contains(&Role::Remainder) {
        return own;
    }
    let remainders = values(state, Role::Remainder, numel);
    let joined = own.iter().zip(remainders).map(|(&param, remainder)| {
        f64::from(join_bf16(bf16::from_f64(param).to_bits(), remainder as u16))
    });
    joined.collect()
}

/// The largest error in units in the last place of `dtype` at each element's scale; scales grow
/// with the values.
fn worst(found: &[f64], expected: &[f64], scales: &[f64], dtype: DType) -> f64 {
    let digits = if dtype == DType::F16 { 10 } else { 7 };
    let errors = found.iter().zip(expected).zip(scales);
    let units = errors.map(|((found, expected), scale)| {
        let unit = (scale.log2().floor() - f64::from(digits)).exp2();
        (found - expected).abs() / unit
    });
    units.fold(0.0, f64::max)
}

#[test]
fn every_rule_in_every_format_stays_near_the_reference_for_1000_steps() {
    let numel = 67;
    let mut worst_of_all = [0.0f64; BOUNDS.len()];
    let mut far = Vec::new();
    for mut rule in rules() {
        // Where rounding turns the sign of a direction near zero, an element goes 2·lr the other
        // way: less than a unit at this rate.
        if matches!(rule, Optimizer::Lion(_)) {
            rule = rule.with_lr(1e-4);
        }
        for (dtype, precision) in formats() {
            let case = Case::new([numel as u64], dtype);
            let (plan, mut state) = ready(Planner::new(rule).precision(precision), &case);
            let roles = state.roles("tensor.0").unwrap().into_iter();
            let roles: Vec<Role> = roles
                .filter(|role| role.is_state() && !matches!(role, Role::Master | Role::Remainder))
                .collect();
            let start = wide(&case.param_bytes(0), dtype);
            let mut reference = Reference {
                rule,
                format: Format::new("reference", dtype, precision).unwrap(),
                param: start.clone(),
                state: vec![vec![0.0; numel]; roles.len()],
            };
            let mut scales = vec![vec![f64::MIN_POSITIVE; numel]; roles.len() + 1];
            for step in 1..=BOUNDS[BOUNDS.len() - 1].0 {
                let bytes = case.grad_bytes(0, step);
                state.write(&cpu(), Role::Grad, "tensor.0", &bytes).unwrap();
                RunAlone::of(&plan, &mut state, &cpu()).step_all().unwrap();
                reference.step(step, &wide(&bytes, dtype));
                let lists = std::iter::once(&reference.param).chain(&reference.state);
                for (scales, list) in scales.iter_mut().zip(lists.clone()) {
                    for (scale, value) in scales.iter_mut().zip(list) {
                        *scale = scale.max(value.abs());
                    }
                }
                let Some(mark) = BOUNDS.iter().position(|&(at, _)| at == step) else {
                    continue;
                };
                let mut found = vec![param(&state, numel)];
                found.extend(roles.iter().map(|&role| values(&state, role, numel)));
                for ((found, expected), scales) in found.iter().zip(lists).zip(&scales) {
                    let units = worst(found, expected, scales, dtype);
                    worst_of_all[mark] = worst_of_all[mark].max(units);
                    if units > BOUNDS[mark].1 {
                        far.push(format!(
                            "{rule}, {dtype}, {precision}, step {step}: {units:.2} units"
                        ));
                    }
                }
            }
        }
    }
    println!("units at 1, 2, 10, 100, 1000 steps: {worst_of_all:?}");
    assert!(far.is_empty(), "{far:#?}");
    // If nothing were ever rounded apart, the comparison would be with itself.
    assert!(worst_of_all[4] > 0.0);
}

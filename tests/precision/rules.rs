//! Every rule in every format.

use fusestep_launch::{Master, Precision, Rounding, StateDType};
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Optimizer, Plan, Planner, RunAlone, State};
use fusestep_simd::{join_bf16, narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, Gradients, check_at, check_bits, rules};

use crate::{cpu, formats, precision, read};

/// A rule that takes norms sums over chunks; it gets a tensor of two.
fn numels(rule: &Optimizer) -> &'static [u64] {
    match rule {
        Optimizer::Lars(_) | Optimizer::Lamb(_) => &[0, 1, 17, 70_001, 1100],
        _ => &[0, 1, 17, 1100],
    }
}

#[test]
fn every_rule_keeps_its_bits_in_every_format() {
    for rule in rules() {
        for (dtype, precision) in formats() {
            let case = Case::new(numels(&rule).iter().copied(), dtype).with_groups();
            check_at(rule, precision, &case);
        }
    }
}

#[test]
fn extreme_gradients_keep_their_bits_under_every_rule() {
    for rule in rules() {
        for (dtype, precision) in formats() {
            let case = Case::new([1, 33, 700], dtype).with_gradients(Gradients::Extreme);
            check_at(rule, precision, &case);
        }
    }
}

#[test]
fn clipping_and_loss_scaling_keep_their_bits_under_every_rule() {
    for rule in rules() {
        for (dtype, precision) in formats() {
            let case = Case::new([0, 1, 17, 1100], dtype);
            let bits = |max_norm: f64| {
                check_bits(rule, &case, &|planner| {
                    let planner = planner.precision(precision);
                    let planner = planner.with(ClipByGlobalNorm::new(max_norm));
                    planner.with(LossScaling::fixed(4.0))
                })
            };
            assert!(bits(1e-3) != bits(1e9), "{rule}, {dtype}, {precision}");
        }
    }
}

/// A plan of a case with its state before the first step.
pub(crate) fn ready(planner: Planner, case: &Case) -> (Plan, State) {
    let plan = planner.plan(&case.params).unwrap();
    let mut state = plan.allocate(&cpu()).unwrap();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state.write(&cpu(), Role::Param, &param.name, &bytes).unwrap();
    }
    (plan, state)
}

/// The bytes of a tensor in all its lists but the gradient.
fn snapshot(state: &State, case: &Case) -> Vec<(Role, Vec<u8>)> {
    let mut all = Vec::new();
    for param in &case.params {
        for role in state.roles(&param.name).unwrap() {
            let width = state.dtype(role, &param.name).unwrap().len_bytes();
            let bytes = read(state, role, &param.name, param.numel() as usize * width);
            all.extend((role != Role::Grad).then_some((role, bytes)));
        }
    }
    all
}

#[test]
fn an_overflow_leaves_every_bit_of_parameters_masters_remainders_and_state() {
    for rule in rules() {
        for (dtype, precision) in formats() {
            let case = Case::new([3, 1100], dtype);
            let planner = Planner::new(rule).precision(precision);
            let planner = planner.with(ClipByGlobalNorm::new(1.0));
            let (plan, mut state) = ready(planner.with(LossScaling::dynamic()), &case);
            let mut step = |infinite: bool, number: u64| {
                for (index, param) in case.params.iter().enumerate() {
                    let scale = state.loss_scale().unwrap().scale();
                    let mut bytes = scaled(&case.grad_bytes(index, number), dtype, scale);
                    if infinite && index == 1 {
                        let at = bytes.len() - dtype.len_bytes();
                        let infinity: &[u8] = match dtype {
                            DType::F16 => &[0, 0x7c],
                            DType::BF16 => &[0x80, 0x7f],
                            _ => &[0, 0, 0x80, 0x7f],
                        };
                        bytes[at..].copy_from_slice(infinity);
                    }
                    state.write(&cpu(), Role::Grad, &param.name, &bytes).unwrap();
                }
                let report = RunAlone::of(&plan, &mut state, &cpu()).step_all().unwrap();
                assert_eq!(report.skipped, infinite, "{rule}, {dtype}, {precision}: {report:?}");
                snapshot(&state, &case)
            };
            let before = step(false, 1);
            let skipped = step(true, 2);
            assert!(before == skipped, "{rule}, {dtype}, {precision}");
            assert!(skipped != step(false, 3), "{rule}, {dtype}, {precision}");
        }
    }
}

/// The values times a power of two.
fn scaled(bytes: &[u8], dtype: DType, scale: f64) -> Vec<u8> {
    let scale = scale as f32;
    match dtype {
        DType::F32 => {
            let values = bytes.chunks_exact(4);
            let values = values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * scale);
            values.flat_map(f32::to_le_bytes).collect()
        }
        _ => {
            let values = widened(bytes, dtype);
            let values = values.chunks_exact(4);
            let values = values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * scale);
            let narrowed = values.map(|value| match dtype {
                DType::F16 => narrow_f16(value),
                _ => narrow_bf16(value),
            });
            narrowed.flat_map(u16::to_le_bytes).collect()
        }
    }
}

/// Values of a 16-bit type as those of f32.
fn widened(bytes: &[u8], dtype: DType) -> Vec<u8> {
    let wide = bytes.chunks_exact(2).flat_map(|bytes| {
        let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
        let value = match dtype {
            DType::F16 => widen_f16(bits),
            _ => widen_bf16(bits),
        };
        value.to_le_bytes()
    });
    wide.collect()
}

/// So every bound of the f32 rule holds for masters, and norms are the masters'.
#[test]
fn a_master_with_its_state_is_the_f32_rule_on_the_widened_gradients_bit_for_bit() {
    for rule in rules() {
        for (dtype, master) in [
            (DType::F16, Master::F32),
            (DType::BF16, Master::F32),
            (DType::BF16, Master::Remainder),
        ] {
            let case = Case::new([1, 1100], dtype);
            let of = precision(master, StateDType::Compute, Rounding::Nearest);
            let (plan, mut state) = ready(Planner::new(rule).precision(of), &case);
            let wide_case = Case::new([1, 1100], DType::F32);
            let (wide_plan, mut wide) = ready(Planner::new(rule), &wide_case);
            for (index, param) in case.params.iter().enumerate() {
                let bytes = widened(&case.param_bytes(index), dtype);
                wide.write(&cpu(), Role::Param, &param.name, &bytes).unwrap();
            }
            for step in 1..=100 {
                for (index, param) in case.params.iter().enumerate() {
                    let bytes = case.grad_bytes(index, step);
                    state.write(&cpu(), Role::Grad, &param.name, &bytes).unwrap();
                    let bytes = widened(&bytes, dtype);
                    wide.write(&cpu(), Role::Grad, &param.name, &bytes).unwrap();
                }
                RunAlone::of(&plan, &mut state, &cpu()).step_all().unwrap();
                RunAlone::of(&wide_plan, &mut wide, &cpu()).step_all().unwrap();
                for param in &case.params {
                    same_values(&state, &wide, &param.name, dtype);
                }
            }
        }
    }
}

/// Requires the master, or what parameter and remainder make, and all state to be the f32 tensors
/// of `wide`.
fn same_values(state: &State, wide: &State, name: &str, dtype: DType) {
    let numel = wide.param::<f32>(name).unwrap().len();
    for role in wide.roles(name).unwrap() {
        let expected = wide.view::<f32>(role, name).unwrap();
        let own = read(state, Role::Param, name, 2 * numel);
        let own = own.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let found: Vec<f32> = match role {
            Role::Grad => continue,
            Role::Param if state.roles(name).unwrap().contains(&Role::Remainder) => {
                let remainders = state.view::<u16>(Role::Remainder, name).unwrap();
                own.zip(remainders).map(|(param, &remainder)| join_bf16(param, remainder)).collect()
            }
            Role::Param => {
                let masters = state.view::<f32>(Role::Master, name).unwrap();
                for (param, &master) in own.zip(masters) {
                    let rounded = match dtype {
                        DType::F16 => narrow_f16(master),
                        _ => narrow_bf16(master),
                    };
                    assert_eq!(param, rounded);
                }
                masters.to_vec()
            }
            state_role => state.view::<f32>(state_role, name).unwrap().to_vec(),
        };
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&found) == bits(expected), "{role} of `{name}`, {dtype}");
    }
}

#[test]
fn bad_tensors_are_refused_by_name_under_every_rule() {
    for rule in rules() {
        let case = Case::new([4], DType::BF16);
        let of = precision(Master::F32, StateDType::Compute, Rounding::Nearest);
        let (_, mut state) = ready(Planner::new(rule).precision(of), &case);
        let before = snapshot(&state, &case);
        let short = state.write(&cpu(), Role::Master, "tensor.0", &[0; 12]);
        let text = short.unwrap_err().to_string();
        assert!(text.contains("tensor.0") && text.contains("16") && text.contains("12"), "{text}");
        let wrong = state.grad_mut::<f32>("tensor.0").map(drop).unwrap_err();
        let text = wrong.to_string();
        assert!(
            text.contains("tensor.0") && text.contains("bf16") && text.contains("f32"),
            "{text}"
        );
        assert!(snapshot(&state, &case) == before);
        let mut twice = case.clone();
        twice.params.push(twice.params[0].clone());
        let error = Planner::new(rule).precision(of).plan(&twice.params);
        assert!(error.unwrap_err().to_string().contains("tensor.0"));
        for (dtype, refused) in [
            (DType::F16, Precision { master: Master::Remainder, ..of }),
            (DType::F32, of),
            (DType::F64, Precision { state: StateDType::Bf16, ..Precision::default() }),
        ] {
            let case = Case::new([4], dtype);
            let error = Planner::new(rule).precision(refused).plan(&case.params);
            let text = error.unwrap_err().to_string();
            assert!(text.starts_with("`tensor.0`: "), "{text}");
        }
    }
}

//! Lists of mixed dtypes: bits beside those of the plain entries, cuts, what was before, errors.

use std::num::NonZeroUsize;

use fusestep_fused_adam::{
    Adam, AdamBefore, AdamTensors, BiasCorrection, CodedAdamTensors, CodedState, Floats, FloatsMut,
    MixedAdamTensors, MixedStep, ParamSlices, SecondMoment, StateMut, WeightDecay, units_of,
};
use fusestep_simd::Pool;
use half::{bf16, f16};

/// Lengths around a lane, a group, a block and what a thread is woken for.
const NUMELS: [usize; 9] = [0, 1, 31, 33, 1000, 2048, 2049, 40_000, 70_001];

fn values(numel: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..numel).map(|_| next()).collect()
}

fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|&x| f16::from_f32(x)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn settings() -> [Adam; 3] {
    let amsgrad = SecondMoment::Largest;
    [
        Adam { lr: 0.01, ..Adam::default() },
        Adam { lr: 0.01, weight_decay: WeightDecay::L2(0.1), ..Adam::default() },
        Adam { lr: 0.01, second_moment: amsgrad, ..Adam::default() },
    ]
}

fn pool() -> Pool {
    Pool::new(NonZeroUsize::new(3).unwrap())
}

/// Parameter and moments in f32.
#[derive(Clone, Debug, PartialEq)]
struct Plain {
    param: Vec<f32>,
    moments: [Vec<f32>; 3],
}

impl Plain {
    fn new(numel: usize) -> Self {
        let zeros = vec![0.0; numel];
        Self { param: values(numel, 7), moments: [zeros.clone(), zeros.clone(), zeros] }
    }

    fn step(&mut self, adam: &Adam, step: u64, grad: &[f32]) {
        let [moment1, moment2, max] = &mut self.moments;
        let is_largest = adam.second_moment == SecondMoment::Largest;
        let max_moment2 = is_largest.then_some(max.as_mut_slice());
        let param = &mut self.param;
        let tensor = AdamTensors { param, grad, moment1, moment2, max_moment2 };
        adam.step(step, &mut [tensor]).unwrap();
    }

    fn mixed<'a>(
        &'a mut self,
        adam: &Adam,
        step: u64,
        grad: Floats<'a>,
        copy: Option<FloatsMut<'a>>,
    ) -> MixedAdamTensors<'a> {
        let [moment1, moment2, max] = &mut self.moments;
        let is_largest = adam.second_moment == SecondMoment::Largest;
        MixedAdamTensors {
            step,
            param: self.param[..].as_mut().into(),
            grad,
            moment1: moment1[..].as_mut().into(),
            moment2: moment2[..].as_mut().into(),
            max_moment2: is_largest.then(|| max[..].as_mut().into()),
            copy,
            before: None,
        }
    }
}

#[test]
fn masters_step_as_f32_on_widened_gradients_and_copies_are_rounded_once() {
    let pool = pool();
    let how = MixedStep { pool: Some(&pool), ..MixedStep::default() };
    for adam in settings() {
        for numel in NUMELS {
            let (mut plain, mut own) = (Plain::new(numel), Plain::new(numel));
            let (mut narrow, mut half) = (vec![bf16::ZERO; numel], vec![f16::ZERO; numel]);
            for step in 1..=4 {
                let grad = values(numel, 100 + step);
                let (grad16, grad_half) = (to_bf16(&grad), to_f16(&grad));
                let (list, copy): (Floats<'_>, Option<FloatsMut<'_>>) = match step % 4 {
                    0 => (grad[..].into(), None),
                    1 => (grad16[..].into(), Some(narrow[..].as_mut().into())),
                    2 => (grad_half[..].into(), Some(half[..].as_mut().into())),
                    _ => (grad[..].into(), Some(narrow[..].as_mut().into())),
                };
                let widened: Vec<f32> = match step % 4 {
                    1 => grad16.iter().map(|x| x.to_f32()).collect(),
                    2 => grad_half.iter().map(|x| x.to_f32()).collect(),
                    _ => grad.clone(),
                };
                plain.step(&adam, step, &widened);
                adam.step_mixed(how, vec![own.mixed(&adam, step, list, copy)]).unwrap();
                assert_eq!(bits(&own.param), bits(&plain.param), "{numel} elements, step {step}");
                assert_eq!(own, plain);
                match step % 4 {
                    1 | 3 => assert_eq!(narrow, to_bf16(&plain.param)),
                    2 => assert_eq!(half, to_f16(&plain.param)),
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn parameters_of_16_bits_step_as_by_their_own_kernel() {
    let (adam, numel) = (Adam { lr: 0.01, ..Adam::default() }, 5_000);
    let start = to_bf16(&values(numel, 3));
    let (mut native, mut wide) = (start.clone(), start);
    let mut of_native = [vec![0.0f32; numel], vec![0.0; numel]];
    let mut of_wide = of_native.clone();
    for step in 1..=3 {
        let grad = to_bf16(&values(numel, 50 + step));
        let widened: Vec<f32> = grad.iter().map(|x| x.to_f32()).collect();
        for (param, grad, [m, v]) in [
            (&mut native, Floats::from(&grad[..]), &mut of_native),
            (&mut wide, Floats::from(&widened[..]), &mut of_wide),
        ] {
            let tensor = MixedAdamTensors {
                step,
                param: param[..].as_mut().into(),
                grad,
                moment1: m[..].as_mut().into(),
                moment2: v[..].as_mut().into(),
                max_moment2: None,
                copy: None,
                before: None,
            };
            adam.step_mixed(MixedStep::default(), vec![tensor]).unwrap();
        }
        assert_eq!(native, wide, "step {step}");
        assert_eq!(of_native, of_wide);
    }
    assert_ne!(native, to_bf16(&values(numel, 3)));
}

#[test]
fn state_of_f16_is_rounded_once_a_step() {
    let (adam, numel) = (Adam { lr: 0.01, ..Adam::default() }, 2_500);
    let mut param = to_f16(&values(numel, 3));
    let mut m = vec![f16::ZERO; numel];
    let mut v = m.clone();
    for step in 1..=3 {
        let grad = to_f16(&values(numel, 60 + step));
        let mut plain = Plain::new(numel);
        plain.param = param.iter().map(|x| x.to_f32()).collect();
        plain.moments[0] = m.iter().map(|x| x.to_f32()).collect();
        plain.moments[1] = v.iter().map(|x| x.to_f32()).collect();
        let widened: Vec<f32> = grad.iter().map(|x| x.to_f32()).collect();
        plain.step(&adam, step, &widened);
        let tensor = MixedAdamTensors {
            step,
            param: param[..].as_mut().into(),
            grad: grad[..].into(),
            moment1: m[..].as_mut().into(),
            moment2: v[..].as_mut().into(),
            max_moment2: None,
            copy: None,
            before: None,
        };
        adam.step_mixed(MixedStep::default(), vec![tensor]).unwrap();
        assert_eq!(param, to_f16(&plain.param), "step {step}");
        assert_eq!(m, to_f16(&plain.moments[0]));
        assert_eq!(v, to_f16(&plain.moments[1]));
    }
}

#[test]
fn state_in_codes_steps_as_by_the_coded_entry() {
    let adam = Adam { lr: 0.01, ..Adam::default() };
    let pool = pool();
    for numel in NUMELS {
        let mut params = [values(numel, 3), values(numel, 3)];
        let mut codes = [[vec![0u8; numel], vec![0; numel]], [vec![0; numel], vec![0; numel]]];
        let units = vec![0.0f32; units_of(numel)];
        let mut units = [[units.clone(), units.clone()], [units.clone(), units]];
        let mut copy = vec![bf16::ZERO; numel];
        for step in 1..=3 {
            let grad = to_bf16(&values(numel, 70 + step));
            let widened: Vec<f32> = grad.iter().map(|x| x.to_f32()).collect();
            let [plain, own] = &mut params;
            let [[m, v], [own_m, own_v]] = &mut codes;
            let [[m_units, v_units], [own_m_units, own_v_units]] = &mut units;
            let tensor = CodedAdamTensors {
                param: ParamSlices::F32 { param: plain, grad: &widened },
                moment1: CodedState { codes: m, units: m_units },
                moment2: CodedState { codes: v, units: v_units },
                max_moment2: None,
            };
            adam.step_coded(step, &mut [tensor]).unwrap();
            let tensor = MixedAdamTensors {
                step,
                param: own[..].as_mut().into(),
                grad: grad[..].into(),
                moment1: CodedState { codes: own_m, units: own_m_units }.into(),
                moment2: CodedState { codes: own_v, units: own_v_units }.into(),
                max_moment2: None,
                copy: Some(copy[..].as_mut().into()),
                before: None,
            };
            let how = MixedStep { pool: Some(&pool), ..MixedStep::default() };
            adam.step_mixed(how, vec![tensor]).unwrap();
            assert_eq!(bits(own), bits(plain), "{numel} elements, step {step}");
            assert_eq!(copy, to_bf16(plain));
        }
        assert_eq!(codes[0], codes[1]);
        assert_eq!(units[0], units[1]);
    }
}

#[test]
fn lists_before_a_step_are_kept_to_the_bit() {
    let pool = pool();
    for adam in settings() {
        for numel in NUMELS {
            let mut own = Plain::new(numel);
            own.step(&adam, 1, &values(numel, 11));
            let start = own.clone();
            let mut kept = Plain::new(numel);
            let grad = to_bf16(&values(numel, 12));
            let mut tensor = own.mixed(&adam, 2, grad[..].into(), None);
            let [m, v, max] = &mut kept.moments;
            tensor.before = Some(AdamBefore {
                param: kept.param[..].as_mut().into(),
                moment1: m[..].as_mut().into(),
                moment2: v[..].as_mut().into(),
                max_moment2: tensor.max_moment2.is_some().then(|| max[..].as_mut().into()),
            });
            let how = MixedStep { pool: Some(&pool), ..MixedStep::default() };
            adam.step_mixed(how, vec![tensor]).unwrap();
            assert_eq!(kept, start, "{numel} elements");
            assert!(numel == 0 || own != start);
        }
    }
}

#[test]
fn without_bias_correction_the_first_step_divides_by_the_moments_as_they_are() {
    let adam = Adam { lr: 0.1, weight_decay: WeightDecay::L2(0.0), ..Adam::default() };
    let mut own = Plain::new(1);
    own.param = vec![1.0];
    let grad = [0.5f32];
    let how = MixedStep { bias_correction: BiasCorrection::Off, ..MixedStep::default() };
    adam.step_mixed(how, vec![own.mixed(&adam, 1, grad[..].into(), None)]).unwrap();
    let (m, v) = (0.1f64 * 0.5, 0.001f64 * 0.25);
    let expected = 1.0 - 0.1 * m / (v.sqrt() + 1e-8);
    assert!((f64::from(own.param[0]) - expected).abs() < 1e-6, "{} {expected}", own.param[0]);
    let mut corrected = Plain::new(1);
    corrected.param = vec![1.0];
    corrected.step(&adam, 1, &grad);
    assert!((corrected.param[0] - 0.9).abs() < 1e-6);
}

#[test]
fn a_factor_on_gradients_is_that_of_scaled_gradients() {
    let (adam, numel) = (Adam::default(), 3_000);
    let (mut plain, mut own) = (Plain::new(numel), Plain::new(numel));
    let grad = values(numel, 5);
    let scaled: Vec<f32> = grad.iter().map(|g| g * 0.25).collect();
    plain.step(&adam, 1, &scaled);
    let how = MixedStep { grad_factor: 0.25, ..MixedStep::default() };
    adam.step_mixed(how, vec![own.mixed(&adam, 1, grad[..].into(), None)]).unwrap();
    assert_eq!(own, plain);
}

/// The error of a step with one defect, and a look that nothing has changed.
fn refused(defect: impl FnOnce(&mut MixedAdamTensors<'_>), how: MixedStep<'_>) -> String {
    let adam = Adam::default();
    let (mut own, mut other) = (Plain::new(40), Plain::new(40));
    let (start, start_of_other) = (own.clone(), other.clone());
    let grad = values(40, 5);
    let mut tensor = own.mixed(&adam, 1, grad[..].into(), None);
    defect(&mut tensor);
    let good = other.mixed(&adam, 1, grad[..].into(), None);
    let error = adam.step_mixed(how, vec![good, tensor]).unwrap_err().to_string();
    assert_eq!((own, other), (start, start_of_other));
    error
}

#[test]
fn defects_are_named_and_nothing_is_written() {
    let plain = MixedStep::default();
    let short: &[f32] = &[0.0; 3];
    let found = refused(|tensor| tensor.grad = short.into(), plain);
    assert_eq!(found, "grad of tensor 1: expected 40 elements, found 3");
    let found = refused(|tensor| tensor.step = 0, plain);
    assert_eq!(found, "step: expected at least 1, found 0; steps count from 1");
    let wide = vec![0.0f32; 40].leak();
    let found = refused(|tensor| tensor.copy = Some(wide.into()), plain);
    assert_eq!(found, "copy of tensor 1: expected bf16 or f16, found f32");
    let narrow = vec![bf16::ZERO; 40].leak();
    let found = refused(|tensor| tensor.moment2 = StateMut::from(narrow), plain);
    assert_eq!(found, "moment2 of tensor 1: expected f32, found bf16");
    let both = |tensor: &mut MixedAdamTensors<'_>| {
        tensor.param = vec![bf16::ZERO; 40].leak().into();
        tensor.copy = Some(vec![bf16::ZERO; 40].leak().into());
    };
    let expected = "copy of tensor 1: expected none, since the parameter is not f32, found bf16";
    assert_eq!(refused(both, plain), expected);
    let max = vec![0.0f32; 40].leak();
    let found = refused(|tensor| tensor.max_moment2 = Some(max.into()), plain);
    assert_eq!(
        found,
        "max_moment2 of tensor 1: expected none, because the second moment is `Running`, found a \
         list"
    );
    let infinite = MixedStep { grad_factor: f64::INFINITY, ..plain };
    let found = refused(|_| {}, infinite);
    assert_eq!(found, "factor on gradients: expected a finite number, found inf");
    let coded = |tensor: &mut MixedAdamTensors<'_>| {
        let codes = |units| CodedState { codes: vec![0; 40].leak(), units };
        tensor.moment1 = codes(vec![0.0; 1].leak()).into();
        tensor.moment2 = codes(vec![0.0; 2].leak()).into();
    };
    let expected = "units of moment1 of tensor 1: expected 2, one per 32 elements, found 1";
    assert_eq!(refused(coded, plain), expected);
}

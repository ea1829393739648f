//! State in int8 by the facade's settings: the bits of a step on slices.

use fusestep::fused_adam::{Adam, CodedAdamTensors, CodedState, ParamSlices, units_of};
use fusestep::{AdamW, Cpu, DType, ParamDesc, Precision, Role, Shape, StateDType};

const NUMEL: usize = 4_129;

fn values(seed: usize) -> Vec<f32> {
    (0..NUMEL).map(|at| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
}

#[test]
fn adamw_of_the_facade_has_the_bits_of_a_step_on_slices() {
    let desc = |name| ParamDesc::new(name, Shape::new([NUMEL as u64]).unwrap(), DType::F32);
    let precision = Precision { state: StateDType::Int8, ..Precision::default() };
    let builder = AdamW::new(1e-2).precision(precision);
    let builder = builder.options(|options| options.keep_f32 = vec!["wide".to_owned()]);
    let mut opt = builder.build(&[desc("codes"), desc("wide")], Cpu::new()).unwrap();
    let (mut param, mut codes) = (values(0), [vec![0; NUMEL], vec![0; NUMEL]]);
    let mut units = [vec![0.0; units_of(NUMEL)], vec![0.0; units_of(NUMEL)]];
    for name in ["codes", "wide"] {
        opt.set_param(name, &param).unwrap();
    }
    for step in 1..=3 {
        let grad = values(step);
        opt.push_grad("codes", &grad).unwrap();
        opt.push_grad("wide", &grad).unwrap();
        opt.step().unwrap();
        let [moment1, moment2] = &mut codes;
        let [unit1, unit2] = &mut units;
        let tensors = CodedAdamTensors {
            param: ParamSlices::F32 { param: &mut param, grad: &grad },
            moment1: CodedState { codes: moment1, units: unit1 },
            moment2: CodedState { codes: moment2, units: unit2 },
            max_moment2: None,
        };
        let adam = Adam { lr: 1e-2, ..Adam::default() };
        adam.step_coded(step as u64, &mut [tensors]).unwrap();
    }
    assert!(opt.param::<f32>("codes").unwrap() == param);
    assert!(opt.param::<f32>("wide").unwrap() != param);
    let state = opt.state();
    for (role, (codes, units)) in
        [Role::Moment1, Role::Moment2].into_iter().zip(codes.iter().zip(&units))
    {
        assert!(state.view::<u8>(role, "codes").unwrap() == codes);
        assert!(state.view::<f32>(role.units().unwrap(), "codes").unwrap() == units);
        assert_eq!(state.dtype(role, "wide").unwrap(), DType::F32);
    }
}

//! What a model is evaluated with under Schedule-Free: the rule's own average, the same bits on one
//! rank and on many, and training does not notice that it was asked for.

use fusestep::schedule_free::ScheduleFreeTensors;
use fusestep::{
    Cpu, DType, Error, Master, ParamDesc, Precision, Role, ScheduleFree, Session, Shape, StateDType,
};

const NAMES: [&str; 3] = ["wide", "empty", "small"];
const NUMELS: [usize; 3] = [5003, 0, 17];
const STEPS: usize = 5;

fn params(dtype: DType) -> Vec<ParamDesc> {
    let named = NAMES.iter().zip(NUMELS);
    let describe = |(name, numel): (&&str, usize)| {
        ParamDesc::new(*name, Shape::new([numel as u64]).unwrap(), dtype)
    };
    named.map(describe).collect()
}

/// Powers of two, so that means over ranks are exact.
fn grad(param: usize, step: usize, at: usize) -> f32 {
    let exponent = (at * 7 + step * 3 + param) % 11;
    let sign = if (at + step).is_multiple_of(3) { -1.0 } else { 1.0 };
    sign * (exponent as f32 - 10.0).exp2()
}

/// The parameters and their averages after some steps, asked for after each of them or at the end.
fn run(opt: &mut Session<'_>, dtype: DType, every_step: bool) -> Result<[Vec<Vec<u8>>; 2], Error> {
    for step in 1..=STEPS {
        for (param, (name, numel)) in NAMES.iter().zip(NUMELS).enumerate() {
            let values = (0..numel).map(|at| grad(param, step, at));
            match dtype {
                DType::BF16 => {
                    let values: Vec<_> = values.map(half::bf16::from_f32).collect();
                    opt.push_grad(name, &values)?;
                }
                DType::F64 => opt.push_grad(name, &values.map(f64::from).collect::<Vec<_>>())?,
                _ => opt.push_grad(name, &values.collect::<Vec<_>>())?,
            }
        }
        opt.step()?;
        if every_step {
            opt.gather_averages(&NAMES)?;
        }
    }
    let bytes = |gathered: &fusestep::GatheredParams| {
        let all = 0..NAMES.len();
        all.map(|at| gathered.bytes(at).to_vec()).collect::<Vec<_>>()
    };
    let params = bytes(&opt.gather(&NAMES)?);
    Ok([params, bytes(&opt.gather_averages(&NAMES)?)])
}

fn builder(precision: Precision) -> fusestep::Builder<fusestep::kinds::ScheduleFree> {
    ScheduleFree::new(0.05).settings(|rule| rule.warmup_steps = 2).precision(precision)
}

/// Every way to keep a parameter that its average is computed from in a way of its own.
fn formats() -> [(DType, Precision); 6] {
    let of = |master, state| Precision { master, state, ..Precision::default() };
    [
        (DType::F32, Precision::default()),
        (DType::F64, Precision::default()),
        (DType::BF16, Precision::default()),
        (DType::BF16, of(Master::F32, StateDType::Compute)),
        (DType::BF16, of(Master::Remainder, StateDType::Bf16)),
        (DType::F32, of(Master::None, StateDType::Bf16)),
    ]
}

#[test]
fn averages_are_the_same_bits_at_every_stage_and_leave_training_alone() {
    for (dtype, precision) in formats() {
        let alone = || builder(precision).build(&params(dtype), Cpu::new());
        let expected = run(&mut alone().unwrap(), dtype, false).unwrap();
        assert!(expected[0] != expected[1], "{dtype}: y is not x");
        let asked = run(&mut alone().unwrap(), dtype, true).unwrap();
        assert!(asked == expected, "{dtype}, {precision}: asking changed it");
        for zero in 0..=3 {
            for ranks in [1, 2, 4] {
                let found = fusestep::threads(ranks, |comm| {
                    let built = builder(precision).zero(zero).on(comm);
                    run(&mut built.build(&params(dtype), Cpu::new())?, dtype, true)
                });
                for found in found.unwrap() {
                    let text = format!("{dtype}, {precision}, ZeRO {zero}, {ranks} ranks");
                    assert!(found == expected, "{text}");
                }
            }
        }
    }
}

#[test]
fn the_average_of_a_plan_is_that_of_slices() {
    let mut opt = builder(Precision::default()).build(&params(DType::F32), Cpu::new()).unwrap();
    let [_, averages] = run(&mut opt, DType::F32, false).unwrap();
    let rule =
        fusestep::schedule_free::ScheduleFree { lr: 0.05, warmup_steps: 2, ..Default::default() };
    for (param, numel) in NUMELS.into_iter().enumerate() {
        let (mut y, mut v, mut z) = (vec![0.0f32; numel], vec![0.0; numel], vec![0.0; numel]);
        for step in 1..=STEPS {
            let grad: Vec<f32> = (0..numel).map(|at| grad(param, step, at)).collect();
            let tensor =
                ScheduleFreeTensors { param: &mut y, grad: &grad, moment2: &mut v, base: &mut z };
            rule.step(step as u64, &mut [tensor]).unwrap();
        }
        let mut x = vec![0.0; numel];
        rule.average(&y, &z, &mut x).unwrap();
        let x: Vec<u8> = x.into_iter().flat_map(f32::to_le_bytes).collect();
        assert!(x == averages[param], "{}", NAMES[param]);
    }
}

#[test]
fn before_the_first_step_and_under_other_rules_it_is_the_parameter() {
    let all = params(DType::F32);
    let mut opt = builder(Precision::default()).build(&all, Cpu::new());
    let opt = opt.as_mut().unwrap();
    opt.set_param("small", &[0.5f32; 17]).unwrap();
    let bytes = 0.5f32.to_le_bytes().repeat(17);
    assert_eq!(opt.gather_averages(&["small"]).unwrap().bytes(0), bytes);
    let mut adam = fusestep::AdamW::new(0.1).build(&all, Cpu::new()).unwrap();
    let [params, averages] = run(&mut adam, DType::F32, false).unwrap();
    assert!(params == averages);
    let error = adam.state().dtype(Role::Base, "small");
    let text = error.unwrap_err().to_string();
    assert!(text.contains("small") && text.contains("Schedule-Free"), "{text}");
}

//! Variables while a model is evaluated: averages under Schedule-Free, themselves under any other
//! rule, and the bits of training afterwards, whatever happened meanwhile.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use fusestep_candle::{
    Fused, Master, Options, Params, ParamsAdagrad, ParamsScheduleFree, Precision, ScheduleFree,
};
use fusestep_tensor::Role;

const NUMELS: [usize; 4] = [1, 0, 17, 70_001];

fn vars(dtype: DType) -> Vec<(String, Var)> {
    let var = |(index, &numel): (usize, &usize)| {
        let values: Vec<f32> = (0..numel).map(|at| (at % 13) as f32 * 0.125 - 0.5).collect();
        let values = Tensor::new(values, &Device::Cpu).unwrap();
        let var = Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap();
        (format!("v{index}"), var)
    };
    NUMELS.iter().enumerate().map(var).collect()
}

fn grads(vars: &[(String, Var)], step: usize) -> GradStore {
    let mut store = GradStore::default();
    for (_, var) in vars {
        let of = |at: usize| ((at * 7 + step * 5) % 11) as f32 * 0.25 - 1.0;
        let values: Vec<f32> = (0..var.elem_count()).map(of).collect();
        let grad = Tensor::new(values, &Device::Cpu).unwrap();
        store.insert(var, grad.to_dtype(var.dtype()).unwrap());
    }
    store
}

fn values(vars: &[(String, Var)]) -> Vec<Vec<f32>> {
    let of = |(_, var): &(String, Var)| var.to_dtype(DType::F32)?.to_vec1();
    vars.iter().map(of).collect::<Result<_, _>>().unwrap()
}

fn trained<P: Params>(
    vars: &[(String, Var)],
    params: P,
    precision: Precision,
    evaluated: bool,
) -> Fused<'static, P> {
    let options = Options { precision, ..Options::default() };
    let mut optimizer = Fused::with_options(vars.to_vec(), params, &options).unwrap();
    for step in 1..=4 {
        optimizer.step(&grads(vars, step)).unwrap();
        if evaluated {
            optimizer.evaluate(|| Ok(())).unwrap();
        }
    }
    optimizer
}

fn schedule_free() -> ParamsScheduleFree {
    ParamsScheduleFree { lr: 0.05, ..ParamsScheduleFree::default() }
}

#[test]
fn schedule_free_is_evaluated_at_the_average() {
    let vars = vars(DType::F32);
    let mut optimizer = trained(&vars, schedule_free(), Precision::default(), false);
    let (param, mut average) = (values(&vars), Vec::new());
    optimizer
        .evaluate(|| {
            average = values(&vars);
            Ok(())
        })
        .unwrap();
    for (index, param) in param.iter().enumerate() {
        let base = optimizer.moment(Role::Base, &format!("v{index}")).unwrap();
        let mut expected = vec![0.0; param.len()];
        schedule_free().average(param, &base.to_vec1().unwrap(), &mut expected).unwrap();
        assert_eq!(average[index], expected);
        assert!(param.is_empty() || average[index] != *param);
    }
    assert_eq!(values(&vars), param);
}

#[test]
fn an_evaluation_after_another_has_the_same_average() {
    let vars = vars(DType::F32);
    let mut optimizer = trained(&vars, schedule_free(), Precision::default(), false);
    let before = values(&vars);
    // After a panic, too.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        optimizer.evaluate(|| -> candle_core::Result<()> { panic!("on purpose") })
    }));
    assert!(panicked.is_err());
    let first = optimizer.evaluate(|| Ok(values(&vars))).unwrap();
    let second = optimizer.evaluate(|| Ok(values(&vars))).unwrap();
    assert!(first == second && first != before);
    assert_eq!(values(&vars), before);
}

#[test]
fn training_does_not_notice_that_it_was_evaluated() {
    let master = |master| Precision { master, ..Precision::default() };
    for (dtype, precision) in [
        (DType::F32, Precision::default()),
        (DType::F64, Precision::default()),
        (DType::BF16, Precision::default()),
        (DType::BF16, master(Master::F32)),
        (DType::BF16, master(Master::Remainder)),
        (DType::F16, master(Master::F32)),
    ] {
        let (often, never) = (vars(dtype), vars(dtype));
        trained(&often, schedule_free(), precision, true);
        trained(&never, schedule_free(), precision, false);
        assert_eq!(values(&often), values(&never), "{dtype:?} {precision:?}");
    }
}

#[test]
fn variables_come_back_after_an_error_and_a_panic() {
    let vars = vars(DType::F32);
    let mut optimizer = trained(&vars, schedule_free(), Precision::default(), false);
    let before = values(&vars);
    let failed = optimizer.evaluate(|| -> candle_core::Result<()> {
        vars[0].1.set(&Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
        candle_core::bail!("on purpose")
    });
    assert!(failed.unwrap_err().to_string().contains("on purpose"));
    assert_eq!(values(&vars), before);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        optimizer.evaluate(|| -> candle_core::Result<()> { panic!("on purpose") })
    }));
    assert!(panicked.is_err());
    assert_eq!(values(&vars), before);
}

#[test]
fn other_rules_and_untrained_variables_are_evaluated_as_they_are() {
    let vars = vars(DType::F32);
    let mut fresh = ScheduleFree::new(vars.clone(), schedule_free()).unwrap();
    let mut adagrad = trained(&vars, ParamsAdagrad::default(), Precision::default(), false);
    let before = values(&vars);
    for evaluated in [fresh.evaluate(|| Ok(values(&vars))), adagrad.evaluate(|| Ok(values(&vars)))]
    {
        assert_eq!(evaluated.unwrap(), before);
    }
}

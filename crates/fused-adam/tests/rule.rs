//! Settings that the rule refuses, and slices beside the reference.

use std::num::NonZeroUsize;

use fusestep_elementwise::Compute;
use fusestep_fused_adam::{Adam, AdamTensors, Objective, SecondMoment, WeightDecay, reference};
use fusestep_launch::{Precision, UpdateRule};
use fusestep_simd::Pool;
use fusestep_tensor::DType;

#[test]
fn hyper_parameters_out_of_range_are_named() {
    let good = Adam::default();
    for (bad, message) in [
        (Adam { lr: f64::NAN, ..good }, "lr: expected a finite value of at least 0, found NaN"),
        (Adam { lr: -1.0, ..good }, "lr: expected a finite value of at least 0, found -1"),
        (Adam { beta1: 1.0, ..good }, "beta1: expected a value in [0, 1), found 1"),
        (Adam { beta2: -0.1, ..good }, "beta2: expected a value in [0, 1), found -0.1"),
        (
            Adam { eps: -1e-8, ..good },
            "eps: expected a finite value of at least 0, found -0.00000001",
        ),
        (
            Adam { weight_decay: WeightDecay::L2(f64::INFINITY), ..good },
            "weight_decay: expected a finite value of at least 0, found inf",
        ),
    ] {
        assert_eq!(bad.validate().unwrap_err().to_string(), message);
    }
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

fn gradient(i: usize, step: u64) -> f64 {
    (((i as u64 + 3) * (step + 7) * 2_654_435_761) % 2001) as f64 * 1e-5 - 0.01
}

fn run<T: Compute>(adam: &Adam, numel: usize, steps: u64, pool: Option<&Pool>) -> Vec<T> {
    let mut p: Vec<T> = (0..numel).map(|i| T::round(gradient(i, 0) * 10.0)).collect();
    let mut state = vec![vec![T::round(0.0); numel]; 3];
    for step in 1..=steps {
        let g: Vec<T> = (0..numel).map(|i| T::round(gradient(i, step))).collect();
        let [m, v, w] = &mut state[..] else { unreachable!() };
        let tensors = &mut [AdamTensors {
            param: &mut p,
            grad: &g,
            moment1: m,
            moment2: v,
            max_moment2: (adam.second_moment == SecondMoment::Largest).then_some(w.as_mut_slice()),
        }];
        match pool {
            Some(pool) => adam.step_with(pool, step, tensors).unwrap(),
            None => adam.step(step, tensors).unwrap(),
        }
    }
    p
}

fn configurations() -> Vec<Adam> {
    let mut all = Vec::new();
    for weight_decay in [WeightDecay::Decoupled(0.01), WeightDecay::L2(0.1), WeightDecay::L2(0.0)] {
        for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
            for objective in [Objective::Minimize, Objective::Maximize] {
                all.push(Adam { weight_decay, second_moment, objective, ..Adam::default() });
            }
        }
    }
    all
}

#[test]
fn f64_agrees_with_the_reference_over_many_steps() {
    for adam in configurations() {
        for numel in [1, 15, 16, 17, 33] {
            let found = run::<f64>(&adam, numel, 100, None);
            for (i, found) in found.iter().enumerate() {
                let mut element =
                    reference::Element { param: gradient(i, 0) * 10.0, ..Default::default() };
                for step in 1..=100 {
                    element = reference::update(&adam, step, element, gradient(i, step));
                }
                assert!((found - element.param).abs() <= 1e-12, "{adam:?} element {i}");
            }
        }
    }
}

#[test]
fn any_team_gives_the_same_bits() {
    let pool = Pool::new(NonZeroUsize::new(3).unwrap());
    for adam in configurations() {
        let alone = run::<f32>(&adam, 100_003, 3, None);
        let together = run::<f32>(&adam, 100_003, 3, Some(&pool));
        assert!(alone == together, "{adam:?}");
    }
}

#[test]
fn nothing_is_written_when_a_later_tensor_is_wrong() {
    let (mut p, mut m, mut v) = ([1.0f32; 4], [0.0; 4], [0.0; 4]);
    let (mut q, mut n, mut w) = ([1.0f32; 4], [0.0; 4], [0.0; 4]);
    let error = Adam::default()
        .step(
            1,
            &mut [
                AdamTensors {
                    param: &mut p,
                    grad: &[1.0; 4],
                    moment1: &mut m,
                    moment2: &mut v,
                    max_moment2: None,
                },
                AdamTensors {
                    param: &mut q,
                    grad: &[1.0; 3],
                    moment1: &mut n,
                    moment2: &mut w,
                    max_moment2: None,
                },
            ],
        )
        .unwrap_err();
    assert_eq!(error.to_string(), "grad of tensor 1: expected 4 elements, found 3");
    assert_eq!((p, m, v), ([1.0; 4], [0.0; 4], [0.0; 4]));
}

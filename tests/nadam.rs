//! NAdam against PyTorch, the f64 reference, a plan and bad input.

use fusestep_nadam::{NAdam, NAdamTensors, WeightDecay};

#[path = "support/element_rule.rs"]
mod element_rule;
#[path = "support/training.rs"]
mod training;

use element_rule::{Slices, check_pytorch, check_reference, check_slices};

/// Numbers that `tests/golden/nadam.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/nadam.safetensors");

#[test]
fn ten_steps_agree_with_pytorch_and_those_of_other_settings_do_not() {
    let right = NAdam::default();
    check_pytorch(GOLDEN, 5, "nadam", right, NAdam { momentum_decay: 5e-3, ..right });
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let settings = [(1e-4, 1e-8, 4e-3), (1e-3, 1e-4, 1.0), (1e-2, 1e-8, 0.0)];
    let rules = settings.map(|(lr, eps, momentum_decay)| {
        let weight_decay = WeightDecay::Decoupled(0.1);
        NAdam { lr, eps, momentum_decay, weight_decay, ..NAdam::default() }
    });
    check_reference(rules, |steps| 6.0 + steps as f64 / 4.0);
}

#[test]
fn slices_give_the_bits_of_a_plan_with_any_team() {
    let nadam = NAdam { weight_decay: WeightDecay::L2(0.1), ..NAdam::default() };
    check_slices(nadam, |Slices { pool, step, param, grad, state: [moment1, moment2] }| {
        let tensors = &mut [NAdamTensors { param, grad, moment1, moment2 }];
        match pool {
            Some(pool) => nadam.step_with(pool, step, tensors),
            None => nadam.step(step, tensors),
        }
    });
}

#[test]
fn the_product_of_momenta_is_that_of_each_step() {
    for (beta1, momentum_decay) in [(0.9, 4e-3), (0.999, 4.0), (0.5, 0.0), (0.9, 1e9)] {
        let nadam = NAdam { beta1, momentum_decay, ..NAdam::default() };
        let mut expected = 1.0;
        for step in 1..500u64 {
            expected *= beta1 * (1.0 - 0.5 * 0.96f64.powf(step as f64 * momentum_decay));
            let found = nadam.momentum_product(step);
            assert!((found - expected).abs() <= 1e-13 * expected + 1e-19, "{step}: {found:e}");
        }
    }
}

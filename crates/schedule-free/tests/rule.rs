//! Settings that the rule refuses, and what a step takes of them.

use fusestep_elementwise::ElementRule;
use fusestep_launch::{GroupValues, Precision, UpdateRule};
use fusestep_schedule_free::ScheduleFree;
use fusestep_tensor::DType;

#[test]
fn shares_are_the_weights_over_their_sum() {
    for warmup_steps in [0, 1, 2, 7, 100] {
        let rule = ScheduleFree { warmup_steps, ..ScheduleFree::default() };
        let mut sum = 0.0;
        for step in 1..=300u64 {
            let [warmed, share, ..] = rule.step_scalars(GroupValues {
                lr: 1.0,
                lr_scale: 1.0,
                weight_decay: None,
                trust: None,
                step,
            });
            sum += warmed * warmed;
            let expected = warmed * warmed / sum;
            assert!(
                (share / expected - 1.0).abs() < 1e-12,
                "{warmup_steps}, {step}: {share} {expected}"
            );
            assert_eq!(share as f32 == 1.0, step == 1);
        }
    }
}

#[test]
fn hyper_parameters_out_of_range_are_named() {
    let good = ScheduleFree::default();
    for (beta1, message) in [
        (1.0, "beta1: expected a value in (0, 1), found 1"),
        (0.0, "beta1: expected a value in (0, 1), found 0"),
        (f64::NAN, "beta1: expected a value in (0, 1), found NaN"),
    ] {
        let bad = ScheduleFree { beta1, ..good };
        assert_eq!(bad.validate().unwrap_err().to_string(), message);
    }
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

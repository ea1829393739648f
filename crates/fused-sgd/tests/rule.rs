//! Settings that the rule refuses, and its reference by hand.

use fusestep_fused_sgd::reference::{Element, update};
use fusestep_fused_sgd::{Nesterov, Sgd, WeightDecay};
use fusestep_launch::{Precision, UpdateRule};
use fusestep_tensor::DType;

#[test]
fn settings_that_do_not_go_together_are_named() {
    let good = Sgd::with_momentum();
    for (bad, message) in [
        (Sgd { momentum: 1.0, ..good }, "momentum: expected a value in [0, 1), found 1"),
        (Sgd { rescale: 0.0, ..good }, "rescale: expected a finite value above 0, found 0"),
        (
            Sgd { nesterov: Nesterov::Nesterov, ..Sgd::default() },
            "momentum: expected a value in (0, 1) with nesterov, found 0",
        ),
        (
            Sgd { nesterov: Nesterov::Nesterov, dampening: 0.5, ..good },
            "dampening: expected 0 with nesterov, found 0.5",
        ),
        (
            Sgd { dampening: 0.5, ..Sgd::default() },
            "dampening: expected 0 without momentum, found 0.5",
        ),
    ] {
        assert_eq!(bad.validate().unwrap_err().to_string(), message);
    }
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

/// p = 1, g = 0.5, u = 0.2, μ = 0.9, lr = 0.1, λ = 0.1, by hand.
#[test]
fn worked_examples() {
    let start = Element { param: 1.0, velocity: 0.2 };
    let plain = Sgd { lr: 0.1, weight_decay: WeightDecay::L2(0.1), ..Sgd::with_momentum() };
    let nesterov = Sgd { nesterov: Nesterov::Nesterov, ..plain };
    let lone = Sgd { lr: 0.1, ..Sgd::default() };
    for (sgd, param) in [(plain, 0.922), (nesterov, 0.8698), (lone, 0.95)] {
        let found = update(&sgd, 2, start, 0.5);
        assert!((found.param - param).abs() < 1e-15, "{sgd:?}: {found:?}");
    }
    assert!((update(&plain, 2, start, 0.5).velocity - 0.78).abs() < 1e-15);
}

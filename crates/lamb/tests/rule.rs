//! Settings that a rule refuses, through its public items.

use fusestep_lamb::Lamb;
use fusestep_launch::{Precision, UpdateRule};
use fusestep_tensor::DType;

#[test]
fn hyper_parameters_out_of_range_are_named() {
    let good = Lamb::default();
    for (bad, message) in [
        (Lamb { lr: f64::NAN, ..good }, "lr: expected a finite value of at least 0, found NaN"),
        (Lamb { beta1: 1.0, ..good }, "beta1: expected a value in [0, 1), found 1"),
        (Lamb { beta2: -0.5, ..good }, "beta2: expected a value in [0, 1), found -0.5"),
        (Lamb { eps: -1.0, ..good }, "eps: expected a finite value of at least 0, found -1"),
        (
            Lamb { weight_decay: f64::INFINITY, ..good },
            "weight_decay: expected a finite value of at least 0, found inf",
        ),
    ] {
        assert_eq!(bad.validate().unwrap_err().to_string(), message);
    }
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

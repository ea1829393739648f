//! Settings that a rule refuses, through its public items.

use fusestep_lars_momentum::Lars;
use fusestep_launch::{Precision, UpdateRule};
use fusestep_tensor::DType;

#[test]
fn hyper_parameters_out_of_range_are_named() {
    let good = Lars::default();
    for (bad, message) in [
        (Lars { lr: f64::NAN, ..good }, "lr: expected a finite value of at least 0, found NaN"),
        (Lars { momentum: 1.0, ..good }, "momentum: expected a value in [0, 1), found 1"),
        (
            Lars { trust_coefficient: -1.0, ..good },
            "trust_coefficient: expected a finite value of at least 0, found -1",
        ),
        (
            Lars { weight_decay: f64::INFINITY, ..good },
            "weight_decay: expected a finite value of at least 0, found inf",
        ),
        (Lars { eps: -1.0, ..good }, "eps: expected a finite value of at least 0, found -1"),
        (Lars { rescale: 0.0, ..good }, "rescale: expected a finite value above 0, found 0"),
    ] {
        assert_eq!(bad.validate().unwrap_err().to_string(), message);
    }
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

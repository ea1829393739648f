//! Settings that a rule refuses, through its public items.

use fusestep_adagrad::Adagrad;
use fusestep_launch::{Precision, UpdateRule};
use fusestep_tensor::DType;

#[test]
fn hyper_parameters_out_of_range_are_named() {
    let good = Adagrad::default();
    for (bad, message) in [
        (
            Adagrad { lr_decay: -0.5, ..good },
            "lr_decay: expected a finite value of at least 0, found -0.5",
        ),
        (
            Adagrad { initial_sum: f64::NAN, ..good },
            "initial_sum: expected a finite value of at least 0, found NaN",
        ),
    ] {
        assert_eq!(bad.validate().unwrap_err().to_string(), message);
    }
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

//! Settings that a rule refuses, through its public items.

use fusestep_launch::{Precision, UpdateRule};
use fusestep_rmsprop::RmsProp;
use fusestep_tensor::DType;

#[test]
fn hyper_parameters_out_of_range_are_named() {
    let good = RmsProp::default();
    for (bad, message) in [
        (RmsProp { alpha: 1.0, ..good }, "alpha: expected a value in [0, 1), found 1"),
        (RmsProp { momentum: -0.5, ..good }, "momentum: expected a value in [0, 1), found -0.5"),
    ] {
        assert_eq!(bad.validate().unwrap_err().to_string(), message);
    }
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

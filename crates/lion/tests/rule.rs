//! Settings that a rule refuses, through its public items.

use fusestep_launch::{Precision, UpdateRule};
use fusestep_lion::Lion;
use fusestep_tensor::DType;

#[test]
fn hyper_parameters_out_of_range_are_named() {
    let good = Lion::default();
    let bad = Lion { beta2: 1.0, ..good };
    assert_eq!(
        bad.validate().unwrap_err().to_string(),
        "beta2: expected a value in [0, 1), found 1"
    );
    assert_eq!(good.validate(), Ok(()));
    assert!(good.kernel(DType::I32, Precision::default()).is_err());
}

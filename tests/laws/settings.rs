//! Settings of rules: each is checked, and named where it is out of range.

use fusestep_launch::{Precision, SettingValue};
use fusestep_planner::Optimizer;
use fusestep_tensor::DType;
use fusestep_testkit::each_rule;

/// The names of a rule's numbers.
fn numbers(mut rule: Optimizer) -> Vec<&'static str> {
    let mut names = Vec::new();
    rule.each(&mut |setting| {
        if matches!(setting.value, SettingValue::Number(..)) {
            names.push(setting.name);
        }
    });
    names
}

/// The rule with another number.
fn with(mut rule: Optimizer, name: &str, number: f64) -> Optimizer {
    rule.each(&mut |setting| match setting.value {
        SettingValue::Number(value, _) if setting.name == name => *value = number,
        _ => {}
    });
    rule
}

#[test]
fn every_number_out_of_range_is_named() {
    for rule in each_rule() {
        assert_eq!(rule.validate(), Ok(()), "{rule}");
        let names = numbers(rule);
        assert!(names.first() == Some(&"lr") && names.len() >= 4, "{rule}: {names:?}");
        for name in names {
            for wrong in [-1.0, f64::NAN, f64::INFINITY] {
                let error = with(rule, name, wrong).validate().unwrap_err().to_string();
                assert!(error.starts_with(&format!("{name}: expected a")), "{rule}: {error}");
                assert!(error.ends_with(&format!("found {wrong}")), "{rule}: {error}");
            }
        }
        assert!(rule.rule().kernel(DType::I32, Precision::default()).is_err(), "{rule}");
    }
}

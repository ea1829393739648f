//! A user's own JSON beside fusestep: what it is read as and how it is printed stays as it was.
#![forbid(unsafe_code)]

use fusestep::AdamW;

fn main() {
    let value: serde_json::Value = serde_json::from_str(r#"{"b":1,"a":2}"#).expect("JSON");
    // An object's keys are sorted, unless some crate has turned on `preserve_order`.
    assert_eq!(value.to_string(), r#"{"a":2,"b":1}"#);
    println!("json beside {:?}: {value}", AdamW::new(1e-3));
}

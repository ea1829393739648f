//! Numbers of things in messages, and advice.

use std::borrow::Cow;

/// A count with its noun: 1 tensor, 2 tensors, 25,557,032 elements, 2 launches. The noun `what` is
/// in the singular, and takes an s in the plural or is launch.
pub fn counted(count: u64, what: &str) -> String {
    let plural = match what {
        _ if count == 1 => "",
        _ if what.ends_with("launch") || what.ends_with("batch") => "es",
        _ => "s",
    };
    format!("{} {what}{plural}", grouped(count))
}

/// A count, its noun and a verb, as the beginning of a sentence: 1 bucket is, 2 buckets are.
pub fn counted_are(count: u64, what: &str) -> String {
    let verb = if count == 1 { "is" } else { "are" };
    format!("{} {verb}", counted(count, what))
}

/// A number as text, with an exponent if its digits would fill a line.
pub fn short_number(value: f64) -> String {
    if value.is_finite() && value.abs() >= 1e21 { format!("{value:e}") } else { value.to_string() }
}

/// A power of two as text that has all its digits, or as `2^60` where they would be rounded.
pub fn power_of_two(value: f64) -> String {
    let exponent = value.log2();
    let is_rounded = value > (1u64 << f64::MANTISSA_DIGITS) as f64 && exponent.fract() == 0.0;
    if is_rounded { format!("2^{exponent}") } else { value.to_string() }
}

/// The reason why two settings contradict each other, with advice: its own, which stands behind a
/// semicolon, or to remove one of the two.
pub fn advised(why: &str) -> Cow<'_, str> {
    if why.contains("; ") { why.into() } else { format!("{why}; remove one").into() }
}

/// Digits in groups of three: 25,557,032.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular_and_digits_stand_in_threes() {
        assert_eq!(counted(0, "tensor"), "0 tensors");
        assert_eq!(counted(1, "launch"), "1 launch");
        assert_eq!(counted(1_000, "launch"), "1,000 launches");
        assert_eq!(counted(3, "epoch"), "3 epochs");
        assert_eq!(counted_are(1, "bucket"), "1 bucket is");
        assert_eq!(counted_are(25_557_032, "element"), "25,557,032 elements are");
        assert_eq!(grouped(999), "999");
    }

    #[test]
    fn a_reason_has_one_advice() {
        assert_eq!(advised("both decide"), "both decide; remove one");
        assert_eq!(advised("both decide; use stage 2"), "both decide; use stage 2");
    }

    #[test]
    fn powers_of_two_are_told_without_rounding() {
        for (value, text) in [(1.0, "1"), (65536.0, "65536"), (2f64.powi(60), "2^60")] {
            assert_eq!(power_of_two(value), text);
        }
        assert_eq!(power_of_two(2f64.powi(53)), "9007199254740992");
        assert_eq!(power_of_two(2f64.powi(126)), "2^126");
    }
}

//! Floating-point arithmetic in every rounding, comparisons with NaN, and conversions.

use super::{result, results};

fn single(value: f32) -> u64 {
    u64::from(value.to_bits())
}

fn singles(values: [f32; 3]) -> [u64; 3] {
    values.map(single)
}

fn f32_of(word: u64) -> f32 {
    f32::from_bits(word as u32)
}

/// Bits that follow each other without a pattern (SplitMix64).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Numbers between 2⁻⁴ and 2⁴ with so many bits behind the first, of either sign.
fn number(state: &mut u64, bits: u32) -> f32 {
    let drawn = random(state);
    let mantissa = (1 << bits) | (drawn & ((1 << bits) - 1));
    let scale = f64::from((drawn >> 40) as u32 % 8) - 4.0;
    let value = mantissa as f64 / f64::from(1u32 << bits) * scale.exp2();
    if drawn >> 63 == 0 { value as f32 } else { -value as f32 }
}

/// Requires of each rounding that its results lie beside the exact value, which `is_below` says of
/// a candidate: whether it is at most the exact one.
fn check_roundings(
    opcode: &str,
    sources: usize,
    cases: &[[f32; 3]],
    is_below: &dyn Fn([f32; 3], f32) -> bool,
) {
    let types = vec!["f32"; sources + 1];
    let inputs: Vec<_> = cases.iter().map(|&case| singles(case)).collect();
    let run = |rounding: &str| results(&format!("{opcode}.{rounding}.f32"), &types, &inputs);
    let [nearest, zero, down, up] = ["rn", "rz", "rm", "rp"].map(run);
    let mut inexact = 0;
    for (i, &case) in cases.iter().enumerate() {
        let (low, high) = (f32_of(down[i]), f32_of(up[i]));
        let says = format!("{opcode} of {case:?}: down {low:e}, up {high:e}");
        assert!(is_below(case, low), "{says}");
        assert!(low == high || low.next_up() == high, "{says}");
        if low != high {
            assert!(!is_below(case, high), "{says}");
            inexact += 1;
        }
        let toward_zero = if low >= 0.0 { low } else { high };
        assert_eq!(f32_of(zero[i]), toward_zero, "{says}");
        let [a, b, c] = case;
        let own = match opcode {
            "add" => a + b,
            "sub" => a - b,
            "mul" => a * b,
            "div" => a / b,
            "sqrt" => a.sqrt(),
            _ => a.mul_add(b, c),
        };
        assert_eq!(nearest[i], single(own), "{says}");
        assert!(own == low || own == high, "{says}");
    }
    assert!(inexact > cases.len() / 4, "{opcode}: {inexact} inexact");
}

#[test]
fn every_rounding_lies_beside_the_exact_value() {
    let mut state = 5;
    let mut draw = |bits| -> Vec<[f32; 3]> {
        let mut case =
            || [number(&mut state, bits), number(&mut state, bits), number(&mut state, 23)];
        (0..500).map(|_| case()).collect()
    };
    // Sums and products of such numbers are exact in f64.
    let cases = draw(23);
    let exact = |value: f64, candidate: f32| f64::from(candidate) <= value;
    let wide = |value: f32| f64::from(value);
    check_roundings("add", 2, &cases, &|[a, b, _], low| exact(wide(a) + wide(b), low));
    check_roundings("sub", 2, &cases, &|[a, b, _], low| exact(wide(a) - wide(b), low));
    check_roundings("mul", 2, &cases, &|[a, b, _], low| exact(wide(a) * wide(b), low));
    // A quotient is at least a candidate if the candidate's product is at most the dividend.
    check_roundings("div", 2, &cases, &|[a, b, _], low| {
        let product = wide(low) * wide(b);
        if b > 0.0 { product <= wide(a) } else { product >= wide(a) }
    });
    let roots: Vec<_> = cases.iter().map(|case| case.map(f32::abs)).collect();
    check_roundings("sqrt", 1, &roots, &|[a, ..], low| wide(low) * wide(low) <= wide(a));
    check_roundings("fma", 3, &draw(11), &|[a, b, c], low| exact(wide(a) * wide(b) + wide(c), low));
}

#[test]
fn doubles_are_rounded_as_asked() {
    let of = |opcode: &str, a: f64, b: f64| {
        ["rn", "rz", "rm", "rp"].map(|rounding| {
            let types = ["f64"; 3];
            let count = if opcode == "sqrt" { 2 } else { 3 };
            let name = format!("{opcode}.{rounding}.f64");
            result(&name, &types[..count], [a.to_bits(), b.to_bits(), 0])
        })
    };
    let third = 0x3fd5_5555_5555_5555;
    assert_eq!(of("div", 1.0, 3.0), [third, third, third, third + 1]);
    let root = 0x3ff6_a09e_667f_3bcd;
    assert_eq!(of("sqrt", 2.0, 0.0), [root, root - 1, root - 1, root]);
    let (one, tiny) = (1f64.to_bits(), 1e-30);
    assert_eq!(of("add", 1.0, tiny), [one, one, one, one + 1]);
    assert_eq!(of("sub", 1.0, tiny), [one, one - 1, one - 1, one]);
    assert_eq!(of("add", -1.0, -tiny), [-1f64, -1f64, -1f64.next_up(), -1f64].map(f64::to_bits));
    let square = (1.0 + f64::EPSILON).powi(2).to_bits();
    assert_eq!(
        of("mul", 1.0 + f64::EPSILON, 1.0 + f64::EPSILON),
        [square, square, square, square + 1]
    );
    // Half-way goes to the even one.
    let half = f64::EPSILON / 2.0;
    assert_eq!(of("add", 1.0, half)[0], one);
    assert_eq!(of("add", 1.0 + f64::EPSILON, half)[0], one + 2);
}

#[test]
fn products_and_sums_are_rounded_once_each_and_fma_once() {
    let (a, c) = (1.0f32 + f32::EPSILON, -1.0f32);
    let product = result("mul.rn.f32", &["f32"; 3], singles([a, a, 0.0]));
    let sum = result("add.rn.f32", &["f32"; 3], [product, single(c), 0]);
    let fused = result("fma.rn.f32", &["f32"; 4], singles([a, a, c]));
    assert_eq!(f32_of(sum), 2.0 * f32::EPSILON);
    assert_eq!(f32_of(fused), 2.0 * f32::EPSILON + f32::EPSILON * f32::EPSILON);
}

#[test]
fn subnormals_are_kept() {
    let tiny = f32::from_bits(3);
    let case = singles([tiny, 0.5, 0.0]);
    assert_eq!(result("mul.rn.f32", &["f32"; 3], case), 2);
    let least = f32::MIN_POSITIVE;
    assert_eq!(result("mul.rn.f32", &["f32"; 3], singles([least, -0.5, 0.0])), 0x8040_0000);
}

#[test]
fn nan_fails_ordered_comparisons_and_loses_to_numbers() {
    let nan = f32::NAN;
    let compare = |name: &str, a: f32, b: f32| {
        result(&format!("setp.{name}.f32"), &["pred", "f32", "f32"], singles([a, b, 0.0]))
    };
    for name in ["eq", "ne", "lt", "le", "gt", "ge", "num"] {
        assert_eq!(compare(name, nan, 1.0), 0, "{name}");
        assert_eq!(compare(name, 1.0, nan), 0, "{name}");
    }
    for name in ["equ", "neu", "ltu", "leu", "gtu", "geu", "nan"] {
        assert_eq!(compare(name, nan, 1.0), 1, "{name}");
    }
    assert_eq!(compare("neu", 1.0, 1.0), 0);
    assert_eq!(compare("eq", 0.0, -0.0), 1);
    let of = |name: &str, a: f32, b: f32| result(name, &["f32"; 3], singles([a, b, 0.0]));
    assert_eq!(of("max.f32", nan, 1.0), single(1.0));
    assert_eq!(of("min.f32", 0.0, -0.0), single(-0.0));
    // Results that are NaN have one form; moves and signs keep every bit.
    assert_eq!(of("add.rn.f32", f32::INFINITY, f32::NEG_INFINITY), 0x7fff_ffff);
    assert_eq!(result("mov.f32", &["f32"; 2], [0x7f80_0001, 0, 0]), 0x7f80_0001);
    assert_eq!(result("neg.f32", &["f32"; 2], [0x7f80_0001, 0, 0]), 0xff80_0001);
}

#[test]
fn conversions_to_integers_saturate() {
    let of =
        |name: &str, to: &str, value: f32| result(name, &[to, "f32"], singles([value, 0.0, 0.0]));
    let low = |value: i32| u64::from(value as u32);
    assert_eq!(of("cvt.rzi.s32.f32", "s32", -2.7), low(-2));
    assert_eq!(of("cvt.rzi.s32.f32", "s32", 3e9), low(i32::MAX));
    assert_eq!(of("cvt.rzi.s32.f32", "s32", f32::NEG_INFINITY), low(i32::MIN));
    assert_eq!(of("cvt.rzi.u32.f32", "u32", -5.0), 0);
    assert_eq!(of("cvt.rzi.u64.f32", "u64", 1e30), u64::MAX);
    assert_eq!(of("cvt.rzi.s32.f32", "s32", f32::NAN), 0);
    // The ISA's NaN where one of the types has 64 bits.
    assert_eq!(of("cvt.rzi.s64.f32", "s64", f32::NAN), 1 << 63);
    let nan = f64::NAN.to_bits();
    assert_eq!(result("cvt.rzi.u32.f64", &["u32", "f64"], [nan, 0, 0]), 1 << 31);
}

#[test]
fn conversions_between_floats_and_from_integers_round_as_asked() {
    let beside = f64::from(1.0f32.next_up());
    let middle = ((1.0 + beside) / 2.0).next_up();
    let narrow = |rounding: &str, value: f64| {
        result(&format!("cvt.{rounding}.f32.f64"), &["f32", "f64"], [value.to_bits(), 0, 0])
    };
    let one = single(1.0);
    assert_eq!(["rn", "rz", "rm", "rp"].map(|r| narrow(r, middle)), [one + 1, one, one, one + 1]);
    assert_eq!(narrow("rn", (1.0 + beside) / 2.0), one);
    assert_eq!(narrow("rz", -middle), single(-1.0));
    let wide = |name: &str, from: &str, value: u64| result(name, &["f32", from], [value, 0, 0]);
    assert_eq!(wide("cvt.rn.f32.u32", "u32", 0xffff_ffff), single(4_294_967_296.0));
    assert_eq!(wide("cvt.rn.f32.s32", "s32", 0xffff_ffff), single(-1.0));
    let exact = result("cvt.f64.f32", &["f64", "f32"], singles([0.1, 0.0, 0.0]));
    assert_eq!(f64::from_bits(exact), f64::from(0.1f32));
}

#[test]
fn halves_are_widened_exactly_and_rounded_as_the_format_says() {
    // Every number of 16 bits is itself again.
    for first in (0..1 << 16).step_by(512) {
        let halves: Vec<_> = (first..first + 512u64).map(|bits| [bits, 0, 0]).collect();
        let wide = results("cvt.f32.f16", &["f32", "b16"], &halves);
        let inputs: Vec<_> = wide.iter().map(|&bits| [bits, 0, 0]).collect();
        let again = results("cvt.rn.f16.f32", &["b16", "f32"], &inputs);
        for (half, (&wide, &again)) in (first..).zip(wide.iter().zip(&again)) {
            let is_nan = half & 0x7fff > 0x7c00;
            assert_eq!(f32_of(wide).is_nan(), is_nan);
            assert_eq!(again, if is_nan { 0x7fff } else { half }, "{half:x}");
        }
    }
    let narrow = |value: f32| result("cvt.rn.f16.f32", &["b16", "f32"], singles([value, 0.0, 0.0]));
    assert_eq!(narrow(1.0 + 0.000_488_281_25), 0x3c00, "half-way, to even");
    assert_eq!(narrow((1.0 + 0.000_488_281_25f32).next_up()), 0x3c01);
    assert_eq!(narrow(65_519.0), 0x7bff);
    assert_eq!(narrow(65_520.0), 0x7c00);
    // Subnormal: in units of 2^-24.
    assert_eq!(narrow(2.5 * 2f32.powi(-24)), 2);
    assert_eq!(narrow(2f32.powi(-25)), 0);
    assert_eq!(narrow(-2f32.powi(-25).next_up()), 0x8001);
}

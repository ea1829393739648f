//! Powers with the same bits on every machine.

/// xⁿ by repeated squaring of unevaluated sums of two f64: additions, multiplications and exact
/// products only, so every machine computes the same bits, unlike a library's `pow`, and squaring
/// errors do not pile up with n.
pub fn integer_power(x: f64, n: u64) -> f64 {
    let (mut base, mut exponent, mut product) = ((x, 0.0), n, (1.0, 0.0));
    while exponent > 0 {
        if exponent & 1 == 1 {
            product = multiply(product, base);
        }
        base = multiply(base, base);
        exponent >>= 1;
    }
    product.0 + product.1
}

/// The product of two unevaluated sums, with a relative error near 2⁻¹⁰⁰.
fn multiply(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    let high = a.0 * b.0;
    let low = a.0.mul_add(b.0, -high) + (a.0 * b.1 + a.1 * b.0);
    let sum = high + low;
    (sum, low - (sum - high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integer_power_agrees_with_powi() {
        for x in [0.0f64, 0.5, 0.9, 0.999, 0.9999999] {
            for n in [0, 1, 2, 10, 1000, 1_000_000, u64::MAX] {
                let expected = x.powf(n as f64);
                assert!((integer_power(x, n) - expected).abs() <= 1e-13, "{x}^{n}");
            }
        }
    }
}

//! Powers with the same bits on every machine.

/// An unevaluated sum of two f64, of which the second is what the first has lost to rounding.
///
/// Additions, multiplications and exact products make it, so that every machine computes the same
/// bits, unlike those of a library's `pow`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The sum, rounded.
    pub high: f64,
    /// The rest.
    pub low: f64,
}

impl Pair {
    /// One.
    pub const ONE: Self = Self { high: 1.0, low: 0.0 };

    /// A number that f64 holds.
    pub fn of(high: f64) -> Self {
        Self { high, low: 0.0 }
    }

    /// The sum, rounded.
    pub fn rounded(self) -> f64 {
        self.high + self.low
    }

    /// The product, with a relative error near 2⁻¹⁰⁰.
    pub fn times(self, other: Self) -> Self {
        let high = self.high * other.high;
        let low =
            self.high.mul_add(other.high, -high) + (self.high * other.low + self.low * other.high);
        Self::normalized(high, low)
    }

    /// The power, by repeated squaring; its error does not pile up with n.
    pub fn power(self, n: u64) -> Self {
        let (mut base, mut exponent, mut product) = (self, n, Self::ONE);
        while exponent > 0 {
            if exponent & 1 == 1 {
                product = product.times(base);
            }
            base = base.times(base);
            exponent >>= 1;
        }
        product
    }

    /// e to this power, for numbers of at most 0: a series at a 4096th of it, squared 12 times.
    pub fn exponential(self) -> Self {
        const SQUARINGS: u32 = 12;
        /// The power below which e is below the smallest f64.
        const LEAST: f64 = -746.0;
        if self.high < LEAST {
            return Self::of(0.0);
        }
        let scale = 1.0 / f64::from(1u32 << SQUARINGS);
        let part = Self { high: self.high * scale, low: self.low * scale };
        let mut sum = Self::ONE;
        // 1 + x/1·(1 + x/2·(1 + x/3·…)).
        for n in (1..=22u32).rev() {
            sum = part.times(sum).over(f64::from(n)).plus_one();
        }
        sum.power(1 << SQUARINGS)
    }

    fn over(self, divisor: f64) -> Self {
        let high = self.high / divisor;
        let rest = high.mul_add(-divisor, self.high) + self.low;
        Self::normalized(high, rest / divisor)
    }

    /// One more, for numbers whose magnitude is below 1.
    fn plus_one(self) -> Self {
        let high = 1.0 + self.high;
        Self::normalized(high, (self.high - (high - 1.0)) + self.low)
    }

    fn normalized(high: f64, low: f64) -> Self {
        let sum = high + low;
        Self { high: sum, low: low - (sum - high) }
    }
}

/// xⁿ by repeated squaring of unevaluated sums of two f64 ([`Pair`]), rounded once.
pub fn integer_power(x: f64, n: u64) -> f64 {
    Pair::of(x).power(n).rounded()
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

    #[test]
    fn exponential_agrees_with_exp() {
        for x in [0.0f64, -1e-300, -1e-9, -0.04, -0.5, -1.0, -12.5, -300.0, -708.0] {
            let expected = x.exp();
            let found = Pair::of(x).exponential().rounded();
            assert!((found - expected).abs() <= 4e-16 * expected, "e^{x}: {found:e}");
        }
        assert_eq!(Pair::of(-1e9).exponential(), Pair::of(0.0));
        // e^-1 = 0.36787944117144232 15955237701614608…, whose rest f64 does not hold.
        let found = Pair::of(-1.0).exponential();
        assert!((found.low - -1.2428753672788363e-17).abs() < 1e-29, "{found:?}");
    }
}

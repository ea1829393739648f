//! Rounding in the loop: to nearest, or at random by keys that do not depend on how the work was
//! cut.

use fusestep_launch::random_bits::{element_word, tensor_key};
use fusestep_launch::{HostSpan, KEY_BYTES};

use crate::read_values;

/// The source of the random bits of a tensor's elements.
pub trait Rounding: Copy {
    /// Whether there are random bits.
    const AT_RANDOM: bool;
    /// Bytes behind the kernel's own step scalars.
    const KEY_BYTES: usize;

    /// The source for a span whose step scalars end with `key`.
    fn of(key: &[u8], span: &HostSpan) -> Self;
    /// The source from element `first` of the span on.
    fn at(self, first: usize) -> Self;
    /// 16 random bits for one element of the block: those of list `list`, counted from the
    /// parameter without the gradient. Upper bits are not specified.
    fn random_bits(self, lane: usize, list: usize) -> u32;
}

/// Rounding to nearest even, without random bits.
#[derive(Clone, Copy)]
pub(crate) struct Nearest;

impl Rounding for Nearest {
    const AT_RANDOM: bool = false;
    const KEY_BYTES: usize = 0;
    #[inline(always)]
    fn of(_: &[u8], _: &HostSpan) -> Self {
        Self
    }
    #[inline(always)]
    fn at(self, _: usize) -> Self {
        self
    }
    #[inline(always)]
    fn random_bits(self, _: usize, _: usize) -> u32 {
        0
    }
}

/// Rounding at random.
#[derive(Clone, Copy)]
pub(crate) struct Stochastic {
    key: u64,
    /// Index in its tensor of the block's first element.
    element: u64,
}

impl Rounding for Stochastic {
    const AT_RANDOM: bool = true;
    const KEY_BYTES: usize = KEY_BYTES;
    #[inline(always)]
    fn of(key: &[u8], span: &HostSpan) -> Self {
        let [step_key] = read_values(key);
        Self { key: tensor_key(step_key, span.parameter), element: span.first_element }
    }
    #[inline(always)]
    fn at(self, first: usize) -> Self {
        Self { element: self.element + first as u64, ..self }
    }
    #[inline(always)]
    fn random_bits(self, lane: usize, list: usize) -> u32 {
        // Halves of `element + lane` in 32-bit operations, of which a vector holds twice as many.
        let first = self.element as u32;
        let low = first.wrapping_add(lane as u32);
        let high = (self.element >> 32) as u32 + u32::from(low < first);
        let word = element_word(self.key, low, high, list as u32 / 2);
        word >> (16 * (list % 2))
    }
}

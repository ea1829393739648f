//! Steps on slices whose lists have dtypes of their own: masters of f32 with gradients of 16 bits,
//! state in f32, 16 or 8 bits, and copies of 16 bits that a device takes.
//!
//! A kernel is compiled for few combinations of dtypes. The lists that it has not are widened into
//! the nearest cache before it and rounded behind it, some thousand elements at a time. Widening is
//! exact and rounding is to nearest even, so the bits are those of a kernel that has the
//! combination.
//!
//! ```text
//! for each block of a tensor:
//!     keep      copies of parameter and state from before, if asked for
//!     widen     lists that the kernel has not, into f32
//!     update    the kernel, in place wherever a list has its dtype
//!     round     lists that were widened, and the copy for the device
//! ```

mod blocks;
mod lists;
mod norm;
mod step;
mod tensor;
#[cfg(test)]
mod tests;

pub use lists::{Floats, FloatsMut, StateMut};
pub use norm::square_sums;
pub use step::{BiasCorrection, MixedStep, step_mixed_slices};
pub use tensor::{Before, MixedTensor};

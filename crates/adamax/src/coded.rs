//! Adamax with state of 8 bits on safe slices, without a plan or a backend.

use fusestep_elementwise::coded_slices;

use crate::Adamax;

coded_slices! {
    /// Lists of one parameter with state of 8 bits. All have the same numel; 0 is allowed.
    pub struct CodedAdamaxTensors of Adamax {
        /// m, in signed codes; zeros before step 1.
        moment1,
        /// u, in positive codes; zeros before step 1.
        max_grad,
    }
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        u ← max(β₂·u, |g| + ε)
    /// p ← p − lr / (1 − β₁ᵗ) · m / u
    /// ```
    ///
    /// # Cost
    /// 16.5 bytes of memory traffic per element with parameters of f32, 10.5 with bf16, 12.5 with
    /// bf16 and a remainder of 8 bits.
    /// # Source
    /// As [`Adamax::step`]; the codes are those of [`fusestep_elementwise::coded`].
    step_coded
}

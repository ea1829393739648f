//! NAdam with state of 8 bits on safe slices, without a plan or a backend.

use fusestep_elementwise::coded_slices;

use crate::NAdam;

coded_slices! {
    /// Lists of one parameter with state of 8 bits. All have the same numel; 0 is allowed.
    pub struct CodedNAdamTensors of NAdam {
        /// m, in signed codes; zeros before step 1.
        moment1,
        /// v, in codes of its root; zeros before step 1.
        moment2,
    }
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²        d = √(v / (1 − β₂ᵗ)) + ε
    /// p ← p − lr·(1 − μ(t)) / (1 − P) · g / d − lr·μ(t + 1) / (1 − P·μ(t + 1)) · m / d
    /// ```
    ///
    /// # Cost
    /// 16.5 bytes of memory traffic per element with parameters of f32, 10.5 with bf16, 12.5 with
    /// bf16 and a remainder of 8 bits.
    /// # Source
    /// As [`NAdam::step`]; the codes are those of [`fusestep_elementwise::coded`].
    step_coded
}

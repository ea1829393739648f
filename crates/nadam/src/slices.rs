//! NAdam on safe slices, without a plan or a backend.

use fusestep_elementwise::element_slices;

use crate::NAdam;

element_slices! {
    /// Tensors of one parameter. All slices have the same numel; 0 is allowed.
    pub struct NAdamTensors of NAdam {
        /// m, updated in place; zeros before step 1.
        moment1,
        /// v, updated in place; zeros before step 1.
        moment2,
    }
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²        d = √(v / (1 − β₂ᵗ)) + ε
    /// p ← p − lr·(1 − μ(t)) / (1 − P) · g / d − lr·μ(t + 1) / (1 − P·μ(t + 1)) · m / d
    /// ```
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element.
    /// # Source
    /// Dozat 2016, Algorithm 8; μ(t), P and the decay of weights as in PyTorch.
    step
}

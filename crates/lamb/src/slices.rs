//! LAMB on safe slices, without a plan or a backend.

use fusestep_elementwise::normed_slices;

use crate::Lamb;

normed_slices! {
    pub struct LambTensors of Lamb {
        /// m, updated in place; zeros before step 1.
        moment1,
        /// v, updated in place; zeros before step 1.
        moment2,
    }
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// r = m/(1 − β₁ᵗ) / (√v/√(1 − β₂ᵗ) + ε) + λ·p
    /// p ← p − lr·φ·r        φ = ‖p‖/‖r‖ if trusted and neither is 0, else 1
    /// ```
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element, 44 if a tensor exceeds the cache.
    /// # Source
    /// You et al. 2020, Algorithm 2, arXiv:1904.00962, with φ the identity.
    step(step)
}

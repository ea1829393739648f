//! LAMB with state of 8 bits on safe slices, without a plan or a backend.

use fusestep_elementwise::coded_normed_slices;

use crate::Lamb;

coded_normed_slices! {
    pub struct CodedLambTensors of Lamb {
        /// m, in signed codes; zeros before step 1.
        moment1,
        /// v, as the codes of its root; zeros before step 1.
        moment2,
    }
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// r = m/(1 − β₁ᵗ) / (√v/√(1 − β₂ᵗ) + ε) + λ·p
    /// p ← p − lr·φ·r        φ = ‖p‖/‖r‖ if trusted and neither is 0, else 1
    /// ```
    ///
    /// # Cost
    /// 16.5 bytes of memory traffic per element with parameters of f32, 10.5 with bf16, 12.5 with
    /// bf16 and a remainder of 8 bits. All lists are read again if a tensor exceeds the cache.
    /// # Source
    /// As [`Lamb::step`]; the codes are those of [`fusestep_elementwise::coded`].
    step_coded
}

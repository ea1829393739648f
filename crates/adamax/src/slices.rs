//! Adamax on safe slices, without a plan or a backend.

use fusestep_elementwise::element_slices;

use crate::Adamax;

element_slices! {
    /// Tensors of one parameter. All slices have the same numel; 0 is allowed.
    pub struct AdamaxTensors of Adamax {
        /// m, updated in place; zeros before step 1.
        moment1,
        /// u, updated in place; zeros before step 1.
        max_grad,
    }
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        u ← max(β₂·u, |g| + ε)
    /// p ← p − lr / (1 − β₁ᵗ) · m / u
    /// ```
    ///
    /// # Cost
    /// 28 bytes of memory traffic per f32 element.
    /// # Source
    /// Kingma & Ba 2015, Algorithm 2, arXiv:1412.6980; ε and L2 decay as in PyTorch.
    step
}

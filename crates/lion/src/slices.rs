//! Lion on safe slices, without a plan or a backend.

use fusestep_elementwise::element_slices;

use crate::Lion;

element_slices! {
    /// Tensors of one parameter. All slices have the same numel; 0 is allowed.
    pub struct LionTensors of Lion {
        /// m, updated in place; zeros before step 1.
        moment1,
    }
    /// ```text
    /// p ← p·(1 − lr·λ) − lr·sign(β₁·m + (1 − β₁)·g)        sign(0) = 0
    /// m ← β₂·m + (1 − β₂)·g
    /// ```
    ///
    /// Every step is alike.
    /// # Cost
    /// 20 bytes of memory traffic per f32 element.
    /// # Source
    /// Chen et al. 2023, Algorithm 2, arXiv:2302.06675.
    step
}

//! Adagrad on safe slices, without a plan or a backend.

use fusestep_elementwise::element_slices;

use crate::Adagrad;

element_slices! {
    /// Tensors of one parameter. All slices have the same numel; 0 is allowed.
    pub struct AdagradTensors of Adagrad {
        /// s, updated in place; zeros before step 1, which adds the initial value.
        sum,
    }
    /// ```text
    /// g ← g + λ·p        s ← s + g²
    /// p ← p − lr / (1 + (t − 1)·lr_decay) · g / (√s + ε)
    /// ```
    ///
    /// # Cost
    /// 20 bytes of memory traffic per f32 element.
    /// # Source
    /// Duchi, Hazan & Singer 2011; ε, the decay of lr and the initial value as in PyTorch.
    step
}

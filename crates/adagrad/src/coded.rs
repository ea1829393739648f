//! Adagrad with state of 8 bits on safe slices, without a plan or a backend.

use fusestep_elementwise::coded_slices;

use crate::Adagrad;

coded_slices! {
    /// Lists of one parameter with state of 8 bits. All have the same numel; 0 is allowed.
    pub struct CodedAdagradTensors of Adagrad {
        /// s, in codes of its root; zeros before step 1, which adds the initial value.
        sum,
    }
    /// ```text
    /// g ← g + λ·p        s ← s + g²
    /// p ← p − lr / (1 + (t − 1)·lr_decay) · g / (√s + ε)
    /// ```
    ///
    /// # Cost
    /// 14.25 bytes of memory traffic per element with parameters of f32, 8.25 with bf16, 10.25
    /// with bf16 and a remainder of 8 bits.
    /// # Source
    /// As [`Adagrad::step`]; the codes are those of [`fusestep_elementwise::coded`].
    step_coded
}

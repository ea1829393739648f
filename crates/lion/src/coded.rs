//! Lion with state of 8 bits on safe slices, without a plan or a backend.

use fusestep_elementwise::coded_slices;

use crate::Lion;

coded_slices! {
    /// Lists of one parameter with state of 8 bits. All have the same numel; 0 is allowed.
    pub struct CodedLionTensors of Lion {
        /// m, in signed codes; zeros before step 1.
        moment1,
    }
    /// ```text
    /// p ← p·(1 − lr·λ) − lr·sign(β₁·m + (1 − β₁)·g)        sign(0) = 0
    /// m ← β₂·m + (1 − β₂)·g
    /// ```
    ///
    /// Every step is alike.
    /// # Cost
    /// 14.25 bytes of memory traffic per element with parameters of f32, 8.25 with bf16, 10.25
    /// with bf16 and a remainder of 8 bits.
    /// # Source
    /// As [`Lion::step`]; the codes are those of [`fusestep_elementwise::coded`].
    step_coded
}

//! LARS with state of 8 bits on safe slices, without a plan or a backend.

use fusestep_elementwise::coded_normed_slices;

use crate::Lars;

coded_normed_slices! {
    pub struct CodedLarsTensors of Lars {
        /// u, in signed codes; zeros before step 1.
        velocity,
    }
    /// ```text
    /// P = ‖p‖        G = rescale·‖g‖
    /// local = lr·η·P / (G + λ·P + ε) if trusted, P > 0 and G > 0, else lr
    /// u ← μ·u + local·(rescale·g + λ·p)        p ← p − u
    /// ```
    ///
    /// Every step is alike.
    /// # Cost
    /// 14.25 bytes of memory traffic per element with parameters of f32, 8.25 with bf16, 10.25
    /// with bf16 and a remainder of 8 bits. p and g are read again if a tensor exceeds the cache.
    /// # Source
    /// As [`Lars::step`]; the codes are those of [`fusestep_elementwise::coded`].
    step_coded
}

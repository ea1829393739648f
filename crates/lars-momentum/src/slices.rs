//! LARS on safe slices, without a plan or a backend.

use fusestep_elementwise::normed_slices;

use crate::Lars;

normed_slices! {
    pub struct LarsTensors of Lars {
        /// u, updated in place; zeros before the first step.
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
    /// 20 bytes of memory traffic per f32 element, 28 if a tensor exceeds the cache.
    /// # Source
    /// You, Gitman & Ginsburg 2017, arXiv:1708.03888; lr is inside of the velocity.
    step()
}

//! The role of launches, which every backend has.

use fusestep_simd::Level;

use crate::{
    BackendError, Conclude, LEAF_ELEMENTS, Launch, LaunchReport, LeafSquares, MAX_SUMS, Memory,
    Reduce, SquareSum,
};

/// Launches of kernels on a backend's own memory, and sums whose values the host is told.
pub trait Launches: Memory {
    /// Runs all batches of `launch`; on a device it returns when they are enqueued.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the device's own code.
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError>;

    /// Sums all chunks of `reduce`; on a device it returns when the launches are enqueued.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if the partial sums do not fit; [`BackendError::Device`] with
    /// the device's own code.
    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError>;

    /// Writes the control block from all partial sums; on a device it returns when the launch is
    /// enqueued.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if a buffer is too short; [`BackendError::Device`] with the
    /// device's own code.
    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError>;

    /// The sum of squares of every leaf, in the order of the records; a record has `⌈numel / 1024⌉`
    /// leaves.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if `sums` has another length or the list is too short.
    fn leaf_squares(
        &self,
        leaves: LeafSquares<'_>,
        sums: &mut [SquareSum],
    ) -> Result<(), BackendError> {
        let (level, width) = (Level::detect(), leaves.list.dtype().len_bytes());
        let mut bytes = vec![0; LEAF_ELEMENTS as usize * width];
        let mut places = sums.iter_mut();
        for (first, numel) in leaves.places() {
            let Some(sum) = places.next() else {
                return Err(BackendError::OutOfBounds {
                    backend: self.name(),
                    offset_bytes: 0,
                    len_bytes: leaves.places().count() * size_of::<SquareSum>(),
                    found: size_of_val(sums),
                });
            };
            let leaf = &mut bytes[..numel as usize * width];
            self.read(leaves.list.buffer.as_ref(), first as usize * width, leaf)?;
            *sum = leaves.kernel.run_host(level, leaf);
        }
        Ok(())
    }

    /// The sums over every leaf that the launch's kernel takes before an update, in the order of
    /// the records.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a kernel that takes no sums; as
    /// [`Launches::leaf_squares`].
    fn leaf_sums(
        &self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError>;

    /// Tensors that kernels have skipped since the last call because a norm was not finite; a
    /// device is waited for.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the device's own code.
    fn take_skipped(&self) -> Result<u64, BackendError>;

    /// Tensors that kernels have skipped since the backend was made, as far as the host knows
    /// without waiting: 0 on a device.
    fn skipped(&self) -> u64;
}

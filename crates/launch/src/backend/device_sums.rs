//! The role of sums that stay on a device, so that the host waits for none of them.

use crate::{Accumulate, BackendError, Buffer, FoldLeaves, Launch, LeafSquares};

/// Sums into memory of the device. Every call returns when its launches are enqueued.
pub trait DeviceSums {
    /// Adds up gradients over micro-steps. Those in host memory are summed in place, without this
    /// call.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`], [`BackendError::Device`]; [`BackendError::Unavailable`] for a
    /// type that has no sums.
    fn add_gradients(&self, sums: Accumulate<'_>) -> Result<(), BackendError>;

    /// [`Launches::leaf_squares`](crate::Launches::leaf_squares) into memory of the device, from
    /// sum `first` on.
    ///
    /// # Errors
    /// As [`Launches::leaf_squares`](crate::Launches::leaf_squares).
    fn leaf_squares_into(
        &self,
        leaves: LeafSquares<'_>,
        into: &mut dyn Buffer,
        first: u64,
    ) -> Result<(), BackendError>;

    /// [`Launches::leaf_sums`](crate::Launches::leaf_sums) into memory of the device, for records
    /// of at most [`crate::CHUNK_UNITS`] leaves. The first record's sums go to row `first` of
    /// [`crate::ROW_VALUES`] f64, each further record's to the next row, one leaf behind the other
    /// ([`crate::leaf_place`]). Nothing is written if the control block stops the step.
    ///
    /// # Errors
    /// As [`DeviceSums::leaf_squares_into`].
    fn leaf_sums_into(
        &self,
        launch: &Launch<'_>,
        rows: &mut dyn Buffer,
        first: u64,
    ) -> Result<(), BackendError>;

    /// Folds sums over leaves into those over chunks, in the fixed tree.
    ///
    /// # Errors
    /// As [`Launches::reduce`](crate::Launches::reduce).
    fn fold_leaves(&self, fold: FoldLeaves<'_>) -> Result<(), BackendError>;
}

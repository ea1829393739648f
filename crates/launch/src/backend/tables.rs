//! The role of resident tables: batches of any length that lie on a device from step to step.

use crate::{BackendError, Buffer, GroupValues, Launch, LaunchReport, Reduce, ResidentTable};

/// Tables in memory of the device, and the launches that run from them.
pub trait Tables {
    /// Builds the tables of a launch; `values` are the groups' hyper-parameters at the next step.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a kernel that derives no step scalars, and else as
    /// [`Launches::launch`](crate::Launches::launch); [`BackendError::OutOfMemory`].
    /// # Cost
    /// Linear in tensors and chunks, and waits for a device: once per plan, not per step.
    fn place_table(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
    ) -> Result<Box<dyn ResidentTable>, BackendError>;

    /// Runs the launch that `table` was built from. The device counts a step, derives the step
    /// scalars and updates, unless the control block skips the step. The host's work does not grow
    /// with the number of tensors.
    ///
    /// # Errors
    /// [`BackendError::ForeignTable`] if the table was built from other lists or another control
    /// block; [`BackendError::Device`].
    fn launch_table(
        &self,
        launch: Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError>;

    /// Changes the learning rate that a table derives its step scalars from, from the next launch
    /// on: one write of 8 bytes per batch.
    ///
    /// # Errors
    /// [`BackendError::ForeignTable`]; [`BackendError::Device`].
    fn set_table_lr(&self, table: &mut dyn ResidentTable, lr: f64) -> Result<(), BackendError>;

    /// Builds the tables of a reduction; as [`Tables::place_table`].
    ///
    /// # Errors
    /// As [`Launches::reduce`](crate::Launches::reduce); [`BackendError::OutOfMemory`].
    fn place_reduction(&self, reduce: &Reduce<'_>) -> Result<Box<dyn ResidentTable>, BackendError>;

    /// Runs the reduction that `table` was built from.
    ///
    /// # Errors
    /// As [`Tables::launch_table`].
    fn reduce_table(
        &self,
        reduce: Reduce<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError>;

    /// Builds the tables of [`DeviceSums::leaf_sums_into`](crate::DeviceSums::leaf_sums_into); as
    /// [`Tables::place_table`].
    ///
    /// # Errors
    /// As [`DeviceSums::leaf_sums_into`](crate::DeviceSums::leaf_sums_into) and
    /// [`Tables::place_table`].
    fn place_leaf_sums(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
        rows: &dyn Buffer,
        first: u64,
    ) -> Result<Box<dyn ResidentTable>, BackendError>;

    /// Takes the sums that `table` was built for; as [`Tables::launch_table`].
    ///
    /// # Errors
    /// As [`Tables::launch_table`].
    fn leaf_sums_of_table(
        &self,
        launch: &Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<(), BackendError>;
}

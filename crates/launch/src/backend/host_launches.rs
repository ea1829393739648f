//! The role of launches in the host's memory, where ranks see each other's gradients.

use crate::{BackendError, Launch, LaunchReport, Launches, Replicas};

/// Launches in the host's memory. They take any [`crate::Buffer`] that the host can write, whoever
/// allocated it.
pub trait HostLaunches: Launches {
    /// Averages gradients over all ranks, updates from the averages, and writes new values to all
    /// ranks that keep them. This takes one pass, and the averages are never written. The launch's
    /// own list of gradients is not used, and neither are lists that `replicas` has.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a kernel that takes sums over tensors.
    fn launch_reduced(
        &self,
        launch: Launch<'_>,
        replicas: Replicas<'_, '_, '_>,
    ) -> Result<LaunchReport, BackendError>;
}

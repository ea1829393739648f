//! Why a launch could not be put together.

/// Error of tensors that could not be put into launches.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Not even one tensor fits into the argument bytes.
    #[error(
        "argument block of `{kernel}`: expected at least {expected} bytes for one tensor, found a \
         limit of {found}; raise the argument bytes"
    )]
    LimitTooSmall {
        /// The kernel's entry.
        kernel: String,
        /// Bytes that one tensor needs.
        expected: usize,
        /// The limit given.
        found: usize,
    },
    /// Tensors would be cut into more launches than a plan can hold.
    #[error(
        "launches of `{kernel}`: expected at most {expected}, found more; raise the chunks of a \
         launch or their elements"
    )]
    TooMany {
        /// The kernel's entry.
        kernel: String,
        /// Most launches.
        expected: usize,
    },
    /// A limit that must be at least 1 is 0.
    #[error("{what}: expected at least 1, found 0")]
    ZeroLimit {
        /// Which limit.
        what: &'static str,
    },
}

//! The number of tensors that fit into one launch, computed from bytes.

use crate::LaunchError;

/// Argument bytes that every CUDA device and driver takes; a cap for a small plan or a test.
pub const ARGUMENT_BYTES_CLASSIC: usize = 4096;

/// Argument bytes from driver 530 and compute capability 7.0 on.
pub const ARGUMENT_BYTES_LARGE: usize = 32_764;

/// Most elements of one chunk, the work of one block.
pub const CHUNK_ELEMENTS: u32 = 65_536;

/// Bytes before the scalars: record count, group count, chunk elements, flags and the address of
/// the control block.
pub const HEADER_BYTES: usize = 24;

/// Bytes of a record besides its addresses: numel, first chunk, group and padding.
const RECORD_FIXED_BYTES: usize = 16;

const ADDRESS_BYTES: usize = 8;

// The record's fixed part keeps every following record aligned to 8 bytes, which the device relies
// on.
const _: () = assert!(
    HEADER_BYTES.is_multiple_of(8)
        && RECORD_FIXED_BYTES.is_multiple_of(8)
        && ADDRESS_BYTES.is_multiple_of(8)
);

/// Limits of one launch. Each is a parameter, so that small tests cross it; none changes a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LaunchLimits {
    /// Bytes of by-value arguments; 32,764 by default, see [`ARGUMENT_BYTES_CLASSIC`] and
    /// [`ARGUMENT_BYTES_LARGE`].
    pub argument_bytes: usize,
    /// Elements of a full chunk; [`CHUNK_ELEMENTS`] by default.
    pub chunk_elements: u32,
    /// Most chunks of one launch; 2^31 − 1, CUDA's limit on the grid, by default.
    pub chunks_per_launch: u32,
    /// Whether the backend's memory may hold the table of a launch ([`crate::Tables`]), as that of
    /// a GPU does; false by default. A plan then chooses where tables lie.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "std::ops::Not::not"))]
    pub keeps_tables: bool,
}

impl Default for LaunchLimits {
    fn default() -> Self {
        Self {
            argument_bytes: ARGUMENT_BYTES_LARGE,
            chunk_elements: CHUNK_ELEMENTS,
            chunks_per_launch: i32::MAX as u32,
            keeps_tables: false,
        }
    }
}

impl LaunchLimits {
    /// The default limits with this many argument bytes.
    pub fn with_argument_bytes(argument_bytes: usize) -> Self {
        Self { argument_bytes, ..Self::default() }
    }

    /// Refuses limits of 0.
    ///
    /// # Errors
    /// [`LaunchError::ZeroLimit`] naming the limit.
    pub fn validate(&self) -> Result<(), LaunchError> {
        for (what, value) in
            [("chunk elements", self.chunk_elements), ("chunks per launch", self.chunks_per_launch)]
        {
            if value == 0 {
                return Err(LaunchError::ZeroLimit { what });
            }
        }
        Ok(())
    }

    /// The limits for launches that leave sums over what they change, whatever the kernel.
    pub fn measured(self) -> Self {
        Self { chunk_elements: CHUNK_ELEMENTS, ..self }
    }
}

/// The sizes that decide how many tensors one argument block carries.
///
/// ```text
/// header (24) | scalars | step scalars of group₀, group₁ … | record₀ record₁ …
/// record = { u64 address[lists]; u64 numel; u32 first_chunk; u16 group; u16 reserved }
/// ```
///
/// There is no table of blocks: `first_chunk` is the prefix sum of chunk counts, and a block finds
/// its record in it by binary search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ArgumentLayout {
    /// Words of a record besides its numel and place: one address for each tensor list, and
    /// [`crate::ORIGIN_WORDS`] behind them for a kernel that rounds at random.
    pub lists: usize,
    /// Bytes of the scalars shared by all tensors; a multiple of 8.
    pub scalar_bytes: usize,
    /// Bytes of the step scalars of one group; a multiple of 8.
    pub step_scalar_bytes: usize,
}

impl ArgumentLayout {
    /// Bytes of one record.
    pub const fn record_bytes(&self) -> usize {
        self.lists * ADDRESS_BYTES + RECORD_FIXED_BYTES
    }

    /// Bytes of an argument block of `records` records that refer to `groups` groups.
    pub const fn bytes(&self, records: usize, groups: usize) -> usize {
        HEADER_BYTES
            + self.scalar_bytes
            + groups * self.step_scalar_bytes
            + records * self.record_bytes()
    }

    /// The per-launch limit: most records of `groups` groups in `argument_bytes`.
    pub const fn records_per_launch(&self, argument_bytes: usize, groups: usize) -> usize {
        argument_bytes.saturating_sub(self.bytes(0, groups)) / self.record_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adam_fits_84_tensors_into_4096_bytes_and_681_into_32764() {
        let adam = ArgumentLayout { lists: 4, scalar_bytes: 24, step_scalar_bytes: 16 };
        assert_eq!(adam.record_bytes(), 48);
        assert_eq!(adam.records_per_launch(ARGUMENT_BYTES_CLASSIC, 1), 84);
        assert_eq!(adam.records_per_launch(ARGUMENT_BYTES_LARGE, 1), 681);
        assert_eq!(adam.records_per_launch(0, 1), 0);
        assert!(adam.bytes(84, 1) <= ARGUMENT_BYTES_CLASSIC);
        assert!(adam.bytes(85, 1) > ARGUMENT_BYTES_CLASSIC);
    }
}

//! Offsets on paper: pure arithmetic, equal on every backend.

/// Slots are padded to a multiple of this many bytes, on the CPU as on a GPU, so that buffers and
/// checkpoints are portable.
pub const SLOT_BYTES: u64 = 256;

/// The padding of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "serde"), derive(serde::Serialize, serde::Deserialize))]
pub struct LayoutOptions {
    /// Slots are padded to a multiple of this many bytes: a power of two, and a multiple of
    /// `unit_bytes`. 1 stands for no padding. [`SLOT_BYTES`] by default.
    pub slot_bytes: u64,
    /// Element width that the padding is computed with. Layouts of different dtypes computed with
    /// one width have equal element offsets; take the narrowest, and every buffer's slots are
    /// aligned to `slot_bytes` or more.
    pub unit_bytes: u64,
}

impl LayoutOptions {
    /// Padding to [`SLOT_BYTES`], computed for elements of `unit_bytes` bytes.
    pub fn new(unit_bytes: usize) -> Self {
        Self { slot_bytes: SLOT_BYTES, unit_bytes: unit_bytes as u64 }
    }
}

/// Layout of many tensors one behind the other in one buffer, each in a padded slot.
///
/// ```text
/// offset₀ = 0        offsetᵢ₊₁ = offsetᵢ + ⌈numelᵢ·unit / slot⌉·slot / unit
/// ```
///
/// `slot` and `unit` are the bytes [`LayoutOptions::slot_bytes`] and [`LayoutOptions::unit_bytes`].
///
/// # Shapes
/// Offsets and lengths are in elements. An empty tensor has a slot of length 0 and an empty view.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "serde"), derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(any(test, feature = "serde"), serde(try_from = "UncheckedLayout"))]
pub struct FlatLayout {
    options: LayoutOptions,
    numels: Vec<u64>,
    /// First element of each tensor, and the length of the whole as the last entry.
    offsets: Vec<u64>,
}

/// A layout as it was read, before its offsets are checked.
#[cfg(any(test, feature = "serde"))]
#[derive(serde::Deserialize)]
struct UncheckedLayout {
    options: LayoutOptions,
    numels: Vec<u64>,
    offsets: Vec<u64>,
}

#[cfg(any(test, feature = "serde"))]
impl TryFrom<UncheckedLayout> for FlatLayout {
    type Error = CoalesceError;

    /// Checks the offsets, which follow from the rest. Other offsets would let tensors overlap or
    /// lie outside of their memory.
    fn try_from(found: UncheckedLayout) -> Result<Self, CoalesceError> {
        let layout = Self::new(found.numels, found.options)?;
        let differs = |at: &usize| layout.offsets.get(*at) != found.offsets.get(*at);
        let count = layout.offsets.len().max(found.offsets.len());
        match (0..count).find(differs) {
            None => Ok(layout),
            Some(tensor) => Err(CoalesceError::Offset {
                tensor,
                expected: layout.offsets.get(tensor).copied(),
                found: found.offsets.get(tensor).copied(),
            }),
        }
    }
}

impl FlatLayout {
    /// Lays out tensors of these element counts, in this order.
    ///
    /// # Errors
    /// [`CoalesceError::SlotBytes`] if the slot is no power of two or no multiple of the unit;
    /// [`CoalesceError::Overflow`] naming the first tensor at which the buffer would exceed
    /// 2^63 − 1 bytes.
    /// # Cost
    /// Linear in the number of tensors.
    pub fn new(
        numels: impl IntoIterator<Item = u64>,
        options: LayoutOptions,
    ) -> Result<Self, CoalesceError> {
        let LayoutOptions { slot_bytes, unit_bytes } = options;
        let padded = slot_bytes > 1;
        if unit_bytes == 0
            || !slot_bytes.is_power_of_two()
            || (padded && !slot_bytes.is_multiple_of(unit_bytes))
        {
            return Err(CoalesceError::SlotBytes { slot_bytes, unit_bytes });
        }
        let slot = if padded { slot_bytes / unit_bytes } else { 1 };
        let numels: Vec<u64> = numels.into_iter().collect();
        let mut offsets = Vec::with_capacity(numels.len() + 1);
        let mut end = 0u64;
        offsets.push(end);
        for (tensor, &numel) in numels.iter().enumerate() {
            end = numel
                .checked_next_multiple_of(slot)
                .and_then(|slot_numel| end.checked_add(slot_numel))
                // Widest element: f64. A layout that fits it can hold any dtype's buffer.
                .filter(|end| end.checked_mul(8).is_some_and(|bytes| bytes <= i64::MAX as u64))
                .ok_or(CoalesceError::Overflow { tensor, numel })?;
            offsets.push(end);
        }
        Ok(Self { options, numels, offsets })
    }

    /// Number of tensors.
    pub fn tensors(&self) -> usize {
        self.numels.len()
    }

    /// Element count of the whole buffer, padding included.
    pub fn total_numel(&self) -> u64 {
        self.offsets[self.numels.len()]
    }

    /// Element count of all tensors without padding.
    pub fn tensor_numel(&self) -> u64 {
        self.numels.iter().sum()
    }

    /// Element count of tensor `index`.
    pub fn numel(&self, index: usize) -> u64 {
        self.numels[index]
    }

    /// First element of tensor `index`.
    pub fn offset(&self, index: usize) -> u64 {
        self.offsets[index]
    }

    /// First element of every tensor, and the length of the whole as the last entry.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// The elements of tensor `index`, without padding.
    pub fn range(&self, index: usize) -> std::ops::Range<u64> {
        self.offsets[index]..self.offsets[index] + self.numels[index]
    }

    /// The padding of slots.
    pub fn options(&self) -> LayoutOptions {
        self.options
    }
}

/// Error of tensors that could not be coalesced. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoalesceError {
    /// The slot is no power of two, or no multiple of the unit.
    #[error(
        "slot of {slot_bytes} bytes: expected a power of two that is a multiple of the \
         {unit_bytes}-byte unit; 256 works for every dtype"
    )]
    SlotBytes {
        /// The slot given.
        slot_bytes: u64,
        /// The unit given.
        unit_bytes: u64,
    },
    /// The buffer would be too long.
    #[error(
        "tensor {tensor} of {numel} elements: expected the buffer to stay below 2^63 bytes, found \
         more; split the tensors over several buffers"
    )]
    Overflow {
        /// Position of the tensor.
        tensor: usize,
        /// Element count of the tensor.
        numel: u64,
    },
    /// A layout that was read does not follow from its own tensors.
    #[error(
        "offset {tensor}: expected {expected:?} as the tensors before it say, found {found:?}; \
         lay the tensors out anew"
    )]
    Offset {
        /// Position of the tensor.
        tensor: usize,
        /// The offset that follows from the tensors; `None` if the layout should end before it.
        expected: Option<u64>,
        /// The offset that was read; `None` if too few were read.
        found: Option<u64>,
    },
    /// Memory from elsewhere begins at an address that no buffer may begin at.
    #[error("expected memory that begins at a multiple of 256 bytes, found address {address:#x}")]
    Misaligned {
        /// Address of the first byte.
        address: usize,
    },
    /// Memory for the buffer could not be allocated.
    #[error("coalesced buffer: expected {len_bytes} bytes of memory, found less")]
    OutOfMemory {
        /// Bytes asked for.
        len_bytes: u64,
    },
    /// The number of tensors differs from the layout's.
    #[error(
        "expected {expected} tensors, found {found}; give one slice for each tensor of the layout"
    )]
    TensorCount {
        /// Tensors of the layout.
        expected: usize,
        /// Tensors given.
        found: usize,
    },
    /// A tensor's element count differs from the layout's.
    #[error("tensor {tensor}: expected {expected} elements, found {found}")]
    NumelMismatch {
        /// Position of the tensor.
        tensor: usize,
        /// The layout's element count.
        expected: u64,
        /// The slice's element count.
        found: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMELS: [u64; 6] = [60, 20, 1, 6000, 30, 1];

    fn lengths(options: LayoutOptions) -> Vec<u64> {
        let layout = FlatLayout::new(NUMELS, options).unwrap();
        layout.offsets().windows(2).map(|w| w[1] - w[0]).collect()
    }

    #[test]
    fn slots_are_padded_as_specified() {
        let options = |slot_bytes, unit_bytes| LayoutOptions { slot_bytes, unit_bytes };
        assert_eq!(lengths(options(256, 4)), [64, 64, 64, 6016, 64, 64]);
        assert_eq!(lengths(options(256, 2)), [128, 128, 128, 6016, 128, 128]);
        assert_eq!(lengths(options(4096, 4)), [1024, 1024, 1024, 6144, 1024, 1024]);
        assert_eq!(lengths(options(1, 4)), NUMELS);
        let total = |options| FlatLayout::new(NUMELS, options).unwrap().total_numel();
        assert_eq!(total(options(256, 4)), 6336);
        assert_eq!(total(options(256, 2)), 6656);
        assert_eq!(total(options(4096, 4)), 11264);
        assert_eq!(total(options(1, 4)), 6112);
        let layout = FlatLayout::new(NUMELS, options(4096, 4)).unwrap();
        assert_eq!(layout.tensor_numel(), 6112);
    }

    #[test]
    fn exact_multiples_are_not_padded_and_empty_tensors_take_no_place() {
        let layout = FlatLayout::new([64, 0, 65, 0], LayoutOptions::new(4)).unwrap();
        assert_eq!(layout.offsets(), [0, 64, 64, 192, 192]);
        assert_eq!(layout.range(3), 192..192);
        assert_eq!(FlatLayout::new([], LayoutOptions::new(4)).unwrap().total_numel(), 0);
    }

    #[test]
    fn bad_slots_and_overflow_are_refused() {
        for (slot_bytes, unit_bytes) in [(0, 4), (3, 1), (256, 0), (2, 4), (256, 3)] {
            let options = LayoutOptions { slot_bytes, unit_bytes };
            assert!(FlatLayout::new([1], options).is_err(), "{options:?}");
        }
        for numels in [vec![u64::MAX], vec![1 << 59, 1 << 59, 1 << 59], vec![5, 1 << 60]] {
            let error = FlatLayout::new(numels.clone(), LayoutOptions::new(4)).unwrap_err();
            assert!(matches!(error, CoalesceError::Overflow { .. }), "{numels:?}");
        }
    }

    #[test]
    fn layouts_that_are_read_are_checked() {
        let layout = FlatLayout::new([64, 0, 65], LayoutOptions::new(4)).unwrap();
        let text = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<FlatLayout>(&text).unwrap(), layout);
        for (from, to, message) in [
            ("[0,64,64,192]", "[0,32,64,192]", "offset 1: expected Some(64)"),
            ("[0,64,64,192]", "[0,64,64]", "offset 3: expected Some(192)"),
            ("[0,64,64,192]", "[0,64,64,192,999]", "offset 4: expected None"),
            ("[64,0,65]", "[64,0,18446744073709551615]", "tensor 2 of"),
            ("256", "3", "slot of 3 bytes"),
        ] {
            assert!(text.contains(from), "{text}");
            let error =
                serde_json::from_str::<FlatLayout>(&text.replacen(from, to, 1)).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}

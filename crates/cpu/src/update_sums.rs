//! Places for the sums over the changes of a launch, cut in the same way as its work.

use fusestep_launch::{BackendError, CHUNK_ELEMENTS, UnitSums, UpdateSums};

use crate::errors::{FOREIGN, NAME, out_of_bounds};

/// Rows of sums for consecutive chunks of a storage.
pub(crate) struct Rows<'a> {
    rows: &'a mut [UnitSums],
    /// Row of each tensor's first chunk, and one past the last tensor's, in the whole storage.
    firsts: &'a [u64],
    /// Number of the first of `rows` in the whole storage.
    first: u64,
}

impl<'a> Rows<'a> {
    /// The rows of a launch over tensors at `offsets`.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if there are fewer rows than the tensors have chunks.
    pub(crate) fn new(sums: UpdateSums<'a>, offsets: &[u64]) -> Result<Self, BackendError> {
        let found = sums.rows.len_bytes();
        let bytes = sums.rows.host_mut().ok_or(FOREIGN)?;
        let whole = bytes.len() / size_of::<UnitSums>() * size_of::<UnitSums>();
        let rows: &mut [UnitSums] = bytemuck::cast_slice_mut(&mut bytes[..whole]);
        let expected = match sums.firsts.last() {
            Some(&end) if sums.firsts.len() >= offsets.len() => end as usize,
            _ => usize::MAX,
        };
        if rows.len() < expected {
            let len_bytes = expected.saturating_mul(size_of::<UnitSums>());
            return Err(out_of_bounds(0, len_bytes, found));
        }
        Ok(Self { rows, firsts: sums.firsts, first: 0 })
    }

    /// Cuts the rows into those of chunks that start before storage element `at`, and the others.
    pub(crate) fn cut(self, offsets: &[u64], at: u64) -> (Self, Self) {
        let Self { rows, firsts, first } = self;
        let middle = self::row(offsets, firsts, at).max(first);
        let count = (middle - first).min(rows.len() as u64);
        let (left, right) = rows.split_at_mut(count as usize);
        let part = |rows, first| Rows { rows, firsts, first };
        (part(left, first), part(right, middle))
    }

    /// The rows of `numel` elements from storage element `start` on, all of one tensor.
    pub(crate) fn of(
        &mut self,
        offsets: &[u64],
        start: u64,
        numel: usize,
    ) -> Option<&mut [UnitSums]> {
        let chunks = numel.div_ceil(CHUNK_ELEMENTS as usize);
        let from = row(offsets, self.firsts, start).checked_sub(self.first)? as usize;
        self.rows.get_mut(from..)?.get_mut(..chunks)
    }

    /// The rows of `numel` elements of a tensor from `first_element` on, which is the start of a
    /// chunk.
    pub(crate) fn of_part(
        &mut self,
        tensor: u32,
        first_element: u64,
        numel: u64,
    ) -> Option<&mut [UnitSums]> {
        let chunk = u64::from(CHUNK_ELEMENTS);
        let from = self.firsts.get(tensor as usize)? + first_element / chunk;
        let from = from.checked_sub(self.first)? as usize;
        self.rows.get_mut(from..)?.get_mut(..numel.div_ceil(chunk) as usize)
    }
}

/// The first row of the chunks that start at storage element `at` or behind it.
fn row(offsets: &[u64], firsts: &[u64], at: u64) -> u64 {
    let behind = offsets.partition_point(|&offset| offset < at);
    let end = firsts.get(behind).or(firsts.last());
    let end = end.copied().unwrap_or(0);
    let Some(tensor) = behind.checked_sub(1) else {
        return end;
    };
    let chunks = (at - offsets[tensor]).div_ceil(u64::from(CHUNK_ELEMENTS));
    (firsts[tensor] + chunks).min(end)
}

/// The rows of a launch, if it has any. `starts` are the first elements, within their tensors, of
/// the launch's records.
///
/// # Errors
/// Those of [`Rows::new`]; [`BackendError::Unavailable`] if a record begins within a chunk, whose
/// sum would then come from several launches.
pub(crate) fn rows<'a>(
    sums: Option<UpdateSums<'a>>,
    offsets: &[u64],
    mut starts: impl Iterator<Item = u64>,
) -> Result<Option<Rows<'a>>, BackendError> {
    let Some(sums) = sums else { return Ok(None) };
    let chunk = u64::from(CHUNK_ELEMENTS);
    if let Some(start) = starts.find(|start| !start.is_multiple_of(chunk)) {
        return Err(BackendError::Unavailable {
            backend: NAME,
            reason: format!(
                "expected records that begin with a chunk of {chunk} elements for sums over what \
                 is changed, found one that begins with element {start} of its tensor; make \
                 batches with `limits.measured()` and cut shards at chunks"
            ),
        });
    }
    Rows::new(sums, offsets).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_found_by_element_and_cut_between_tensors() {
        let chunk = u64::from(CHUNK_ELEMENTS);
        // 2 chunks, none, 1, 3; with padding behind the first.
        let offsets = [0, 2 * chunk, 2 * chunk, 2 * chunk + 64, 5 * chunk + 64];
        let firsts = [0, 2, 2, 3, 6];
        for (at, expected) in [
            (0, 0),
            (1, 1),
            (chunk, 1),
            (chunk + 1, 2),
            (2 * chunk, 2),
            (2 * chunk + 1, 3),
            (2 * chunk + 64, 3),
            (2 * chunk + 65, 4),
            (3 * chunk + 64, 4),
            (5 * chunk + 64, 6),
            (9 * chunk, 6),
        ] {
            assert_eq!(row(&offsets, &firsts, at), expected, "{at}");
        }
    }
}

//! Heaps: each rank gives out places in its own part of the segment, so that no process waits for
//! another.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusestep_coalesce::MemoryOwner;

use crate::segment::{HUGE_PAGE_BYTES, PAGE_BYTES, Segment};

/// Free places in the part of one rank.
#[derive(Debug)]
pub(crate) struct Heap {
    segment: Arc<Segment>,
    /// Free places in the first file and in the second: their offsets and lengths.
    free: Mutex<[BTreeMap<u64, u64>; 2]>,
}

impl Heap {
    /// A heap with one free place in each file: offset and length.
    pub(crate) fn new(segment: Arc<Segment>, parts: [(u64, u64); 2]) -> Self {
        let free = parts.map(|part| BTreeMap::from_iter((part.1 > 0).then_some(part)));
        Self { segment, free: Mutex::new(free) }
    }

    /// Zeroed memory, in the first file if there is room, else in the second.
    pub(crate) fn allocate(self: &Arc<Self>, len_bytes: usize) -> io::Result<Arena> {
        let too_long = || io::Error::from(io::ErrorKind::OutOfMemory);
        let asked = len_bytes as u64;
        let alignment = if asked < HUGE_PAGE_BYTES { PAGE_BYTES } else { HUGE_PAGE_BYTES };
        let place_bytes = asked.checked_next_multiple_of(alignment);
        let place_bytes = place_bytes.ok_or_else(too_long)?.max(PAGE_BYTES);
        let mut reason = too_long();
        for file in 0..2 {
            let Some(offset) = take(&mut self.lock()[file], place_bytes, alignment) else {
                continue;
            };
            match self.segment.reserve(offset, place_bytes) {
                Ok(()) => {
                    return Ok(Arena {
                        heap: Arc::clone(self),
                        offset,
                        place_bytes,
                        len_bytes,
                        is_left: false,
                    });
                }
                Err(error) => {
                    put(&mut self.lock()[file], offset, place_bytes);
                    reason = error;
                }
            }
        }
        Err(reason)
    }

    fn lock(&self) -> MutexGuard<'_, [BTreeMap<u64, u64>; 2]> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the first place that is long enough.
fn take(free: &mut BTreeMap<u64, u64>, len: u64, alignment: u64) -> Option<u64> {
    let fits = free.iter().find_map(|(&start, &free)| {
        let aligned = start.checked_next_multiple_of(alignment)?;
        let end = start + free;
        (aligned.checked_add(len)? <= end).then_some((start, aligned, end))
    });
    let (start, aligned, end) = fits?;
    free.remove(&start);
    if aligned > start {
        free.insert(start, aligned - start);
    }
    if end > aligned + len {
        free.insert(aligned + len, end - aligned - len);
    }
    Some(aligned)
}

/// Puts a place back and joins it with its neighbours.
fn put(free: &mut BTreeMap<u64, u64>, mut start: u64, mut len: u64) {
    if let Some((&before, &bytes)) = free.range(..start).next_back()
        && before + bytes == start
    {
        free.remove(&before);
        (start, len) = (before, len + bytes);
    }
    if let Some(after) = free.remove(&(start + len)) {
        len += after;
    }
    free.insert(start, len);
}

/// Memory of this process that other ranks see, too; they use it in calls only.
pub(crate) struct Arena {
    heap: Arc<Heap>,
    offset: u64,
    place_bytes: u64,
    len_bytes: usize,
    is_left: bool,
}

impl Arena {
    /// Offset of the memory in the segment.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Leaves the memory as it is, for ranks that still use it. It ends with the segment, when the
    /// last of these ranks has unmapped it.
    pub(crate) fn leave(mut self) {
        self.is_left = true;
    }
}

impl MemoryOwner for Arena {
    fn bytes(&self) -> &[u8] {
        let start = self.heap.segment.address(self.offset, self.len_bytes);
        // SAFETY: inside of a mapping that the heap keeps. The place is this arena's alone: `take`
        // gives none out twice, and other ranks touch it only while this one is in a call that has
        // borrowed it (`round`).
        unsafe { std::slice::from_raw_parts(start, self.len_bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.heap.segment.address(self.offset, self.len_bytes);
        // SAFETY: as in `bytes`; `&mut self` makes it the only use in this process.
        unsafe { std::slice::from_raw_parts_mut(start, self.len_bytes) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        let heap = &self.heap;
        heap.segment.release(self.offset, self.place_bytes);
        let file = usize::from(self.offset >= heap.segment.first_bytes());
        put(&mut heap.lock()[file], self.offset, self.place_bytes);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("offset", &self.offset)
            .field("len_bytes", &self.len_bytes)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_aligned_do_not_overlap_and_become_one_again() {
        let mut free = BTreeMap::from([(4096, 1 << 20)]);
        let small = take(&mut free, 4096, 4096).unwrap();
        let aligned = take(&mut free, 8192, 1 << 16).unwrap();
        let next = take(&mut free, 4096, 4096).unwrap();
        assert_eq!((small, aligned, next), (4096, 1 << 16, 8192));
        assert_eq!(take(&mut free, 1 << 20, 4096), None);
        put(&mut free, aligned, 8192);
        put(&mut free, small, 4096);
        put(&mut free, next, 4096);
        assert_eq!(free, BTreeMap::from([(4096, 1 << 20)]));
    }

    #[test]
    fn memory_is_zeroed_goes_to_the_second_file_and_ends() {
        let files: Vec<_> = [1u64 << 16, 1 << 23]
            .map(|len| {
                let file = tempfile::tempfile().unwrap();
                file.set_len(len).unwrap();
                file
            })
            .into();
        let segment = Arc::new(Segment::map(files).unwrap());
        let heap = Arc::new(Heap::new(segment, [(0, 1 << 16), (1 << 16, 1 << 23)]));
        let mut first = heap.allocate(5000).unwrap();
        assert_eq!((first.bytes().len(), first.offset()), (5000, 0));
        first.bytes_mut().fill(7);
        let second = heap.allocate(3 << 20).unwrap();
        assert!(second.offset() >= 1 << 16);
        assert!(second.bytes().iter().all(|&byte| byte == 0));
        assert!(heap.allocate(6 << 20).is_err());
        assert!(heap.allocate(usize::MAX).is_err());
        drop((first, second));
        let again = heap.allocate(5000).unwrap();
        assert!(again.bytes().iter().all(|&byte| byte == 0), "zeroed again");
        assert_eq!(heap.allocate(0).unwrap().bytes().len(), 0);
    }
}

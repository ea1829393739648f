//! Memory that all ranks of a session have mapped, each at an address of its own.
//!
//! It is two files without names: one in the system's shared memory, and one in the temporary
//! folder for memory that does not fit there. A place is an offset; offsets of the second file
//! follow those of the first.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use rustix::io::Errno;

use crate::layout::Shared;

/// Bytes of the system's pages; places that are given back are multiples of a page.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// The size of a huge page.
pub(crate) const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// One of the files.
#[derive(Debug)]
struct Part {
    file: File,
    map: MmapRaw,
    /// The offset of the file's first byte.
    start: u64,
}

/// The memory that a session shares.
#[derive(Debug)]
pub(crate) struct Segment {
    parts: Vec<Part>,
}

impl Segment {
    /// Maps files whole.
    pub(crate) fn map(files: Vec<File>) -> io::Result<Self> {
        Self::map_with(MmapOptions::new().no_reserve_swap(), files)
    }

    /// Maps the first `len_bytes` bytes of a file, which is at least as long.
    pub(crate) fn map_head(file: File, len_bytes: usize) -> io::Result<Self> {
        Self::map_with(MmapOptions::new().len(len_bytes), vec![file])
    }

    fn map_with(options: &MmapOptions, files: Vec<File>) -> io::Result<Self> {
        let mut parts = Vec::new();
        let mut start = 0;
        for file in files {
            let map = options.map_raw(&file)?;
            // A core dump would read memory that nobody has used, and so take many times the
            // machine's memory. The others would take the process for alive meanwhile. Without this
            // advice a dump takes that long.
            let _ = map.advise(Advice::DontDump);
            let len = map.len() as u64;
            parts.push(Part { file, map, start });
            start += len;
        }
        Ok(Self { parts })
    }

    /// Bytes of the first file.
    pub(crate) fn first_bytes(&self) -> u64 {
        self.parts[0].map.len() as u64
    }

    /// The offset of memory of this process that lies in the segment as a whole.
    pub(crate) fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let address = bytes.as_ptr() as usize;
        self.parts.iter().find_map(|part| {
            let within = address.checked_sub(part.map.as_ptr() as usize)?;
            let is_inside = within.checked_add(bytes.len())? <= part.map.len();
            is_inside.then_some(part.start + within as u64)
        })
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If the bytes do not lie in one of the files.
    #[inline]
    pub(crate) fn address(&self, offset: u64, len: usize) -> *mut u8 {
        let part = &self.parts[usize::from(self.is_second(offset))];
        let within = (offset - part.start) as usize;
        assert!(
            within <= part.map.len() && len <= part.map.len() - within,
            "offset {offset} and {len} bytes lie in the segment"
        );
        part.map.as_mut_ptr().wrapping_add(within)
    }

    fn is_second(&self, offset: u64) -> bool {
        self.parts.get(1).is_some_and(|second| offset >= second.start)
    }

    /// The value at `offset`, where the session's plan has put a value of this type.
    pub(crate) fn at<T: Shared>(&self, offset: u64) -> &T {
        &self.list_at(offset, 1)[0]
    }

    /// Several values from `offset` on, one behind the other.
    pub(crate) fn list_at<T: Shared>(&self, offset: u64, len: usize) -> &[T] {
        let start = self.address(offset, len * size_of::<T>()).cast::<T>();
        assert!(start.is_aligned(), "plans put everything on cache lines");
        // SAFETY: inside of the mapping (`address`), which lives as long as `self`; aligned; any
        // bytes are values, and changes by others are what atomics are for (`Shared`).
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    /// Makes sure that `len` bytes at `offset`, whole pages, can be used; they are zero.
    ///
    /// Where a file system is full, the first access to memory that was not reserved would end the
    /// process with a signal.
    pub(crate) fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        let part = &self.parts[usize::from(self.is_second(offset))];
        let (within, bytes) = ((offset - part.start) as usize, len as usize);
        let space = fstatvfs(&part.file)?;
        if space.f_bavail.saturating_mul(space.f_frsize) < len {
            return Err(Errno::NOSPC.into());
        }
        // Nothing depends on this advice: without huge pages the pages are small.
        let _ = part.map.advise_range(Advice::HugePage, within, bytes);
        let populated = part.map.advise_range(Advice::PopulateWrite, within, bytes);
        let reserved = match populated.map_err(|error| error.raw_os_error()) {
            Ok(()) => Ok(()),
            // An older system reserves without advice, in small pages.
            Err(code) if code == Some(Errno::INVAL.raw_os_error()) => {
                let (within, flags) = (within as u64, FallocateFlags::empty());
                fallocate(part.file.as_fd(), flags, within, len).map_err(io::Error::from)
            }
            Err(_) => Err(Errno::NOSPC.into()),
        };
        if reserved.is_err() {
            self.release(offset, len);
        }
        reserved
    }

    /// Gives whole pages back; they are zero when they are reserved again.
    pub(crate) fn release(&self, offset: u64, len: u64) {
        let part = &self.parts[usize::from(self.is_second(offset))];
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // On a file system without holes the pages stay in use until the session's end.
        let _ = fallocate(part.file.as_fd(), flags, offset - part.start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_core_dump_contains_the_segment() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(HUGE_PAGE_BYTES).unwrap();
        let segment = Segment::map(vec![file]).unwrap();
        let begins = format!("{:x}-", segment.address(0, 1) as usize);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&begins));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }
}

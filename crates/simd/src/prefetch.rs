//! Hints to the cache, and how early to give them.

use std::sync::OnceLock;

/// Distance where the first-level data cache has 32 KiB, or its size is not known.
const NEAR_BYTES: usize = 512;

/// Distance where the first-level data cache is larger than 32 KiB.
const FAR_BYTES: usize = 3072;

/// The largest first-level data cache of the processors that want lines asked for late.
const SMALL_CACHE_BYTES: usize = 32 * 1024;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Distance on processors with a larger cache that fetch lines by themselves, but stop where a page
/// ends.
const OVER_PAGES_BYTES: usize = 1024;

/// Bytes of the narrowest elements whose lists an AMD processor with AVX-512 fetches early enough
/// by itself.
const OWN_ELEMENT_BYTES: usize = 4;

/// Distance in bytes between a cache line in use and the line that an update asks for, in each of
/// its lists. A parameter has `element_bytes` bytes.
///
/// Processors with larger first-level caches also keep more misses under way and want to know of
/// them earlier. Measured on four (docs/measurements.md): with 32 KiB (Cascade Lake) 512 bytes are
/// best and 2 KiB cost 2 to 4 %, on a Zen 4 a tenth; with 48 KiB, 3 KiB take 8 % off 512 on a
/// Granite Rapids. A Zen 5 gains 3 % by 1 KiB in a framework's memory, which lies in small pages,
/// and loses 2 % in our own; of 16-bit parameters it wants 3 KiB.
///
/// # Cost
/// Two loads after the first call of the process.
pub fn prefetch_bytes(element_bytes: usize) -> usize {
    static FAR: OnceLock<bool> = OnceLock::new();
    let far = *FAR.get_or_init(|| first_level_bytes() > Some(SMALL_CACHE_BYTES));
    match (far, fetches_by_itself(element_bytes)) {
        (false, _) => NEAR_BYTES,
        (true, true) => OVER_PAGES_BYTES,
        (true, false) => FAR_BYTES,
    }
}

/// Whether the processor fetches the next lines of a few lists by itself, where an element has
/// `element_bytes` bytes. AMD's processors with AVX-512 do, from Zen 4 on. They lose time where
/// reductions, updates and copies take turns and ask for the lines as well.
///
/// Measured on both (docs/measurements.md): a step of two ranks loses a tenth, one of four ranks up
/// to two thirds, an all-reduce 4 to 20 %; of 16-bit elements both gain by asking.
///
/// # Cost
/// A load after the first call of the process.
pub fn fetches_by_itself(element_bytes: usize) -> bool {
    static OWN: OnceLock<bool> = OnceLock::new();
    element_bytes >= OWN_ELEMENT_BYTES && *OWN.get_or_init(is_amd_with_avx512)
}

/// Whether AMD made the processor and gave it AVX-512.
fn is_amd_with_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let processor = raw_cpuid::CpuId::new();
        let vendor = processor.get_vendor_info();
        let features = processor.get_extended_feature_info();
        vendor.is_some_and(|vendor| vendor.as_str() == "AuthenticAMD")
            && features.is_some_and(|features| features.has_avx512f())
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Size of a core's first-level data cache.
fn first_level_bytes() -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    {
        use raw_cpuid::{CacheType, CpuId};
        let mut caches = CpuId::new().get_cache_parameters()?;
        let first =
            caches.find(|cache| cache.level() == 1 && cache.cache_type() == CacheType::Data)?;
        let line_bytes = first.coherency_line_size() * first.physical_line_partitions();
        Some(line_bytes * first.associativity() * first.sets())
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Asks the processor to bring the cache line at `slice[index]` close; `index` may lie beyond the
/// end.
///
/// A hint only: no value is read, nothing is written, and an address that is not mapped is ignored.
/// On processors other than x86-64 it does nothing.
#[inline(always)]
pub fn prefetch_ahead<T>(slice: &[T], index: usize) {
    // `wrapping_add` makes the address without claiming that it lies in `slice`.
    prefetch_line(slice.as_ptr().wrapping_add(index).addr());
}

/// Asks the processor to bring `len_bytes` bytes at an address close; nothing need be mapped there.
///
/// A hint only, as [`prefetch_ahead`].
///
/// # Cost
/// An instruction for each cache line.
#[inline]
pub fn prefetch_memory(address: usize, len_bytes: usize) {
    let start = address & !(LINE_BYTES - 1);
    for line in (start..address.saturating_add(len_bytes)).step_by(LINE_BYTES) {
        prefetch_line(line);
    }
}

#[inline(always)]
fn prefetch_line(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: PREFETCHT0 never faults and has no effect on the program's memory, whatever the
        // address (Intel SDM vol. 2, PREFETCHh).
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_follows_from_the_first_cache_and_stays() {
        let is_far = first_level_bytes() > Some(SMALL_CACHE_BYTES);
        let narrow = if is_far { FAR_BYTES } else { NEAR_BYTES };
        let wide = if is_far && fetches_by_itself(4) { OVER_PAGES_BYTES } else { narrow };
        for (element_bytes, expected) in [(2, narrow), (4, wide), (8, wide), (2, narrow)] {
            assert_eq!(prefetch_bytes(element_bytes), expected, "{element_bytes} bytes");
        }
        assert!(!fetches_by_itself(2));
        if let Some(cache) = first_level_bytes() {
            assert!((4 << 10..=1 << 20).contains(&cache), "{cache} bytes");
        }
    }
}

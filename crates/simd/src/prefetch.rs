//! A hint to the cache.

/// Asks the processor to bring the cache line at `slice[index]` close; `index` may lie beyond the end.
///
/// A hint only: no value is read, nothing is written, and an address that is not mapped is ignored.
/// On processors other than x86-64 it does nothing.
#[inline(always)]
pub fn prefetch_ahead<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = slice.as_ptr().wrapping_add(index).cast::<i8>();
        // SAFETY: PREFETCHT0 never faults and has no effect on the program's memory, whatever the address
        // (Intel SDM vol. 2, PREFETCHh); `wrapping_add` makes the address without claiming it lies in `slice`.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

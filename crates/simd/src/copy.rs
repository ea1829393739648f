//! Copies past the caches.

use crate::Level;

const LINE_BYTES: usize = 64;

/// Does `work`, which may copy past the caches. Every thread that learns of the copies after this
/// call sees their bytes.
///
/// # Cost
/// One fence. A fence behind every copy of a kilobyte makes the memory wait for each of them.
pub fn streaming<R>(level: Level, work: impl FnOnce(&StreamingCopies) -> R) -> R {
    let copies = StreamingCopies { level };
    // Runs if `work` panics, too.
    let _fence = Fence;
    work(&copies)
}

/// Length from which on a copy has left the caches before it is read again.
const CACHED_BYTES: usize = 1 << 20;

/// `dst ← src`: a short copy as usual, a long one past the caches.
///
/// # Panics
/// If the lengths differ.
pub fn copy_bytes(level: Level, dst: &mut [u8], src: &[u8]) {
    if dst.len() < CACHED_BYTES {
        return dst.copy_from_slice(src);
    }
    streaming(level, |copies| copies.copy(dst, src));
}

/// Copies past the caches, within [`streaming`].
#[derive(Debug)]
pub struct StreamingCopies {
    level: Level,
}

impl StreamingCopies {
    /// `dst ← src`, past the caches where the processor can. The lines are written without being
    /// read first, which is a third less traffic than an ordinary copy, and push nothing out of the
    /// caches. Only whole cache lines go this way; the bytes before and behind them are copied as
    /// usual.
    ///
    /// # Shapes
    /// Both slices have the same length; they need no alignment.
    /// # Panics
    /// If the lengths differ.
    /// # Cost
    /// The lines are on their way to memory when this returns. Even a short copy is then read from
    /// memory, not from a cache as after an ordinary copy.
    #[inline]
    pub fn copy(&self, dst: &mut [u8], src: &[u8]) {
        assert!(dst.len() == src.len(), "a copy of {} bytes into {}", src.len(), dst.len());
        let head = dst.as_ptr().align_offset(LINE_BYTES).min(dst.len());
        let (dst_head, dst) = dst.split_at_mut(head);
        let (src_head, src) = src.split_at(head);
        dst_head.copy_from_slice(src_head);
        let (dst_lines, dst_tail) = dst.as_chunks_mut::<LINE_BYTES>();
        let (src_lines, src_tail) = src.as_chunks::<LINE_BYTES>();
        copy_lines(self.level, dst_lines, src_lines);
        dst_tail.copy_from_slice(src_tail);
    }
}

/// A fence that puts streaming stores before all stores that follow, as Rust's memory model expects
/// of stores. Without it another thread could be told of lines that have not arrived.
struct Fence;

impl Drop for Fence {
    fn drop(&mut self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a fence touches no memory; SSE is part of every x86-64 processor.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// Copies lines; `dst` and `src` have equally many, and the first of `dst` begins with a cache
/// line.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn copy_lines(level: Level, dst: &mut [[u8; LINE_BYTES]], src: &[[u8; LINE_BYTES]]) {
    if dst.is_empty() {
        return;
    }
    debug_assert!(dst.as_ptr().addr().is_multiple_of(LINE_BYTES));
    match level.vector_bytes() {
        // SAFETY: levels with vectors of 64 bytes prove AVX-512F, as `Level::vector_bytes` states;
        // `StreamingCopies::copy` cuts `dst` where a cache line begins.
        64 => unsafe { x86_64::copy_512(dst, src) },
        // SAFETY: levels with vectors of 32 bytes prove AVX; the alignment as above.
        32 => unsafe { x86_64::copy_256(dst, src) },
        // SAFETY: the alignment as above; SSE2 is part of every x86-64 processor.
        _ => unsafe { x86_64::copy_128(dst, src) },
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn copy_lines(_: Level, dst: &mut [[u8; LINE_BYTES]], src: &[[u8; LINE_BYTES]]) {
    dst.copy_from_slice(src);
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64 {
    use std::arch::x86_64::*;

    use super::LINE_BYTES;

    macro_rules! copy {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// # Safety
            /// The processor has the feature, and the first line of `dst` begins with a cache line.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(dst: &mut [[u8; LINE_BYTES]], src: &[[u8; LINE_BYTES]]) {
                for (dst, src) in dst.iter_mut().zip(src) {
                    let dst: *mut $vector = dst.as_mut_ptr().cast();
                    let src: *const $vector = src.as_ptr().cast();
                    for part in 0..LINE_BYTES / size_of::<$vector>() {
                        // SAFETY: the parts lie within lines, of which both pointers have one; the
                        // store's place is aligned, as the line is by this function's contract and
                        // its parts are with it.
                        unsafe { $store(dst.add(part), $load(src.add(part))) };
                    }
                }
            }
        };
    }

    copy!(copy_512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512);
    copy!(copy_256, "avx", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    copy!(copy_128, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_and_no_other_is_touched() {
        let src: Vec<u8> = (0..1000u32).map(|i| (i * 7 + 1) as u8 | 1).collect();
        for level in Level::available() {
            for len in [0, 1, 63, 64, 65, 127, 128, 129, 500] {
                for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 64), (63, 65), (64, 33)] {
                    let mut dst = vec![0; 1000];
                    streaming(level, |copies| {
                        copies.copy(&mut dst[to..to + len], &src[from..from + len]);
                    });
                    assert_eq!(dst[to..to + len], src[from..from + len], "{level}, {len}");
                    let touched = dst.iter().filter(|&&byte| byte != 0).count();
                    assert_eq!(touched, len, "{level}, from {from} to {to}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a copy of 3 bytes into 4")]
    fn lengths_that_differ_are_refused() {
        streaming(Level::detect(), |copies| copies.copy(&mut [0; 4], &[0; 3]));
    }
}

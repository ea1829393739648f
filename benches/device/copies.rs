//! Device-to-device copies of as many bytes as a step moves, and the values that everything starts
//! from.

use std::num::NonZeroU32;

use fusestep_cuda::{CudaBackend, DeviceTime};
use fusestep_launch::{BackendError, Buffer, Memory};

use crate::SEED;

/// Bytes that are written from the host at a time.
const PATTERN_BYTES: usize = 16 << 20;

/// A state or pair of buffers is left alone until this many times the shared cache has been moved.
const CACHES_BETWEEN: u64 = 3;

/// Most states that take turns; fewer in a trial with scaled-down sets, whose times mean nothing.
const MOST_ROTATED: [u64; 2] = [16, 2];

/// How many memories of `len_bytes` must take turns so that none is found in the cache.
pub(crate) fn rotated(backend: &CudaBackend, len_bytes: u64, scale: u64) -> usize {
    let needed = (CACHES_BETWEEN * backend.device_info().l2_bytes).div_ceil(len_bytes.max(1));
    needed.clamp(1, MOST_ROTATED[usize::from(scale > 1)]) as usize
}

/// Values between -0.5 and 0.5, the same in every run: memory of zeros is moved at another speed.
pub(crate) fn values() -> impl Iterator<Item = f32> {
    let mut state = SEED;
    std::iter::repeat_with(move || {
        // SplitMix64: Steele, Lea and Flood 2014.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    })
}

/// Fills a buffer with [`values`], over and over.
pub(crate) fn fill(backend: &CudaBackend, buffer: &mut dyn Buffer) -> Result<(), BackendError> {
    let len_bytes = buffer.len_bytes();
    let pattern: Vec<u8> = values()
        .take(PATTERN_BYTES.min(len_bytes).div_ceil(4))
        .flat_map(f32::to_le_bytes)
        .collect();
    for offset_bytes in (0..len_bytes).step_by(PATTERN_BYTES) {
        let pattern = &pattern[..PATTERN_BYTES.min(len_bytes - offset_bytes)];
        backend.write(buffer, offset_bytes, pattern)?;
    }
    Ok(())
}

/// Pairs of buffers that take turns.
pub(crate) struct Copies<'a> {
    backend: &'a CudaBackend,
    pairs: Vec<[Box<dyn Buffer>; 2]>,
    next: usize,
}

impl<'a> Copies<'a> {
    /// Buffers for copies that read and write up to `traffic_bytes` bytes together.
    pub(crate) fn new(
        backend: &'a CudaBackend,
        traffic_bytes: u64,
        scale: u64,
    ) -> Result<Self, BackendError> {
        let len_bytes = traffic_bytes.div_ceil(2) as usize;
        let mut pairs = Vec::new();
        for _ in 0..rotated(backend, traffic_bytes, scale) {
            let mut pair = [backend.allocate(len_bytes)?, backend.allocate(len_bytes)?];
            fill(backend, pair[0].as_mut())?;
            pairs.push(pair);
        }
        Ok(Self { backend, pairs, next: 0 })
    }

    /// Times copies that read and write `traffic_bytes` bytes together.
    pub(crate) fn timed(
        &mut self,
        steps: NonZeroU32,
        traffic_bytes: u64,
    ) -> Result<DeviceTime, BackendError> {
        let len_bytes = (traffic_bytes / 2) as usize;
        self.backend.timed(steps, &mut |_| {
            self.next = (self.next + 1) % self.pairs.len();
            let [from, to] = &mut self.pairs[self.next];
            self.backend.copy(from.as_ref(), 0, to.as_mut(), 0, len_bytes)
        })
    }
}

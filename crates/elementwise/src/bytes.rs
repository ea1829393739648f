//! Scalars and step scalars as the bytes that device and host read.

use bytemuck::Pod;

/// Bytes of `elements` values of `T`, rounded up to a multiple of 8.
pub const fn padded_bytes<T>(elements: usize) -> usize {
    (elements * size_of::<T>()).next_multiple_of(8)
}

/// Writes values and zeroes the padding behind them.
///
/// # Panics
/// If `out` is shorter than the values.
pub fn write_padded<T: Pod>(values: &[T], out: &mut [u8]) {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    out[..bytes.len()].copy_from_slice(bytes);
    out[bytes.len()..].fill(0);
}

/// Reads `N` values from the start of `bytes`, which may be unaligned.
///
/// # Panics
/// If `bytes` is shorter than the values.
#[inline(always)]
pub fn read_values<T: Pod, const N: usize>(bytes: &[u8]) -> [T; N] {
    let mut values = [T::zeroed(); N];
    let target: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
    let len_bytes = target.len();
    target.copy_from_slice(&bytes[..len_bytes]);
    values
}

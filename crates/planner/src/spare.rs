//! Memory that is through with one use, for the next.

use fusestep_launch::Buffer;

/// Takes the shortest memory that has so many bytes.
pub(crate) fn take_shortest(
    spare: &mut Vec<Box<dyn Buffer>>,
    len_bytes: usize,
) -> Option<Box<dyn Buffer>> {
    let lens = spare.iter().map(|memory| memory.len_bytes()).enumerate();
    let fits = lens.filter(|&(_, len)| len >= len_bytes);
    let (at, _) = fits.min_by_key(|&(_, len)| len)?;
    Some(spare.swap_remove(at))
}

//! Parts of the lists that an update runs over.

use std::ops::Range;

/// The part of a list with these elements.
#[inline(always)]
pub(crate) fn part_mut<'a, T>(list: &'a mut [T], elements: &Range<usize>) -> &'a mut [T] {
    match list.get_mut(elements.clone()) {
        Some(part) => part,
        None => outside(),
    }
}

/// [`part_mut`] of a list that is only read.
#[inline(always)]
pub(crate) fn part<'a, T>(list: &'a [T], elements: &Range<usize>) -> &'a [T] {
    match list.get(elements.clone()) {
        Some(part) => part,
        None => outside(),
    }
}

/// [`part_mut`] of the next list.
#[inline(always)]
pub(crate) fn next_part<'a, T>(
    lists: &mut std::slice::IterMut<'a, &mut [T]>,
    elements: &Range<usize>,
) -> &'a mut [T] {
    match lists.next() {
        Some(list) => part_mut(list, elements),
        None => &mut [],
    }
}

/// The panic of all places: a loop has one call of it, since each with lengths of its own is 30
/// bytes.
#[cold]
#[inline(never)]
pub(crate) fn outside() -> ! {
    panic!("expected lists of one numel, with all elements of every tensor");
}

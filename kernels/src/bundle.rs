//! Machine code of many entries for one device, each compressed by itself.
//!
//! ```text
//! fusestep machine code 1
//! ENTRY LEN_BYTES PACKED_BYTES        a line for each entry
//!                                     an empty line
//! the entries as Deflate packs them, one behind the other
//! ```

use miniz_oxide::inflate::decompress_to_vec_with_limit;

/// First line of a bundle.
pub(crate) const MAGIC: &str = "fusestep machine code 1\n";

/// One entry of a bundle, still packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed<'b> {
    /// Its name.
    pub(crate) entry: &'b str,
    /// Bytes of the code.
    len_bytes: usize,
    bytes: &'b [u8],
}

/// The entries of a bundle in their order; none if its bytes are not one.
pub(crate) fn entries(bundle: &[u8]) -> Option<Vec<Packed<'_>>> {
    let end = bundle.windows(2).position(|pair| pair == b"\n\n")? + 2;
    let (head, mut rest) = bundle.split_at(end);
    let lines = str::from_utf8(head).ok()?.strip_prefix(MAGIC)?.trim_end();
    let entries: Option<Vec<_>> = lines
        .lines()
        .map(|line| {
            let mut words = line.split(' ');
            let entry = words.next()?;
            let len_bytes = words.next()?.parse().ok()?;
            let (bytes, behind) = rest.split_at_checked(words.next()?.parse().ok()?)?;
            rest = behind;
            Some(Packed { entry, len_bytes, bytes })
        })
        .collect();
    entries.filter(|_| rest.is_empty())
}

impl Packed<'_> {
    /// The code; none if the bytes are not what was packed.
    pub(crate) fn unpacked(&self) -> Option<Vec<u8>> {
        let code = decompress_to_vec_with_limit(self.bytes, self.len_bytes).ok()?;
        (code.len() == self.len_bytes).then_some(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle() -> Vec<u8> {
        // Two stored blocks of Deflate, with their lengths and the complements of those.
        let first = [1, 3, 0, 252, 255, 7, 8, 9];
        let second = [1, 0, 0, 255, 255];
        [MAGIC.as_bytes(), b"one 3 8\ntwo 0 5\n\n", &first, &second].concat()
    }

    #[test]
    fn entries_are_found_and_unpacked() {
        let bundle = bundle();
        let entries = entries(&bundle).unwrap();
        let names: Vec<_> = entries.iter().map(|packed| packed.entry).collect();
        assert_eq!(names, ["one", "two"]);
        assert_eq!(entries[0].unpacked(), Some(vec![7, 8, 9]));
        assert_eq!(entries[1].unpacked(), Some(vec![]));
    }

    #[test]
    fn bytes_that_are_no_bundle_are_refused() {
        let whole = bundle();
        for length in 0..whole.len() {
            assert_eq!(entries(&whole[..length]), None, "{length} bytes");
        }
        assert_eq!(entries(&[&whole[..], &[0]].concat()), None);
        let other = String::from_utf8_lossy(&whole).replace("code 1", "code 2");
        assert_eq!(entries(other.as_bytes()), None);
        let longer = String::from_utf8_lossy(&whole[..MAGIC.len() + 17]).replace("one 3", "one 4");
        let longer = [longer.as_bytes(), &whole[MAGIC.len() + 17..]].concat();
        assert_eq!(entries(&longer).unwrap()[0].unpacked(), None);
    }
}

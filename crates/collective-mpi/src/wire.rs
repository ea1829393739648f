//! Messages between ranks other than data: headers with fingerprints, and notices of a group's end.

use fusestep_collective::{CollectiveError, Fingerprint, Membership};

/// Bytes of a [`Header`].
pub(crate) const HEADER_BYTES: usize = Fingerprint::WIRE_BYTES + 3 * 8;

/// Header that a rank sends to the others before data moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) fingerprint: Fingerprint,
    /// Subgroup that the rank joins, if the call is a split.
    pub(crate) membership: Option<Membership>,
    /// Number for a new group, should this rank lead one.
    pub(crate) proposal: u32,
}

impl Header {
    /// A header that joins no group.
    pub(crate) fn of(fingerprint: Fingerprint) -> Self {
        Self { fingerprint, membership: None, proposal: 0 }
    }

    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let words = [
            u64::from(self.membership.is_some()),
            self.membership.map_or(0, Membership::to_word),
            u64::from(self.proposal),
        ];
        let mut bytes = [0; HEADER_BYTES];
        let (print, rest) = bytes.split_at_mut(Fingerprint::WIRE_BYTES);
        print.copy_from_slice(&self.fingerprint.to_bytes());
        for (to, word) in rest.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a header; `None` if the bytes are not a header's.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (print, rest) = bytes.split_at_checked(Fingerprint::WIRE_BYTES)?;
        let mut words = rest.chunks_exact(8).map(|word| word.try_into().map(u64::from_le_bytes));
        let mut next = || words.next()?.ok();
        let (joins, member, proposal) = (next()?, next()?, next()?);
        Some(Self {
            fingerprint: Fingerprint::from_bytes(print)?,
            membership: (joins != 0).then(|| Membership::from_word(member)),
            proposal: proposal as u32,
        })
    }
}

/// Notice that a rank sends once about the end of a group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Notice {
    /// The rank that found the error.
    pub(crate) origin: usize,
    /// Calls of all ranks that the sender has entered.
    pub(crate) entered: u64,
    /// Error that rank `origin` found.
    pub(crate) error: CollectiveError,
}

impl Notice {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let words = [self.origin as u64, self.entered].map(u64::to_le_bytes);
        [words.as_flattened(), &self.error.to_bytes()].concat()
    }

    /// Reads a notice; `None` if the bytes are not a notice's.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (origin, rest) = bytes.split_first_chunk()?;
        let (entered, error) = rest.split_first_chunk()?;
        Some(Self {
            origin: usize::try_from(u64::from_le_bytes(*origin)).ok()?,
            entered: u64::from_le_bytes(*entered),
            error: CollectiveError::from_bytes(error)?,
        })
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;

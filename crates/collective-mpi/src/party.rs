//! Parties: ranks that exchange headers.

/// Ranks to exchange headers with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Party {
    /// All ranks, for the call of this number.
    All(u64),
    /// One rank, for a transfer.
    Pair(usize),
}

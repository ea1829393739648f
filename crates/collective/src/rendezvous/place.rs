//! Places of the parties: their arrivals, what they brought, and what is claimed of it.

use super::contribution::Brought;
use crate::sync::{AtomicU64, AtomicUsize, Cell};

/// State of one party, alone on its cache lines.
#[repr(align(128))]
pub(super) struct Place<H> {
    /// The last round this party has arrived at; names late parties and guards nothing.
    pub(super) arrived: AtomicU64,
    pub(super) brought: Cell<Brought<H>>,
    /// Bytes that are claimed of the part with this party's number, in everyone's writable memory.
    pub(super) claimed: Claimed,
}

/// A count of claimed bytes, alone on its cache lines: claims do not slow parties that read what
/// was brought.
#[repr(align(128))]
pub(super) struct Claimed(pub(super) AtomicUsize);

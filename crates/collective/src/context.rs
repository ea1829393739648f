//! Contexts: the purpose of calls.

/// The purpose of a call; compared between ranks and shown in errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CallContext {
    /// Identifies the plan that makes the calls; 0 for none.
    pub plan_hash: u64,
    /// The bucket of gradients that is being reduced.
    pub bucket: Option<u32>,
}

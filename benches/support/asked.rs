//! What a command's filter asks for.

use crate::memory::thread_counts;

/// Whether the filter may name one of these functions of a group. The memory of others, gigabytes
/// for each rule, need not be made.
pub(crate) fn is_asked(group: &str, functions: &[&str]) -> bool {
    let first = std::env::args().nth(1).filter(|first| !first.starts_with('-'));
    let Some(filter) = first else {
        return true;
    };
    // Any other text is a pattern, which criterion reads.
    let is_plain = filter.chars().all(|of| of.is_alphanumeric() || matches!(of, '/' | '_'));
    let mut ids = functions.iter().flat_map(|function| {
        thread_counts().into_iter().map(move |threads| format!("{group}/{function}/t{threads}"))
    });
    !is_plain || ids.any(|id| id.contains(&filter))
}

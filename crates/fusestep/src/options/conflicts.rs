//! Conflicts with gradients that travel in fewer bits, and with state in int8.

use super::row::Conflict;

/// Reason of the conflict with lanes.
pub(super) const ROUNDED_BY_RANK: &str = "what a rank rounds would follow the number of ranks";

/// Reason of the conflict with averages in place of reductions.
pub(super) const SENDS_NONE: &str = "ranks average parameters and send no gradients";

/// Reason of the conflict with shard groups.
const ROUNDED_AGAIN: &str = "means of groups would be rounded once more";

/// Conflicts of shard groups.
pub(super) const GROUPS: &[Conflict] =
    &[sent_as("bf16", ROUNDED_AGAIN), sent_as("f16", ROUNDED_AGAIN)];

/// Conflicts of random rounding.
pub(super) const ROUNDED: &[Conflict] =
    &[int8("codes are dithered, and parameters beside them are rounded to nearest")];

/// Conflicts of slices of ranks' own.
pub(super) const SLICES: &[Conflict] =
    &[int8("ranks do not cut their slices between groups of 32 elements")];

/// Conflict with state in int8.
const fn int8(why: &'static str) -> Conflict {
    Conflict::of("state_dtype", why).at("int8")
}

/// Conflict with gradients of f32 that are sent as this type.
pub(super) const fn sent_as(dtype: &'static str, why: &'static str) -> Conflict {
    Conflict::of("reduce_dtype", why).at(dtype)
}

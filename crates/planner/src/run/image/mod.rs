//! A run as its files see it: described, copied and restored.

pub(crate) mod borrowed;
pub(crate) mod counts;
pub(crate) mod restore;
pub(crate) mod rules;
pub(crate) mod take;
pub(crate) mod value;

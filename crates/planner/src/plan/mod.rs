//! The plan as a value: what it is, who makes it, what it costs and how it reads.
//!
//! Memory, and ranks that run, are unknown here.

pub(crate) mod batches;
pub(crate) mod bucket;
pub(crate) mod calls;
pub(crate) mod cost;
pub(crate) mod describe;
pub(crate) mod group;
pub(crate) mod lanes;
pub(crate) mod leaves;
pub(crate) mod note;
pub(crate) mod page;
pub(crate) mod passes;
pub(crate) mod planner;
pub(crate) mod rank_summary;
pub(crate) mod rule;
pub(crate) mod saved_settings;
pub(crate) mod segments;
pub(crate) mod settings;
pub(crate) mod stage;
pub(crate) mod storage;
pub(crate) mod summary;
pub(crate) mod tensor_table;
pub(crate) mod text;
pub(crate) mod topology;
pub(crate) mod value;

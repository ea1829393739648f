#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod aborter;
mod blocks;
mod call;
mod call_shape;
mod collectives;
mod columns;
mod comm_stream;
mod communicator;
mod context;
mod device_call;
mod engine;
mod error;
mod error_bytes;
mod fault;
mod field;
mod fingerprint;
mod forward;
mod late;
mod launcher;
mod measure;
mod membership;
mod movement;
mod operation;
mod pair;
mod rank_order;
mod ranked;
#[cfg(test)]
mod ranked_tests;
mod recorder;
mod reduce_update;
#[expect(unsafe_code, reason = "threads that meet lend each other slices without lifetimes")]
mod rendezvous;
#[cfg(test)]
mod rendezvous_tests;
mod self_test;
mod sharing;
mod solo;
mod sync;
mod thread;
mod timeout;
mod wire;

pub use aborter::Aborter;
pub use blocks::{Blocks, OfRanks, even_counts};
pub use call::{Buffers, Call};
pub use call_shape::{CallShape, Lengths, Part};
pub use collectives::Collectives;
pub use columns::{Column, Columns, Receivers};
pub use comm_stream::{CommStream, MAX_COMM_STREAMS, Pending, communication_streams};
pub use communicator::Communicator;
pub use context::CallContext;
pub use device_call::{DeviceBuffers, DeviceCall};
pub use engine::{Begun, Engine, OnDevice, OnShared, Place};
pub use error::CollectiveError;
pub use fault::{Fault, FaultKind, Faulty};
pub use field::Field;
pub use fingerprint::Fingerprint;
pub use fusestep_coalesce::HostMemory;
pub use late::behind;
pub use launcher::{
    ALONE, ALONE_REMEDY, Carrier, Started, TakenForWhole, alone_on_purpose, launcher_variables,
    local_rank, mark_joined, require_alone, started_together,
};
pub use measure::{AllReduceRow, Costs, Link, fit, measure, measure_all_reduce};
pub use membership::Membership;
pub use movement::{Movement, Pull, Share, Take};
pub use operation::{Divisor, Operation, ReduceOp};
pub use pair::Pair;
pub use rank_order::{
    FIRST_TREE, Ranks, TreeOrder, merges_of_ranks, reduce_along_tree, reduce_in_rank_order,
    reduce_slices, tree::WaitingSums,
};
pub use ranked::{CallOptions, Ranked};
pub use recorder::{CallRecord, CallState, FlightRecorder};
pub use reduce_update::{RankMemory, ReduceUpdate, Replica, Replicas};
pub use self_test::self_test;
pub use sharing::{Sharing, common};
pub use solo::{Alone, Solo};
pub use thread::{Options, ThreadCommunicator, Threads, run_ranks, thread_ranks};
pub use timeout::{MAX_TIMEOUT, Timeout};

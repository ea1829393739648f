#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod aborter;
mod blocks;
mod call;
mod call_shape;
mod collectives;
mod columns;
mod comm_stream;
mod communicator;
mod device_call;
mod error;
mod error_bytes;
mod fault;
mod fingerprint;
mod measure;
mod membership;
mod operation;
mod rank_order;
mod recorder;
mod reduce_update;
mod self_test;
mod solo;
mod thread;
mod wire;

pub use aborter::Aborter;
pub use blocks::{Blocks, even_counts};
pub use call::{Buffers, Call, CallContext};
pub use call_shape::{CallShape, Lengths};
pub use collectives::Collectives;
pub use columns::{Column, Columns, Receivers};
pub use comm_stream::{CommStream, MAX_COMM_STREAMS, Pending, comm_streams};
pub use communicator::Communicator;
pub use device_call::{DeviceBuffers, DeviceCall};
pub use error::CollectiveError;
pub use fault::{Fault, FaultKind, Faulty};
pub use fingerprint::{Field, Fingerprint};
pub use measure::{AllReduceRow, Costs, Link, bench_all_reduce, fit, measure, measure_all_reduce};
pub use membership::Membership;
pub use operation::{Operation, ReduceOp};
pub use rank_order::{Ranks, reduce_in_rank_order, reduce_slices};
pub use recorder::{CallRecord, CallState, FlightRecorder};
pub use reduce_update::{OfRanks, RankMemory, ReduceUpdate, Replica, Replicas};
pub use self_test::self_test;
pub use solo::Solo;
pub use thread::{Options, ThreadCommunicator, run_ranks, thread_ranks};

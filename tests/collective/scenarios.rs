//! What goes wrong in which collective, for every engine.

use fusestep_collective::{CollectiveError, Collectives, Communicator, Fault, ReduceOp};
use serde::Deserialize;

/// A collective as any rank calls it.
pub(crate) type Collective = fn(&mut dyn Communicator) -> Result<(), CollectiveError>;

/// One call of each, for three ranks.
pub(crate) const COLLECTIVES: [(&str, Collective); 11] = [
    ("all-reduce", |comm| comm.all_reduce(&mut [1.0f32; 10], ReduceOp::Sum)),
    ("reduce", |comm| comm.reduce(&mut [1.0f32; 10], ReduceOp::Max, 1)),
    ("broadcast", |comm| comm.broadcast(&mut [1i32; 10], 2)),
    ("all-gather", |comm| comm.all_gather(&[1u8; 3], &mut [0; 9])),
    ("reduce-scatter", |comm| comm.reduce_scatter(&[1i64; 9], &mut [0; 3], ReduceOp::Prod)),
    ("scatter", |comm| {
        comm.scatter(&[1.0f64; 9][..if comm.rank() == 0 { 9 } else { 0 }], &mut [0.0; 3], 0)
    }),
    ("gather", |comm| {
        comm.gather(&[1.0f64; 3], &mut [0.0; 9][..if comm.rank() == 0 { 9 } else { 0 }], 0)
    }),
    ("all-to-all", |comm| comm.all_to_all(&[1u8; 9], &mut [0; 9])),
    ("barrier", |comm| comm.barrier()),
    ("split", |comm| comm.split(None).map(|_| ())),
    ("transfers around", |comm| {
        let (own, mut buffer) = (comm.rank(), [0u8; 5]);
        if own == 0 {
            comm.send(&buffer, 1)?;
            return comm.receive(&mut buffer, 2);
        }
        comm.receive(&mut buffer, own - 1)?;
        comm.send(&buffer, (own + 1) % 3)
    }),
];

/// Scenarios as data: two all-reduces on three ranks, and how the group's first error reads.
pub(crate) const SCENARIOS: &str = r#"[
    {"faults": [], "error": null},
    {"faults": [{"rank": 0, "call": 1, "kind": {"delay_ms": 20}}, {"rank": 2, "call": 2, "kind": {"delay_ms": 20}}], "error": null},
    {"faults": [{"rank": 0, "call": 1, "kind": "kill"}], "error": "rank 0 panicked after 0 calls"},
    {"faults": [{"rank": 2, "call": 2, "kind": "kill"}], "error": "rank 2 panicked after 1 call"},
    {"faults": [{"rank": 1, "call": 2, "kind": "fail"}], "error": "aborted by rank 1: fault at call 2"},
    {"faults": [{"rank": 1, "call": 2, "kind": "reorder"}], "error": "call 2, operation: expected `all-reduce` as on rank 0, found `barrier` on rank 1"},
    {"faults": [{"rank": 1, "call": 1, "kind": {"stall_ms": 2200}}], "error": "all-reduce 1: expected all ranks within 1000 ms, found none of [1]"},
    {"faults": [{"rank": 0, "call": 2, "kind": {"stall_ms": 2200}}, {"rank": 2, "call": 2, "kind": {"stall_ms": 2200}}],
     "error": "all-reduce 2: expected all ranks within 1000 ms, found none of [0, 2]"},
    {"faults": [{"rank": 0, "call": 1, "kind": {"corrupt": 3}}], "error": "corrupted"}
]"#;

/// One of them.
#[derive(Deserialize)]
pub(crate) struct Scenario {
    pub(crate) faults: Vec<Fault>,
    pub(crate) error: Option<String>,
}

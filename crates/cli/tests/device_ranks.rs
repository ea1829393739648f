//! Steps of many ranks in device memory: the bits of threads on the host at every stage, with
//! gradients that never pass through the host. `cargo xtask nccl` runs this on emulated devices and
//! a stand-in for NCCL.

#[path = "device_ranks/counted.rs"]
mod counted;
#[path = "device_ranks/graph.rs"]
mod graph;
#[path = "device_ranks/int8.rs"]
mod int8;
#[path = "../../../tests/distributed/lane_case.rs"]
#[expect(dead_code, reason = "the other suite has more to ask of lanes")]
mod lane_case;
#[path = "device_ranks/lanes.rs"]
mod lanes;
#[path = "device_ranks/laws.rs"]
mod laws;
#[path = "device_ranks/program.rs"]
mod program;
#[path = "../../../tests/distributed/run.rs"]
#[expect(dead_code, reason = "the other suite has more to ask of a run")]
mod run;
#[path = "device_ranks/views.rs"]
mod views;
#[path = "device_ranks/worlds.rs"]
mod worlds;

//! The step of many ranks: the same bits however it is shared out.

#[path = "distributed/averaged.rs"]
mod averaged;
#[path = "distributed/averages.rs"]
mod averages;
#[path = "distributed/calls.rs"]
mod calls;
#[path = "distributed/checkpoints.rs"]
mod checkpoints;
#[path = "distributed/fused.rs"]
mod fused;
#[path = "distributed/groups.rs"]
mod groups;
#[path = "distributed/handshake.rs"]
mod handshake;
#[path = "distributed/in_backward.rs"]
mod in_backward;
#[path = "distributed/int8.rs"]
mod int8;
#[path = "distributed/lane_case.rs"]
mod lane_case;
#[path = "distributed/lanes.rs"]
mod lanes;
#[path = "distributed/laws.rs"]
mod laws;
#[path = "distributed/layerwise.rs"]
mod layerwise;
#[path = "distributed/many.rs"]
mod many;
#[path = "distributed/merging.rs"]
mod merging;
#[path = "distributed/open_lanes.rs"]
mod open_lanes;
#[path = "distributed/open_runs.rs"]
mod open_runs;
#[path = "distributed/overlap.rs"]
mod overlap;
#[path = "distributed/plans.rs"]
mod plans;
#[path = "distributed/predictions.rs"]
mod predictions;
#[path = "distributed/prefetch.rs"]
mod prefetch;
#[path = "distributed/refusals.rs"]
mod refusals;
#[path = "distributed/rounding.rs"]
mod rounding;
#[path = "distributed/rules.rs"]
mod rules;
#[path = "distributed/run.rs"]
mod run;
#[path = "distributed/saves.rs"]
mod saves;
#[path = "distributed/shards.rs"]
mod shards;
#[path = "distributed/slices.rs"]
mod slices;
#[path = "distributed/stages.rs"]
mod stages;
#[path = "distributed/sums_in_f32.rs"]
mod sums_in_f32;
#[path = "distributed/told.rs"]
mod told;
#[path = "distributed/train.rs"]
mod train;
#[path = "distributed/uneven_leaves.rs"]
mod uneven_leaves;
#[path = "distributed/uneven_slices.rs"]
mod uneven_slices;
#[path = "distributed/views.rs"]
mod views;
#[path = "distributed/whole_plans.rs"]
mod whole_plans;

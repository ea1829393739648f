//! Every setting's value in the tests, and the same given to a planner by hand.

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use fusestep::planner::{
    Accumulated, Averaged, ClipByGlobalNorm, Comms, Distributed, FuseAllReduce, FuseBroadcast,
    FuseReduceIntoUpdate, GradientAccumulation, Lanes, LocalSgd, LossScaling, Optimizer, Ownership,
    Plan, Planner, ReduceDType, ReducedWhen, Schedule, Shard, TableKind, Topology,
    UpdateInBackward, UpdateNorms, ZeroStage,
};
use fusestep::{DType, LaunchLimits, Master, ParamDesc, Precision, Rounding, StateDType, Trust};
use fusestep_candle::Communicator;

use super::faces::params;

/// Bytes of the small caps, which make several buckets.
const CAP_BYTES: u64 = 4_096;
const CAP_MIB: &str = "0.00390625";

/// What a planner is given by hand.
pub(super) struct ByHand {
    pub(super) planner: Planner,
    pub(super) params: Vec<ParamDesc>,
    /// Cap of buckets; `None` where every tensor has a call of its own.
    pub(super) cap_bytes: Option<u64>,
    broadcasts: Option<FuseBroadcast>,
    pub(super) fused: bool,
    /// Ranks of a shard group.
    pub(super) group: Option<NonZeroUsize>,
    distributed: BTreeSet<String>,
}

impl ByHand {
    pub(super) fn new(rule: Optimizer, dtype: DType) -> Self {
        Self {
            planner: Planner::new(rule),
            params: params(dtype),
            cap_bytes: Some(FuseAllReduce::DEFAULT_CAP_BYTES),
            broadcasts: None,
            fused: true,
            group: None,
            distributed: BTreeSet::new(),
        }
    }

    pub(super) fn plan(self, comm: &mut dyn Communicator) -> Plan {
        let topology = Topology::of(comm);
        let mut planner = self.planner;
        if let Some(cap_bytes) = self.cap_bytes {
            planner = planner.with(FuseAllReduce::of_bytes(cap_bytes));
        }
        if let Some(broadcasts) = self.broadcasts {
            planner = planner.with(broadcasts);
        }
        if self.fused {
            planner = planner.with(FuseReduceIntoUpdate);
        }
        if !self.distributed.is_empty() {
            let mut comms = Comms::direct(comm);
            let slices = Distributed::of_ranks(&self.distributed, &self.params, &mut comms);
            planner = planner.with(slices.expect("slices"));
        }
        planner.plan_for(&self.params, topology).expect("a plan")
    }
}

pub(super) type Change = fn(&mut ByHand);

/// A row with a value, the settings that it needs, and the same by hand.
pub(super) struct Case {
    pub(super) value: &'static str,
    pub(super) beside: &'static [[&'static str; 2]],
    pub(super) by_hand: Change,
}

const SHARED: &[[&str; 2]] = &[["zero", "1"]];
const MERGED: &[[&str; 2]] = &[["accumulate", "2"]];
const LOCAL: &[[&str; 2]] = &[["local_sgd", "2"]];
const TENSORS: &[[&str; 2]] = &[["zero", "1"], ["owners", "tensors"]];
const RANDOM: &[[&str; 2]] = &[["rounding", "stochastic"]];
const SMALL: &[[&str; 2]] = &[["bucket_cap_mib", CAP_MIB]];

fn merged() -> GradientAccumulation {
    GradientAccumulation::every(NonZeroU32::new(2).expect("2"))
}

fn local() -> LocalSgd {
    LocalSgd::every(NonZeroU64::new(2).expect("2"))
}

fn add(by: &mut ByHand, change: impl FnOnce(Planner) -> Planner) {
    let planner = std::mem::replace(
        &mut by.planner,
        Planner::new(fusestep::fused_adam::Adam::default().into()),
    );
    by.planner = change(planner);
}

fn of(by: &mut ByHand, part: &str, change: impl Fn(&mut ParamDesc)) {
    by.params.iter_mut().filter(|param| param.name.contains(part)).for_each(change);
}

fn precise(by: &mut ByHand, precision: Precision) {
    add(by, |planner| planner.precision(precision));
}

/// The case of a row; `None` for rows that leave the plan and are named beside the tests.
pub(super) fn case(name: &str) -> Option<Case> {
    of_one_rank(name).or_else(|| of_ranks(name))
}

fn of_one_rank(name: &str) -> Option<Case> {
    let case = |value, beside, by_hand| Some(Case { value, beside, by_hand });
    match name {
        "exclude" => case("bias", &[], |by| of(by, "bias", |p| p.weight_decay = Some(0.0))),
        "lr_scale" => case("head=0.5", &[], |by| of(by, "head", |p| p.lr_scale = 0.5)),
        "weight_decay_of" => {
            case("body=0.25", &[], |by| of(by, "body", |p| p.weight_decay = Some(0.25)))
        }
        "trust_of" => {
            case("head=plain", &[], |by| of(by, "head", |p| p.trust = Some(Trust::Plain)))
        }
        "schedule" => case("warmup:3", &[], |by| {
            add(by, |planner| planner.schedule(Schedule::warmup(3)));
        }),
        "master_weights" => case("f32", &[], |by| {
            precise(by, Precision { master: Master::F32, ..Precision::default() });
        }),
        "state_dtype" => case("bf16", &[], |by| {
            precise(by, Precision { state: StateDType::Bf16, ..Precision::default() });
        }),
        "keep_f32" => case("head", &[["state_dtype", "int8"]], |by| {
            precise(by, Precision { state: StateDType::Int8, ..Precision::default() });
            add(by, |planner| planner.keep_f32(["head"]));
        }),
        "rounding" => case("stochastic", &[], |by| {
            let rounding = Rounding::Stochastic { seed: 0 };
            precise(by, Precision { rounding, ..Precision::default() });
        }),
        "rounding_seed" => case("7", RANDOM, |by| {
            let rounding = Rounding::Stochastic { seed: 7 };
            precise(by, Precision { rounding, ..Precision::default() });
        }),
        "reduce_dtype" => case("f32", &[], |by| add(by, |p| p.reduce_dtype(ReduceDType::F32))),
        "clip_norm" => case("0.5", &[], |by| add(by, |p| p.with(ClipByGlobalNorm::new(0.5)))),
        "loss_scale" => case("1024", &[], |by| add(by, |p| p.with(LossScaling::fixed(1024.0)))),
        "update_norms" => case("true", &[], |by| add(by, |p| p.with(UpdateNorms))),
        "argument_bytes" => case("600", &[], |by| {
            let limits = LaunchLimits { argument_bytes: 600, ..LaunchLimits::default() };
            add(by, |p| p.limits(limits));
        }),
        "tables" => case("resident", &[], |by| add(by, |p| p.table(TableKind::Resident))),
        "naive" => case("true", &[], |by| {
            (by.cap_bytes, by.fused) = (None, false);
            add(by, Planner::naive);
        }),
        _ => None,
    }
}

fn of_ranks(name: &str) -> Option<Case> {
    let case = |value, beside, by_hand| Some(Case { value, beside, by_hand });
    match name {
        "accumulate" => case("2", &[], |by| add(by, |p| p.with(merged()))),
        "lanes" => case("4", &[], |by| {
            add(by, |p| p.with(Lanes::new(NonZeroU32::new(4).unwrap())));
        }),
        "accumulated" => case("sum", MERGED, |by| {
            let sums = GradientAccumulation { accumulated: Accumulated::Sum, ..merged() };
            add(by, |p| p.with(sums));
        }),
        "reduced" => case("per_micro_step", MERGED, |by| {
            add(by, |p| p.with(merged().reduced(ReducedWhen::PerMicroStep)));
        }),
        "zero" => case("2", &[], |by| add(by, |p| p.with(Shard::new(ZeroStage::Two)))),
        "shard_group" => case("2", SHARED, |by| {
            by.group = NonZeroUsize::new(2);
            let group = by.group.expect("2");
            add(by, |p| p.with(Shard::new(ZeroStage::One).group(group)));
        }),
        "owners" => case("tensors", SHARED, |by| {
            by.broadcasts = Some(FuseBroadcast::default());
            add(by, |p| p.with(Shard::new(ZeroStage::One).ownership(Ownership::Tensors)));
        }),
        "broadcast_cap_mib" => case(CAP_MIB, TENSORS, |by| {
            by.broadcasts = Some(FuseBroadcast::of_bytes(CAP_BYTES));
            add(by, |p| p.with(Shard::new(ZeroStage::One).ownership(Ownership::Tensors)));
        }),
        "bucket_cap_mib" => case(CAP_MIB, &[], |by| by.cap_bytes = Some(CAP_BYTES)),
        "separate" => case("true", &[], |by| by.fused = false),
        "update_in_backward" => case("true", SMALL, |by| {
            by.cap_bytes = Some(CAP_BYTES);
            add(by, |p| p.with(UpdateInBackward::of_bytes(CAP_BYTES)));
        }),
        "local_sgd" => case("2", &[], |by| add(by, |p| p.with(local()))),
        "local_sgd_begin" => {
            case("3", LOCAL, |by| add(by, |p| p.with(LocalSgd { begin: 3, ..local() })))
        }
        "local_sgd_averaged" => case("parameters_and_state", LOCAL, |by| {
            let with_state = LocalSgd { averaged: Averaged::ParamsAndState, ..local() };
            add(by, |p| p.with(with_state));
        }),
        "local_sgd_interval" => {
            case("adaptive", LOCAL, |by| add(by, |p| p.with(local().adaptive())))
        }
        "distributed" => case("head.weight", &[], |by| {
            by.distributed.insert("head.weight".to_owned());
        }),
        _ => None,
    }
}

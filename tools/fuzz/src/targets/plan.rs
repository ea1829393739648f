//! Any bytes as tensors, a rule, passes, a world and limits.

use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;

use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::LaunchLimits;
use fusestep_planner::{
    ClipByGlobalNorm, FuseAllReduce, GradientAccumulation, LocalSgd, Optimizer, Plan, PlanError,
    Planner, Shard, Stage, Topology, UpdateNorms, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

use crate::Outcome;
use crate::mutate::Numbers;

/// Most tensors, so that an input is done in milliseconds.
const MOST_TENSORS: usize = 40;

pub(crate) fn run(input: &[u8]) -> Outcome {
    let mut numbers = Numbers(input);
    let (world, rank) = (numbers.below(9) as usize, numbers.below(9) as usize);
    let text = match made(&mut Numbers(numbers.0), rank, world) {
        Ok(plan) => plan.to_string(),
        Err(error) => return Ok(error.to_string()),
    };
    let plan = |rank| {
        let plan = made(&mut Numbers(numbers.0), rank, world);
        plan.map_err(|error| format!("rank {rank} cannot plan, another can: {error}"))
    };
    check(world, plan)?;
    Ok(text.lines().take(3).collect())
}

fn made(numbers: &mut Numbers<'_>, rank: usize, world: usize) -> Result<Plan, PlanError> {
    let rules: [Optimizer; 5] = [
        Adam::default().into(),
        Sgd::default().into(),
        Lamb::default().into(),
        Lars::default().into(),
        Adam { lr: f64::from_bits(numbers.wide()), ..Adam::default() }.into(),
    ];
    let rule = rules[numbers.byte() as usize % rules.len()];
    let limits = LaunchLimits {
        argument_bytes: numbers.below(40_000) as usize,
        chunk_elements: numbers.wide() as u32,
        chunks_per_launch: numbers.wide() as u32,
        ..LaunchLimits::default()
    };
    let mut planner = Planner::new(rule).limits(limits);
    let passes = numbers.byte();
    if passes & 1 > 0 {
        planner = planner.with(FuseAllReduce::of_bytes(numbers.wide()));
    }
    if passes & 2 > 0 {
        let zero = ZeroStage::of(numbers.byte() % 4).unwrap_or_default();
        planner = planner.with(Shard::new(zero));
    }
    if passes & 4 > 0 {
        planner = planner.with(ClipByGlobalNorm::new(f64::from_bits(numbers.wide())));
    }
    if passes & 8 > 0
        && let Some(every) = NonZeroU32::new(numbers.wide() as u32)
    {
        planner = planner.with(GradientAccumulation::every(every));
    }
    if passes & 16 > 0
        && let Some(every) = NonZeroU64::new(numbers.wide())
    {
        planner = planner.with(LocalSgd::every(every));
    }
    if passes & 32 > 0 {
        planner = planner.with(UpdateNorms);
    }
    if passes & 64 > 0 {
        planner = planner.naive();
    }
    let mut params = Vec::new();
    while !numbers.is_empty() && params.len() < MOST_TENSORS {
        let dtypes = [DType::F32, DType::F32, DType::F16, DType::BF16, DType::I32];
        let dtype = dtypes[numbers.byte() as usize % dtypes.len()];
        let rank = numbers.byte() % 3;
        let dims: Vec<u64> = (0..rank).map(|_| dim(numbers)).collect();
        let name = match numbers.byte() {
            0 => "again".to_owned(),
            _ => format!("t{}", params.len()),
        };
        params.push(ParamDesc::new(name, Shape::new(dims)?, dtype));
    }
    planner.plan_for(&params, Topology::new(rank, world)?)
}

/// Mostly of a size that is planned, now and then any number.
fn dim(numbers: &mut Numbers<'_>) -> u64 {
    match numbers.byte() {
        0 => numbers.wide(),
        _ => numbers.below(1 << 12),
    }
}

/// Elements of a tensor of a storage that one launch updates.
type TensorPart = (usize, u32, Range<u64>);

/// Every element is updated once: on every rank, or on one of all.
fn check(world: usize, plan_of: impl Fn(usize) -> Result<Plan, String>) -> Result<(), String> {
    let mut pooled: Vec<TensorPart> = Vec::new();
    let (mut whole, mut expected) = (true, 0);
    for rank in 0..world {
        let plan = plan_of(rank)?;
        expected = plan.params().iter().map(ParamDesc::numel).sum();
        let mut own = parts(&plan);
        own.sort_by_key(part_start);
        disjoint(&own)?;
        whole &= numel(&own) == expected;
        pooled.append(&mut own);
    }
    if whole {
        return Ok(());
    }
    pooled.sort_by_key(part_start);
    disjoint(&pooled)?;
    match numel(&pooled) {
        found if found == expected => Ok(()),
        found => Err(format!("expected {expected} elements, found {found} updated")),
    }
}

fn parts(plan: &Plan) -> Vec<TensorPart> {
    let mut parts = Vec::new();
    for stage in plan.stages() {
        let (Stage::Optimize(stage) | Stage::ReduceUpdate(stage)) = stage else {
            continue;
        };
        for record in stage.batches.iter().flat_map(|batch| &batch.records) {
            let elements = record.first_element..record.first_element + record.numel;
            parts.push((stage.storage, record.tensor, elements));
        }
    }
    parts
}

fn part_start((storage, tensor, elements): &TensorPart) -> (usize, u32, u64) {
    (*storage, *tensor, elements.start)
}

fn numel(parts: &[TensorPart]) -> u64 {
    parts.iter().map(|part| part.2.end - part.2.start).sum()
}

/// Of parts in order.
fn disjoint(parts: &[TensorPart]) -> Result<(), String> {
    for pair in parts.windows(2) {
        let [before, after] = pair else { continue };
        let same = (before.0, before.1) == (after.0, after.1);
        if same && before.2.end > after.2.start {
            return Err(format!("updated twice: {before:?} and {after:?}"));
        }
    }
    Ok(())
}

//! Buckets cut out of segments, and each rank's part of them.

use std::ops::Range;

use crate::error::{PlanError, Result};
use crate::plan::bucket::{Bucket, Segment};
use crate::plan::settings::{Caps, Grain, Oversize};
use crate::plan::stage::{Gather, Reduce, Stage};
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;

/// Elements that parts are multiples of where buckets are long.
const SLOT_ELEMENTS: u64 = 64;

/// A bucket has at least so many slots for each rank where parts are cut at slots: they differ by 2
/// % at most then.
const SLOTS_OF_RANK: u64 = 64;

/// Most buckets of a plan.
pub const MAX_BUCKETS: usize = 1 << 20;

/// Most parts of ranks in all buckets together: a gibibyte of their bounds.
const MAX_PARTS: usize = 1 << 27;

/// The segments and buckets of a plan's gradients, in the order of `ready` (parameters). Slices
/// that each rank has for itself are in none: their gradients are not reduced and lie in their own
/// list.
///
/// # Errors
/// [`PlanError::TooManyBuckets`].
pub(crate) fn segments(
    plan: &Plan,
    ready: &[u32],
    caps: Option<&Caps>,
    grain: Grain,
) -> Result<(Vec<Segment>, Vec<Bucket>)> {
    let mut filling = Filling {
        plan,
        caps,
        grain,
        open: vec![None; plan.storages.len()],
        segments: Vec::new(),
        buckets: Vec::new(),
    };
    for &param in ready {
        let (storage, position) = plan.places[param as usize];
        let spec = &plan.storages[storage];
        if !spec.distributed && spec.layout.numel(position) > 0 {
            filling.add(storage, position as u32);
        }
    }
    for storage in 0..plan.storages.len() {
        filling.close(storage);
    }
    // A plan that is not fused yet has one for each tensor, and may have fewer in the end.
    if caps.is_some() && filling.buckets.len() > MAX_BUCKETS {
        return Err(too_many(plan.shard_group));
    }
    Ok((filling.segments, filling.buckets))
}

/// Most buckets of so many ranks that share out.
fn most_of(ranks: usize) -> usize {
    MAX_BUCKETS.min(MAX_PARTS / (ranks + 1))
}

fn too_many(ranks: usize) -> PlanError {
    PlanError::TooManyBuckets { expected: most_of(ranks), world: ranks }
}

struct Filling<'a> {
    plan: &'a Plan,
    caps: Option<&'a Caps>,
    grain: Grain,
    /// Tensors of the segment that is being filled, for each storage.
    open: Vec<Option<Range<u32>>>,
    segments: Vec<Segment>,
    buckets: Vec<Bucket>,
}

impl Filling<'_> {
    fn add(&mut self, storage: usize, tensor: u32) {
        let spec = &self.plan.storages[storage];
        let Some(caps) = self.caps else {
            self.open[storage] = Some(tensor..tensor + 1);
            return self.close(storage);
        };
        let cap = (caps.bytes / spec.grad_dtype().len_bytes() as u64).max(1);
        let numel = spec.layout.numel(tensor as usize);
        if let Some(open) = self.open[storage].clone() {
            let together = end_of(spec, tensor) - spec.layout.offset(open.start as usize);
            let count = open.clone().filter(|&t| spec.layout.numel(t as usize) > 0).count();
            // Only neighbours can share a range; a layout in the order of readiness makes all of
            // them neighbours.
            let next = (open.end..tensor).all(|t| spec.layout.numel(t as usize) == 0)
                && open.end <= tensor;
            if next && together <= cap.max(1) && count < caps.count {
                self.open[storage] = Some(open.start..tensor + 1);
                return;
            }
            self.close(storage);
        }
        self.open[storage] = Some(tensor..tensor + 1);
        if numel >= cap {
            self.close(storage);
        }
    }

    fn close(&mut self, storage: usize) {
        let Some(tensors) = self.open[storage].take() else {
            return;
        };
        let spec = &self.plan.storages[storage];
        let start = spec.layout.offset(tensors.start as usize);
        let elements = start..end_of(spec, tensors.end - 1);
        let segment = self.segments.len();
        let first = self.buckets.len();
        let mut at = start;
        while at < elements.end && self.buckets.len() <= MAX_BUCKETS {
            let end = self.end_of_bucket(spec, &elements, at);
            self.buckets.push(Bucket { storage, segment, elements: at..end, bounds: Vec::new() });
            at = end;
        }
        self.segments.push(Segment {
            storage,
            elements,
            tensors,
            buckets: first..self.buckets.len(),
        });
    }

    /// The end of the bucket that begins at `at`: the segment's, unless that is one tensor longer
    /// than the cap.
    fn end_of_bucket(&self, spec: &StorageSpec, elements: &Range<u64>, at: u64) -> u64 {
        let Some(caps) = self.caps.filter(|caps| caps.oversize == Oversize::Split) else {
            return elements.end;
        };
        let grain = match self.grain {
            Grain::Elements => 1,
            Grain::Of(elements) => elements,
            Grain::Tensors => return elements.end,
        };
        let cap = (caps.bytes / spec.grad_dtype().len_bytes() as u64).max(1);
        let cap = (cap / grain * grain).max(grain);
        // What is left beyond the cap may be padding only.
        let first = spec.layout.offsets().partition_point(|&offset| offset <= elements.start) - 1;
        let last = spec.layout.offset(first) + spec.layout.numel(first);
        let one = end_of(spec, first as u32) == elements.end;
        if one && last.saturating_sub(at) > cap { at + cap } else { elements.end }
    }
}

/// The end of a tensor's slot.
fn end_of(spec: &StorageSpec, tensor: u32) -> u64 {
    spec.layout.offsets()[tensor as usize + 1]
}

/// Cuts every bucket into a part for each rank, so that what each rank has of a storage is as equal
/// as the grain allows.
///
/// # Errors
/// [`PlanError::TooManyBuckets`] before anything is cut.
pub(crate) fn cut(
    storages: &[StorageSpec],
    buckets: &mut [Bucket],
    ranks: usize,
    grain: Grain,
) -> Result<()> {
    if buckets.len() > most_of(ranks) {
        return Err(too_many(ranks));
    }
    let mut loads = vec![vec![0u64; ranks]; storages.len()];
    for bucket in buckets {
        let (spec, loads) = (&storages[bucket.storage], &mut loads[bucket.storage]);
        let numel = bucket.numel();
        let unit = match grain {
            Grain::Elements if numel >= SLOT_ELEMENTS * SLOTS_OF_RANK * ranks as u64 => {
                Grain::Of(SLOT_ELEMENTS)
            }
            other => other,
        };
        // What a rank would need to have as much as all others, and all of them together.
        let fair = (loads.iter().sum::<u64>() + numel).div_ceil(ranks as u64);
        let wanted: Vec<u64> = loads.iter().map(|load| fair.saturating_sub(*load)).collect();
        let all: u64 = wanted.iter().sum::<u64>().max(1);
        let mut sum = 0;
        bucket.bounds = vec![bucket.elements.start];
        for (rank, wanted) in wanted.iter().enumerate() {
            sum += wanted;
            let ideal = (u128::from(numel) * u128::from(sum) / u128::from(all)) as u64;
            let before = bucket.bounds[rank];
            let at = if rank + 1 == ranks {
                bucket.elements.end
            } else {
                snap(spec, &bucket.elements, bucket.elements.start + ideal, unit).max(before)
            };
            loads[rank] += at - before;
            bucket.bounds.push(at);
        }
    }
    Ok(())
}

/// The place next to `at` where the grain allows a cut.
fn snap(spec: &StorageSpec, elements: &Range<u64>, at: u64, grain: Grain) -> u64 {
    let offsets = spec.layout.offsets();
    let tensor = offsets.partition_point(|&offset| offset <= at).max(1) - 1;
    if tensor >= spec.layout.tensors() {
        return elements.end;
    }
    let (start, next) = (offsets[tensor], offsets[tensor + 1]);
    let (low, high) = match grain {
        Grain::Elements => return at,
        Grain::Tensors => (start, next),
        Grain::Of(grain) => {
            let low = start + (at - start) / grain * grain;
            let end = start + spec.layout.numel(tensor);
            let high = if low + grain < end { low + grain } else { next };
            (low, high)
        }
    };
    let nearest = if at - low <= high - at { low } else { high };
    nearest.clamp(elements.start, elements.end)
}

/// Makes the buckets for the storages as they are, with a call for each that is reduced and for
/// each that is gathered.
pub(crate) fn make(plan: &mut Plan) -> Result<()> {
    if plan.topology.world == 1 {
        return Ok(());
    }
    let mut stages = plan.stages.iter().enumerate();
    let reduced = stages.find_map(|(at, stage)| match stage {
        Stage::Reduce(reduce) => Some((at, reduce.result)),
        _ => None,
    });
    let gathers = |stage: &Stage| matches!(stage, Stage::Gather(_));
    let gathers = plan.stages.iter().any(gathers);
    (plan.segments, plan.buckets) = segments(plan, &plan.ready, plan.caps.as_ref(), plan.grain()?)?;
    let calls = |stage: &Stage| matches!(stage, Stage::Reduce(_) | Stage::Gather(_));
    plan.stages.retain(|stage| !calls(stage));
    let buckets = 0..plan.buckets.len();
    if let Some((at, result)) = reduced {
        let reduce = |bucket| Stage::Reduce(Reduce { bucket, result });
        plan.stages.splice(at..at, buckets.clone().map(reduce));
    }
    if gathers {
        let gather = |bucket| Stage::Gather(Gather { bucket, broadcasts: Vec::new() });
        plan.stages.extend(buckets.map(gather));
    }
    Ok(())
}

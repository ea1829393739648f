//! A rank's counts in a checkpoint: 64-bit words.

use std::num::NonZeroU64;

use fusestep_planner::{OpenLanes, RunCounts, RunImage};

use crate::manifest::Manifest;

/// Words of counts that do not depend on the parameters.
const FIXED_WORDS: usize = 16;

/// Counts of a checkpoint that is the same for all ranks.
pub(crate) fn of_all(image: &RunImage, manifest: &Manifest) -> RunCounts {
    let steps = |name: &String| manifest.steps_of.get(name).copied();
    let params = image.params.iter();
    RunCounts {
        step: manifest.step,
        skipped: manifest.skipped,
        loss_scale: manifest.loss_scale,
        steps_of: params.map(|param| steps(&param.name).unwrap_or(manifest.step)).collect(),
        given: vec![0; image.params.len()],
        ..RunCounts::default()
    }
}

/// Bytes of a rank's counts; weights of micro-batches lie behind them if a window of lanes has
/// begun.
pub(crate) fn len_bytes(params: usize, lanes: Option<&OpenLanes>) -> usize {
    let weights = lanes.map_or(0, |lanes| lanes.all_micro_batches() as usize);
    8 * (FIXED_WORDS + 2 * params + weights)
}

pub(crate) fn to_bytes(counts: &RunCounts) -> Vec<u8> {
    let (scale, good, bad) = counts.loss_scale.unwrap_or_default();
    let (first_loss, first_lr) = counts.first.unwrap_or_default();
    let fixed: [u64; FIXED_WORDS] = [
        counts.step,
        counts.skipped,
        u64::from(counts.loss_scale.is_some()),
        scale.to_bits(),
        u64::from(good),
        u64::from(bad),
        counts.micro_steps,
        counts.weights.to_bits(),
        counts.weights_hash,
        counts.since_average,
        u64::from(counts.loss.is_some()),
        counts.loss.unwrap_or_default().to_bits(),
        u64::from(counts.first.is_some()),
        first_loss.to_bits(),
        first_lr.to_bits(),
        counts.every.map_or(0, NonZeroU64::get),
    ];
    let words = fixed.iter().chain(&counts.steps_of).chain(&counts.given);
    let weights = counts.lanes.iter().flat_map(|lanes| &lanes.weights);
    let words = words.copied().chain(weights.map(|weight| weight.to_bits()));
    words.flat_map(u64::to_le_bytes).collect()
}

/// The counts of all ranks together in a window of lanes that has begun; `None` if the bytes are
/// not these.
pub(crate) fn of_lanes(all: &[&[u8]], params: usize, begun: &OpenLanes) -> Option<RunCounts> {
    let mut together: Option<RunCounts> = None;
    for bytes in all {
        let mut own = from_bytes(bytes, params, Some(begun))?;
        let Some(first) = &mut together else {
            together = Some(own);
            continue;
        };
        for (first, own) in first.given.iter_mut().zip(&mut own.given) {
            *first = (*first).max(std::mem::take(own));
        }
        let given = vec![0; params];
        let weights = own.lanes.take().map_or(Vec::new(), |lanes| lanes.weights);
        if let Some(lanes) = &mut first.lanes {
            lanes.weights.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
        let lasting = |of: &RunCounts| RunCounts {
            given: given.clone(),
            lanes: None,
            weights: 0.0,
            micro_steps: 0,
            ..of.clone()
        };
        if lasting(first) != lasting(&own) {
            return None;
        }
    }
    let counts = together?;
    let lanes = counts.lanes.as_ref()?;
    let right = |weight: &f64| weight.is_finite() && *weight >= 0.0;
    lanes.weights.iter().all(right).then_some(counts)
}

/// Reads counts from bytes; `None` if the bytes are not counts of `params` parameters, and of the
/// window of lanes that has begun.
pub(crate) fn from_bytes(
    bytes: &[u8],
    params: usize,
    begun: Option<&OpenLanes>,
) -> Option<RunCounts> {
    if bytes.len() != len_bytes(params, begun) {
        return None;
    }
    let word = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
    let words: Vec<u64> = bytes.chunks_exact(8).map(word).collect::<Option<_>>()?;
    let float = |at: usize| f64::from_bits(words[at]);
    let (good, bad) = (words[4].try_into().ok()?, words[5].try_into().ok()?);
    let (steps_of, given) = words[FIXED_WORDS..].split_at(params);
    let (given, weights) = given.split_at(params);
    let weights = weights.iter().map(|word| f64::from_bits(*word));
    let lanes = begun.map(|begun| OpenLanes { weights: weights.collect(), ..begun.clone() });
    Some(RunCounts {
        step: words[0],
        skipped: words[1],
        loss_scale: (words[2] > 0).then_some((float(3), good, bad)),
        micro_steps: words[6],
        weights: float(7),
        weights_hash: words[8],
        since_average: words[9],
        loss: (words[10] > 0).then_some(float(11)),
        first: (words[12] > 0).then_some((float(13), float(14))),
        every: NonZeroU64::new(words[15]),
        steps_of: steps_of.to_vec(),
        given: given.to_vec(),
        lanes,
    })
}

/// The counts of one rank, from bytes of any number of parameters.
fn of_any(bytes: &[u8]) -> Option<RunCounts> {
    let words = bytes.len() / 8;
    from_bytes(bytes, words.checked_sub(FIXED_WORDS)? / 2, None)
}

/// Counts that stand for all ranks, if ranks differ only in the gradients that each has given and
/// in losses. Otherwise the error names the count that differs.
pub(crate) fn together(all: &[&[u8]]) -> Result<RunCounts, &'static str> {
    let mut ranks = all.iter().map(|bytes| of_any(bytes).ok_or("counts"));
    let mut first = ranks.next().ok_or("counts")??;
    first.loss = None;
    for other in ranks {
        let other = other?;
        for (own, &given) in first.given.iter_mut().zip(&other.given) {
            *own = given.max(*own);
        }
        let alike = RunCounts { loss: None, given: first.given.clone(), ..other };
        if alike != first {
            return Err("counts of steps");
        }
    }
    Ok(first)
}

/// Counts for the mean of all ranks: the most steps of any rank, the smallest loss scale, no steps
/// since the average. Micro-steps and their weights have to be the same on all ranks.
pub(crate) fn averaged(all: &[&[u8]]) -> Result<RunCounts, &'static str> {
    let mut ranks = all.iter().map(|bytes| of_any(bytes).ok_or("counts"));
    let mut mean = ranks.next().ok_or("counts")??;
    (mean.loss, mean.since_average) = (None, 0);
    for other in ranks {
        let other = other?;
        let window = |of: &RunCounts| (of.micro_steps, of.weights.to_bits(), of.weights_hash);
        if window(&other) != window(&mean) {
            return Err("micro-steps or their weights");
        }
        mean.step = mean.step.max(other.step);
        mean.skipped = mean.skipped.min(other.skipped);
        let smaller = |of: &(f64, u32, u32)| mean.loss_scale.is_none_or(|own| of.0 < own.0);
        mean.loss_scale = other.loss_scale.filter(smaller).or(mean.loss_scale);
        let steps = mean.steps_of.iter_mut().zip(&other.steps_of);
        let given = mean.given.iter_mut().zip(&other.given);
        for (own, &other) in steps.chain(given) {
            *own = other.max(*own);
        }
    }
    Ok(mean)
}

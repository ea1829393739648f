//! A rank's counts in a checkpoint.

use std::num::NonZeroU64;

use super::Manifest;
use crate::{Plan, State};

/// Words of [`Progress`] that do not depend on the parameters.
const FIXED_WORDS: usize = 16;

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Progress {
    pub(crate) step: u64,
    pub(crate) skipped: u64,
    /// Scale, good steps, bad steps.
    pub(crate) loss_scale: Option<(f64, u32, u32)>,
    pub(super) micro_steps: u64,
    pub(super) weights: f64,
    pub(super) weights_hash: u64,
    pub(super) since_average: u64,
    pub(super) loss: Option<f64>,
    pub(super) first: Option<(f64, f64)>,
    pub(super) every: Option<NonZeroU64>,
    /// Steps taken, for each parameter.
    pub(crate) steps_of: Vec<u64>,
    pub(super) given: Vec<u64>,
}

impl Progress {
    pub(super) fn of(state: &State) -> Self {
        let steps_of = state.steps_behind.iter().map(|behind| state.step - behind);
        let arena = &state.arena;
        Self {
            step: state.step(),
            skipped: state.skipped(),
            loss_scale: state
                .loss_scale()
                .map(|scale| (scale.scale(), scale.good_steps(), scale.bad_steps())),
            micro_steps: u64::from(arena.micro_steps),
            weights: arena.weights,
            weights_hash: arena.weights_hash,
            since_average: state.since_average,
            loss: state.adapting.loss,
            first: state.adapting.first,
            every: state.adapting.every,
            steps_of: steps_of.collect(),
            given: arena.given.iter().map(|&given| u64::from(given)).collect(),
        }
    }

    /// Counts of a checkpoint that is the same for all ranks.
    pub(super) fn of_all(plan: &Plan, manifest: &Manifest) -> Self {
        let steps = |name: &String| manifest.steps_of.get(name).copied();
        let params = plan.params().iter();
        Self {
            step: manifest.step,
            skipped: manifest.skipped,
            loss_scale: manifest.loss_scale,
            steps_of: params.map(|param| steps(&param.name).unwrap_or(manifest.step)).collect(),
            given: vec![0; plan.params().len()],
            ..Self::default()
        }
    }

    pub(super) fn len_bytes(params: usize) -> usize {
        8 * (FIXED_WORDS + 2 * params)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let (scale, good, bad) = self.loss_scale.unwrap_or_default();
        let (first_loss, first_lr) = self.first.unwrap_or_default();
        let fixed: [u64; FIXED_WORDS] = [
            self.step,
            self.skipped,
            u64::from(self.loss_scale.is_some()),
            scale.to_bits(),
            u64::from(good),
            u64::from(bad),
            self.micro_steps,
            self.weights.to_bits(),
            self.weights_hash,
            self.since_average,
            u64::from(self.loss.is_some()),
            self.loss.unwrap_or_default().to_bits(),
            u64::from(self.first.is_some()),
            first_loss.to_bits(),
            first_lr.to_bits(),
            self.every.map_or(0, NonZeroU64::get),
        ];
        let words = fixed.iter().chain(&self.steps_of).chain(&self.given);
        words.flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Reads counts from bytes; `None` if the bytes are not counts of `params` parameters.
    pub(super) fn from_bytes(bytes: &[u8], params: usize) -> Option<Self> {
        if bytes.len() != Self::len_bytes(params) {
            return None;
        }
        let word = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
        let words: Vec<u64> = bytes.chunks_exact(8).map(word).collect::<Option<_>>()?;
        let float = |at: usize| f64::from_bits(words[at]);
        let (good, bad) = (words[4].try_into().ok()?, words[5].try_into().ok()?);
        let (steps_of, given) = words[FIXED_WORDS..].split_at(params);
        Some(Self {
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
        })
    }

    /// The counts of one rank, from bytes of any number of parameters.
    fn of_any(bytes: &[u8]) -> Option<Self> {
        let words = bytes.len() / 8;
        Self::from_bytes(bytes, words.checked_sub(FIXED_WORDS)? / 2)
    }

    /// Counts that stand for all ranks, if ranks differ only in the gradients that each has given
    /// and in losses. Otherwise the error names the count that differs.
    pub(super) fn together(all: &[&[u8]]) -> Result<Self, &'static str> {
        let mut ranks = all.iter().map(|bytes| Self::of_any(bytes).ok_or("counts"));
        let mut first = ranks.next().ok_or("counts")??;
        first.loss = None;
        for other in ranks {
            let other = other?;
            for (own, &given) in first.given.iter_mut().zip(&other.given) {
                *own = given.max(*own);
            }
            let alike = Self { loss: None, given: first.given.clone(), ..other };
            if alike != first {
                return Err("counts of steps");
            }
        }
        Ok(first)
    }

    /// Counts for the mean of all ranks: the most steps of any rank, the smallest loss scale, no
    /// steps since the average. Micro-steps and their weights have to be the same on all ranks.
    pub(super) fn averaged(all: &[&[u8]]) -> Result<Self, &'static str> {
        let mut ranks = all.iter().map(|bytes| Self::of_any(bytes).ok_or("counts"));
        let mut mean = ranks.next().ok_or("counts")??;
        (mean.loss, mean.since_average) = (None, 0);
        for other in ranks {
            let other = other?;
            let window = |of: &Self| (of.micro_steps, of.weights.to_bits(), of.weights_hash);
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
}

//! One step of one rank.

use std::time::Instant;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::Backend;
use fusestep_tensor::{DType, Role};
use serde::Serialize;

use super::comms::{Comms, Reducing};
use super::merge::{Absorb, Divisor};
use super::slots::Slot;
use super::words::Words;
use super::{Bucket, RankPlan, RankState, Topology};
use crate::passes::Zero;
use crate::{PlanError, StepReport};

/// What one micro-step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RankReport {
    /// The update; `None` if the micro-step only added gradients.
    pub update: Option<StepReport>,
    /// Whether parameters were averaged across ranks.
    pub averaged: bool,
    /// Time in which the step waited for its gradients to be reduced, in nanoseconds: what of the calls the backward passes did not
    /// hide.
    pub exposed_ns: u64,
    /// Most bytes of buckets at one time since the update before: with rings from ZeRO stage 2 on fewer than of all of them, since
    /// those that are through give their memory to those that come.
    pub bucket_peak_bytes: u64,
}

/// A window that ends.
#[derive(Clone, Copy, Debug)]
struct Window {
    divisor: Divisor,
    /// The weight of a micro-step that is still to be added; `None` if the window is flushed between two.
    fresh: Option<Option<f64>>,
}

impl RankPlan {
    /// Ends a micro-step, and at the end of a window reduces, updates and gathers.
    ///
    /// All ranks call it, whether they have given gradients or not. Sums across ranks are formed in rank order and norms in the
    /// fixed tree, so parameters get the same bits at every ZeRO stage and with any buckets and rings.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::Topology`]: nothing has been written. [`PlanError::Collective`],
    /// [`PlanError::Backend`]: the state refuses further steps ([`PlanError::Poisoned`]).
    pub fn run_with(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<RankReport, PlanError> {
        self.check(state, comms)?;
        let last = state.micro_steps + 1 == self.micro_steps();
        let given_weight = state.weight.take();
        let weight = given_weight.unwrap_or(1.0);
        let divisor = self.divisor(state, weight);
        if !last {
            if self.reduces_each() {
                self.reduce_micro_step(state, comms, given_weight)?;
            }
            state.micro_steps += 1;
            state.weights += weight;
            state.given_now.fill(false);
            state.ready.again();
            return Ok(RankReport::default());
        }
        let window = Window {
            divisor,
            fresh: Some(given_weight),
        };
        self.update(state, backend, comms, window)
    }

    /// Updates from a window that is shorter than planned: what the last micro-steps before an epoch's end have added. Does
    /// nothing between windows; gradients of a micro-step under way have to be ended by [`Self::run_with`] first.
    ///
    /// # Errors
    /// As [`Self::run_with`].
    pub fn flush(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<RankReport, PlanError> {
        self.check(state, comms)?;
        if state.micro_steps == 0 {
            return Ok(RankReport::default());
        }
        let window = Window {
            divisor: self.divisor(state, 0.0),
            fresh: None,
        };
        self.update(state, backend, comms, window)
    }

    fn check(&self, state: &RankState, comms: &Comms<'_>) -> Result<(), PlanError> {
        self.check_state(state)?;
        let (expected, found) = (self.topology(), (comms.rank(), comms.world()));
        if (expected.rank, expected.world) == found {
            return self.check_groups(comms);
        }
        let text = |Topology { rank, world }| format!("rank {rank} of {world}");
        Err(PlanError::Topology {
            expected: text(expected),
            found: text(Topology {
                rank: found.0,
                world: found.1,
            }),
        })
    }

    fn check_groups(&self, comms: &Comms<'_>) -> Result<(), PlanError> {
        let (expected, found) = (self.shard_place().world, comms.group_size());
        if expected == found {
            return Ok(());
        }
        Err(PlanError::Topology {
            expected: format!(
                "calls within shard groups of {expected} ranks; make them by `Comms::in_groups`"
            ),
            found: format!("groups of {found}"),
        })
    }

    fn update(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        window: Window,
    ) -> Result<RankReport, PlanError> {
        comms.set_plan(self.hash());
        state.params_version += 1;
        let done = self.try_update(state, backend, comms, window);
        if done.is_err() {
            self.poison(state);
        }
        done
    }

    fn try_update(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        window: Window,
    ) -> Result<RankReport, PlanError> {
        let present = match (self.reduces_each(), window.fresh) {
            (false, _) => {
                self.reduce_buckets(state, comms, window.divisor)?;
                self.agree_on_present(state, comms)?
            }
            (true, fresh) => {
                if let Some(weight) = fresh {
                    self.reduce_buckets(state, comms, window.divisor)?;
                    self.accumulate(state, weight);
                }
                let present = self.agree_on_present(state, comms)?;
                self.conclude_window(state, window.divisor);
                present
            }
        };
        self.decide(state, backend, comms, &present)?;
        self.hand_over(state, backend, &present)?;
        let report = self.local.run(&mut state.local, backend)?;
        let mut report = StepReport {
            absent: present.iter().filter(|&&present| present == 0).count() as u64,
            ..report
        };
        self.report_update_norm(state, comms, &mut report)?;
        if !report.skipped {
            for (steps, &present) in state.steps_of.iter_mut().zip(&present) {
                *steps += u64::from(present);
            }
            self.replicate(state, backend, comms)?;
        }
        let averaged = self.average(state, backend, comms)?;
        state.micro_steps = 0;
        state.weights = 0.0;
        state.weights_hash = 0;
        state.given.fill(0);
        state.given_now.fill(false);
        state.ready.again();
        Ok(RankReport {
            update: Some(report),
            averaged,
            exposed_ns: std::mem::take(&mut state.exposed_ns),
            bucket_peak_bytes: std::mem::take(&mut state.bucket_peak_bytes),
        })
    }

    /// Reduces all buckets and copies this rank's part of them to its shards.
    pub(crate) fn reduce_buckets(
        &self,
        state: &mut RankState,
        comms: &mut Comms<'_>,
        divisor: Divisor,
    ) -> Result<(), PlanError> {
        self.complete(state, divisor);
        let start = Instant::now();
        if self.reduces() {
            while let Some(bucket) = state.ready.rest() {
                self.start_bucket(state, comms, bucket)?;
            }
        }
        state.exposed_ns += start.elapsed().as_nanos() as u64;
        self.collect(state, comms)
    }

    /// Finishes gradients that were not given in the window's last micro-step: divides what earlier ones have added, and writes
    /// zeros where there is none.
    fn complete(&self, state: &mut RankState, divisor: Divisor) {
        for param in 0..self.params().len() {
            if state.given_now[param] {
                continue;
            }
            let given = state.given[param] > 0 && !self.reduces_each();
            let how = Absorb {
                first: false,
                weight: None,
                last: Some(divisor),
            };
            for &at in &self.spans_of[param] {
                if given {
                    self.absorb_span(state, at, None, how);
                    continue;
                }
                let bucket = &self.buckets[at.0 as usize];
                let len_bytes = self.len_bytes_of(bucket);
                if let Some(words) = state.slots.filling(at.0 as usize, len_bytes) {
                    let span = &bucket.spans[at.1 as usize];
                    let width = self.flats[bucket.flat].grad_dtype.len_bytes();
                    let (start, end) = (span.at as usize, (span.at + span.numel) as usize);
                    words.bytes_mut()[start * width..end * width].fill(0);
                }
            }
        }
    }

    /// For each parameter whether any rank has given a gradient.
    fn agree_on_present(
        &self,
        state: &RankState,
        comms: &mut Comms<'_>,
    ) -> Result<Vec<u8>, PlanError> {
        let mut present: Vec<u8> = state
            .given
            .iter()
            .map(|&given| u8::from(given > 0))
            .collect();
        let params = present.len();
        if self.reduces_each() {
            present.extend(Self::weights_to_compare(state));
        }
        if self.reduces() {
            let operation = Operation::AllReduce(ReduceOp::Max);
            comms.in_place(operation, DType::U8, None, &mut present)?;
        }
        self.check_weights(&present[params..])?;
        present.truncate(params);
        Ok(present)
    }

    /// Waits for all buckets and copies this rank's part of each to its shard.
    fn collect(&self, state: &mut RankState, comms: &mut Comms<'_>) -> Result<(), PlanError> {
        for (index, bucket) in self.buckets.iter().enumerate() {
            let mut words = match state.slots.take(index) {
                Slot::Filling(words) | Slot::InFlight(Reducing::Done(words)) => words,
                Slot::InFlight(Reducing::Pending(pending)) => {
                    let start = Instant::now();
                    let words = pending.wait()?;
                    state.exposed_ns += start.elapsed().as_nanos() as u64;
                    words
                }
                Slot::Through => {
                    state.slots.put(index, Slot::Filling(Words::default()));
                    continue;
                }
                Slot::Lost => return Err(self.poison(state)),
            };
            if self.reduces() && index < self.reduced {
                let start = Instant::now();
                self.reduce_across(bucket, comms, &mut words)?;
                state.exposed_ns += start.elapsed().as_nanos() as u64;
            }
            self.take_own_part(state, index, &words);
            let kept = match self.keeps(index) {
                true => words,
                false => Words::default(),
            };
            state.slots.put(index, Slot::Filling(kept));
        }
        let peak_bytes = state.slots.settle() as u64;
        state.bucket_peak_bytes = state.bucket_peak_bytes.max(peak_bytes);
        Ok(())
    }

    /// Copies this rank's part of a reduced bucket to its shard.
    pub(crate) fn take_own_part(&self, state: &mut RankState, index: usize, words: &Words) {
        let bucket = &self.buckets[index];
        let width = self.flats[bucket.flat].grad_dtype.len_bytes();
        let own = self.own(bucket.flat);
        let shard = state.shards[bucket.flat].bytes_mut();
        for span in &bucket.spans {
            let start = span.flat_at.max(own.start);
            let end = (span.flat_at + span.numel).min(own.end);
            if start < end {
                let from = (span.at + start - span.flat_at) as usize * width;
                let (at, to) = (start - own.start, end - own.start);
                let part = &words.bytes()[from..from + (to - at) as usize * width];
                shard[at as usize * width..to as usize * width].copy_from_slice(part);
            }
        }
    }

    /// Takes the mean over groups of what this rank's group has come to, in order of the groups.
    fn reduce_across(
        &self,
        bucket: &Bucket,
        comms: &mut Comms<'_>,
        words: &mut Words,
    ) -> Result<(), PlanError> {
        let dtype = self.flats[bucket.flat].grad_dtype;
        let width = dtype.len_bytes();
        let rank = self.shard_place().rank;
        let start: usize = bucket.counts[..rank].iter().sum();
        let own = match self.zero() >= Zero::Zero2 {
            true => start * width..(start + bucket.counts[rank]) * width,
            false => 0..bucket.numel as usize * width,
        };
        Ok(comms.across_groups(dtype, &mut words.bytes_mut()[own])?)
    }

    /// The elements of a line that this rank updates.
    pub(crate) fn own(&self, line: usize) -> std::ops::Range<u64> {
        self.flats[line].own(self.zero(), self.shard_place().rank)
    }

    /// Gives the local state its gradients.
    fn hand_over(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        present: &[u8],
    ) -> Result<(), PlanError> {
        let mut local = 0;
        for (line, pieces) in self.pieces.iter().enumerate() {
            let width = self.flats[line].grad_dtype.len_bytes();
            for piece in pieces {
                let position = match self.zero() {
                    Zero::Zero0 => piece.param as usize,
                    _ => local,
                };
                local += 1;
                if present[piece.param as usize] == 0 {
                    state.local.set_absent_at(position);
                    continue;
                }
                let (start, end) = (piece.at as usize, (piece.at + piece.numel) as usize);
                let bytes = &state.shards[line].bytes()[start * width..end * width];
                let name = &self.local.params()[position].name;
                state.local.write(backend, Role::Grad, name, bytes)?;
            }
        }
        Ok(())
    }
}

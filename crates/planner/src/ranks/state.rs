//! What one rank holds.

use std::num::NonZeroU64;

use fusestep_launch::Backend;
use fusestep_tensor::Role;

use super::average::Adapting;
use super::comms::{BucketCall, Comms};
use super::merge::{Absorb, Divisor, absorb};
use super::micro_step::sums_of;
use super::norm::RankNorm;
use super::ready::Ready;
use super::slots::{Slot, Slots};
use super::update_norms::RankUpdates;
use super::words::Words;
use super::{Bucket, RankPlan};
use crate::passes::{Merged, Zero};
use crate::{PlanError, State};

/// Tensors, counts and gradients of one rank of a training run, allocated by [`RankPlan::allocate`].
#[derive(Debug)]
pub struct RankState {
    pub(crate) plan_hash: u64,
    pub(crate) local: State,
    pub(crate) slots: Slots,
    /// Which of them may be reduced.
    pub(crate) ready: Ready,
    /// For each parameter how often its gradient has been given in this window.
    pub(crate) given: Vec<u32>,
    /// For each parameter whether it has been given in this micro-step.
    pub(crate) given_now: Vec<bool>,
    /// Micro-steps of this window that are over, and the sum of their weights.
    pub(crate) micro_steps: u32,
    pub(crate) weights: f64,
    /// Weight of the micro-step under way.
    pub(crate) weight: Option<f64>,
    /// For each bucket of 16-bit gradients their sums; empty without merge.
    pub(crate) sums: Vec<Vec<f32>>,
    /// For each line the gradients of this rank's shard.
    pub(crate) shards: Vec<Words>,
    /// For each line the sums of this window's gradients in the shard, if they are reduced in every micro-step.
    pub(crate) shard_sums: Vec<Words>,
    /// Stands for the weights of this window's micro-steps, if gradients are reduced in each.
    pub(crate) weights_hash: u64,
    /// For each line all parameters, if this rank updates only some but needs all.
    pub(crate) replicas: Vec<Words>,
    pub(crate) norm: Option<RankNorm>,
    /// Sums over what updates change, if they are measured.
    pub(crate) updates: Option<RankUpdates>,
    /// Time that this window's calls took behind its backward passes.
    pub(crate) exposed_ns: u64,
    /// Steps since parameters were averaged.
    pub(crate) since_average: u64,
    pub(crate) adapting: Adapting,
    /// For each parameter the steps it has taken, whoever holds it.
    pub(crate) steps_of: Vec<u64>,
    /// Most bytes of buckets at one time since the last update.
    pub(crate) bucket_peak_bytes: u64,
    /// How often parameters have been changed.
    pub(crate) params_version: u64,
}

impl RankPlan {
    /// Allocates zeroed tensors; parameters are zero until written.
    ///
    /// # Errors
    /// As [`crate::Plan::allocate`].
    pub fn allocate(&self, backend: &dyn Backend) -> Result<RankState, PlanError> {
        let mut local = self.local.allocate(backend)?;
        let norm = match self.norm_across() {
            true => RankNorm::attach(self, &mut local, backend)?,
            false => None,
        };
        let merges = self.micro_steps() > 1 && !self.reduces_each();
        let narrow = |bucket: &Bucket| self.flats[bucket.flat].grad_dtype.len_bytes() == 2;
        let sums = self
            .buckets
            .iter()
            .map(|bucket| match merges && narrow(bucket) {
                true => vec![0.0; bucket.numel as usize],
                false => Vec::new(),
            });
        let shards = self.flats.iter().zip(&self.pieces).map(|(flat, pieces)| {
            let numel: u64 = pieces.iter().map(|piece| piece.numel).sum();
            Words::zeroed(numel as usize * flat.grad_dtype.len_bytes())
        });
        let shard_sums =
            self.flats
                .iter()
                .zip(&self.pieces)
                .map(|(flat, pieces)| match self.reduces_each() {
                    true => sums_of(flat, pieces.iter().map(|piece| piece.numel).sum()),
                    false => Words::default(),
                });
        let replicas = self.flats.iter().map(|flat| match self.zero() {
            Zero::Zero0 | Zero::Zero3 => Words::default(),
            Zero::Zero1 | Zero::Zero2 => {
                Words::zeroed(flat.total() as usize * flat.dtype.len_bytes())
            }
        });
        let spans = self.buckets[..self.reduced]
            .iter()
            .map(|bucket| bucket.spans.len());
        let slot = |(index, bucket)| match self.keeps(index) {
            true => Slot::Filling(Words::zeroed(self.len_bytes_of(bucket))),
            false => Slot::Filling(Words::default()),
        };
        Ok(RankState {
            plan_hash: self.hash(),
            local,
            slots: Slots::new(self.buckets.iter().enumerate().map(slot).collect()),
            ready: Ready::new(spans.collect()),
            given: vec![0; self.params().len()],
            given_now: vec![false; self.params().len()],
            micro_steps: 0,
            weights: 0.0,
            weight: None,
            sums: sums.collect(),
            shards: shards.collect(),
            shard_sums: shard_sums.collect(),
            weights_hash: 0,
            replicas: replicas.collect(),
            norm,
            updates: RankUpdates::of(self),
            exposed_ns: 0,
            since_average: 0,
            adapting: Adapting::default(),
            steps_of: vec![0; self.params().len()],
            bucket_peak_bytes: 0,
            params_version: 0,
        })
    }

    /// Takes the gradient of one parameter for the micro-step under way, and starts reducing every bucket that is full, if
    /// `comms` has rings.
    ///
    /// A parameter whose gradient is not given before the step is run counts as zero if another rank, or another micro-step,
    /// has given it, else it is left out of the step.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::LenBytes`], [`PlanError::GradientTwice`], [`PlanError::ForeignState`];
    /// [`PlanError::Collective`], and the state refuses further steps then.
    pub fn give_gradient(
        &self,
        state: &mut RankState,
        comms: &mut Comms<'_>,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        self.check_state(state)?;
        let param = self.find(name)?;
        let (line, _) = self.places[param];
        let width = self.flats[line].grad_dtype.len_bytes();
        let len_bytes = self.params()[param].numel() as usize * width;
        crate::state::check_len(Role::Grad, name, len_bytes, bytes.len())?;
        if std::mem::replace(&mut state.given_now[param], true) {
            return Err(PlanError::GradientTwice {
                name: name.to_owned(),
            });
        }
        let last = state.micro_steps + 1 == self.micro_steps();
        let now = last || self.reduces_each();
        let how = match self.reduces_each() {
            true => Absorb {
                first: true,
                weight: None,
                last: None,
            },
            false => Absorb {
                first: state.given[param] == 0,
                weight: state.weight,
                last: last.then(|| self.divisor(state, state.weight.unwrap_or(1.0))),
            },
        };
        for &(bucket, position) in &self.spans_of[param] {
            let from =
                self.buckets[bucket as usize].spans[position as usize].first as usize * width;
            let numel = self.buckets[bucket as usize].spans[position as usize].numel as usize;
            let part = &bytes[from..from + numel * width];
            self.absorb_span(state, (bucket, position), Some(part), how);
            state.ready.given(bucket as usize);
        }
        state.given[param] += 1;
        if now && comms.has_rings() && self.reduces() {
            self.take_reduced(state)?;
            while let Some(bucket) = state.ready.full() {
                self.start_bucket(state, comms, bucket)?;
            }
        }
        Ok(())
    }

    /// What the window's sum is divided by, with the weight of the micro-step under way.
    pub(crate) fn divisor(&self, state: &RankState, weight: f64) -> Divisor {
        match self.whole.ranks.merge.map(|merge| merge.merged) {
            Some(Merged::Mean) => Divisor(state.weights + weight),
            Some(Merged::Sum) | None => Divisor(1.0),
        }
    }

    /// Writes or adds a gradient at a span's place.
    pub(crate) fn absorb_span(
        &self,
        state: &mut RankState,
        (bucket, position): (u32, u32),
        grad: Option<&[u8]>,
        how: Absorb,
    ) {
        let spec = &self.buckets[bucket as usize];
        let span = &spec.spans[position as usize];
        let dtype = self.flats[spec.flat].grad_dtype;
        let elements = span.at as usize..(span.at + span.numel) as usize;
        let sums = &mut state.sums[bucket as usize];
        if !sums.is_empty() && how.last.is_none() {
            return absorb(dtype, &mut [], Some(&mut sums[elements]), grad, how);
        }
        let len_bytes = self.len_bytes_of(spec);
        let Some(words) = state.slots.filling(bucket as usize, len_bytes) else {
            return;
        };
        let width = dtype.len_bytes();
        let place = &mut words.bytes_mut()[elements.start * width..elements.end * width];
        match sums.is_empty() {
            // Without merge a 16-bit gradient goes to the call as it is.
            true if width == 2 => {
                if let Some(grad) = grad {
                    place.copy_from_slice(grad);
                }
            }
            true => absorb(dtype, place, None, grad, how),
            false => absorb(dtype, place, Some(&mut sums[elements]), grad, how),
        }
    }

    /// Bytes of a bucket.
    pub(crate) fn len_bytes_of(&self, bucket: &Bucket) -> usize {
        bucket.numel as usize * self.flats[bucket.flat].grad_dtype.len_bytes()
    }

    /// Whether a bucket's memory is kept once it has been reduced. From ZeRO stage 2 on it is not, since a rank needs no more than
    /// its shard; gradients of 4 bytes and more are added in their bucket, which takes it until the window ends.
    pub(crate) fn keeps(&self, bucket: usize) -> bool {
        self.zero() < Zero::Zero2 || !self.reduces() || bucket >= self.reduced
    }

    /// Starts reducing the bucket that `state.ready` says.
    pub(crate) fn start_bucket(
        &self,
        state: &mut RankState,
        comms: &mut Comms<'_>,
        index: usize,
    ) -> Result<(), PlanError> {
        let bucket = &self.buckets[index];
        let Some(words) = state.slots.start(index) else {
            return Err(self.poison(state));
        };
        let call = BucketCall {
            dtype: self.flats[bucket.flat].grad_dtype,
            counts: (self.zero() >= Zero::Zero2).then(|| bucket.counts.as_slice().into()),
            context: fusestep_collective::CallContext {
                plan_hash: self.hash(),
                bucket: Some(index as u32),
            },
        };
        match comms.reduce(index, &call, words) {
            Ok(reducing) => {
                state.slots.put(index, Slot::InFlight(reducing));
                state.ready.start();
                Ok(())
            }
            Err(error) => {
                self.poison(state);
                Err(error.into())
            }
        }
    }

    /// Marks a state as half-changed and says so.
    pub(crate) fn poison(&self, state: &mut RankState) -> PlanError {
        let step = state.local.step() + 1;
        let step = *state.local.poisoned.get_or_insert(step);
        PlanError::Poisoned { step }
    }

    pub(crate) fn check_state(&self, state: &RankState) -> Result<(), PlanError> {
        if state.plan_hash != self.hash() {
            return Err(PlanError::ForeignState {
                expected: self.hash(),
                found: state.plan_hash,
            });
        }
        match state.local.poisoned {
            Some(step) => Err(PlanError::Poisoned { step }),
            None => Ok(()),
        }
    }

    /// Writes a whole parameter; every rank writes the same bytes and keeps what it holds of them.
    ///
    /// # Errors
    /// As [`State::write`].
    pub fn write_param(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        self.write_whole(state, backend, Role::Param, name, bytes)
    }

    /// Writes a whole tensor of any role but the gradient's.
    ///
    /// # Errors
    /// As [`State::write`].
    pub fn write_whole(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        role: Role,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        let param = self.find(name)?;
        let (line, start) = self.places[param];
        let numel = self.params()[param].numel() as usize;
        if role == Role::Param {
            state.params_version += 1;
            let width = self.flats[line].dtype.len_bytes();
            crate::state::check_len(role, name, numel * width, bytes.len())?;
            let replica = state.replicas[line].bytes_mut();
            if !replica.is_empty() {
                let at = start as usize * width;
                replica[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
        for (piece, local) in self.pieces_of(param) {
            let local_name = self.local.params()[local].name.clone();
            let width = state.local.dtype(role, &local_name)?.len_bytes();
            crate::state::check_len(role, name, numel * width, bytes.len())?;
            let from = piece.first as usize * width;
            let part = &bytes[from..from + piece.numel as usize * width];
            state.local.write(backend, role, &local_name, part)?;
        }
        Ok(())
    }

    /// Reads a whole parameter that this rank holds.
    ///
    /// # Errors
    /// [`PlanError::InShards`] under ZeRO stage 3, whose parameters are to be gathered; else as [`State::read`].
    pub fn read_param(
        &self,
        state: &RankState,
        backend: &dyn Backend,
        name: &str,
        bytes: &mut [u8],
    ) -> Result<(), PlanError> {
        let param = self.find(name)?;
        let (line, start) = self.places[param];
        let width = self.flats[line].dtype.len_bytes();
        let len_bytes = self.params()[param].numel() as usize * width;
        crate::state::check_len(Role::Param, name, len_bytes, bytes.len())?;
        match self.zero() {
            Zero::Zero0 => state.local.read(backend, Role::Param, name, bytes),
            Zero::Zero1 | Zero::Zero2 => {
                let at = start as usize * width;
                bytes.copy_from_slice(&state.replicas[line].bytes()[at..at + len_bytes]);
                Ok(())
            }
            Zero::Zero3 => Err(PlanError::InShards {
                name: name.to_owned(),
            }),
        }
    }

    /// The pieces of a parameter on this rank, each with its position in the local plan.
    pub(crate) fn pieces_of(
        &self,
        param: usize,
    ) -> impl Iterator<Item = (super::Piece, usize)> + '_ {
        let (line, _) = self.places[param];
        let before: usize = self.pieces[..line].iter().map(Vec::len).sum();
        let whole = self.zero() == Zero::Zero0;
        let pieces = self.pieces[line].iter().enumerate();
        let own = pieces.filter(move |(_, piece)| piece.param as usize == param);
        own.map(move |(at, piece)| match whole {
            true => (*piece, param),
            false => (*piece, before + at),
        })
    }
}

impl RankState {
    /// Bytes of tensors, gradients and buckets that this rank holds right now; between steps what [`RankPlan::memory_bytes`] says.
    pub fn memory_bytes(&self) -> u64 {
        let lists = self.local.storages.iter().flat_map(|s| &s.lists);
        let local: usize = lists.map(|list| list.buffer.len_bytes()).sum();
        let words = |all: &[Words]| all.iter().map(|words| words.bytes().len()).sum::<usize>();
        let sums = self.sums.iter().map(|sums| 4 * sums.len());
        let lines = words(&self.shards) + words(&self.shard_sums) + words(&self.replicas);
        (local + lines + self.slots.held_bytes() + sums.sum::<usize>()) as u64
    }

    /// Steps run so far.
    pub fn step(&self) -> u64 {
        self.local.step()
    }

    /// Micro-steps of the window under way that are over.
    pub fn micro_steps(&self) -> u32 {
        self.micro_steps
    }

    /// Buckets whose reduction has been started: with rings, while gradients are still being given.
    pub fn buckets_started(&self) -> usize {
        self.ready.started()
    }

    /// Steps skipped so far because a gradient was not finite.
    pub fn skipped(&self) -> u64 {
        self.local.skipped()
    }

    /// The factor to multiply the next loss with; 1 without loss scaling.
    pub fn loss_scale(&self) -> f64 {
        self.local.loss_scale().map_or(1.0, |scale| scale.scale())
    }

    /// Weighs the gradients of the micro-step under way, before the first of them is given: the number of its samples, if
    /// windows are means of micro-steps of unequal length.
    pub fn set_weight(&mut self, weight: f64) {
        self.weight = Some(weight);
    }

    /// Tells the loss of the step under way, for an adaptive interval of LocalSGD.
    pub fn set_loss(&mut self, loss: f64) {
        self.adapting.loss = Some(loss);
    }

    /// Steps between two averages of LocalSGD, if they have been adapted.
    pub fn local_interval(&self) -> Option<u64> {
        self.adapting.every.map(NonZeroU64::get)
    }

    /// Sets the learning rate from the next step on.
    ///
    /// # Errors
    /// As [`State::set_lr`].
    pub fn set_lr(&mut self, lr: f64) -> Result<(), PlanError> {
        self.local.set_lr(lr)
    }

    /// What this rank's own updates run on.
    pub fn local(&self) -> &State {
        &self.local
    }
}

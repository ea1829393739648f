//! Gradients that are reduced in every micro-step: less memory, more calls.

use fusestep_tensor::DType;

use super::comms::Comms;
use super::merge::{Absorb, Divisor, absorb};
use super::words::Words;
use super::{Flat, RankPlan, RankState};
use crate::PlanError;
use crate::passes::Reduced;

/// Bytes by which ranks compare the weights of a window's micro-steps.
pub(crate) const WEIGHTS_BYTES: usize = 16;

/// Memory for the sums of a shard's gradients, in f32 for 16-bit gradients.
pub(crate) fn sums_of(flat: &Flat, numel: u64) -> Words {
    let width = flat.grad_dtype.len_bytes().max(4);
    Words::zeroed(numel as usize * width)
}

impl RankPlan {
    /// Whether gradients are reduced in every micro-step.
    pub(crate) fn reduces_each(&self) -> bool {
        let merge = self.whole.ranks.merge.as_ref();
        merge.is_some_and(|merge| merge.every.get() > 1 && merge.reduced == Reduced::PerMicroStep)
    }

    /// Ends a micro-step that is not the window's last: reduces its gradients and adds them to this rank's part.
    pub(crate) fn reduce_micro_step(
        &self,
        state: &mut RankState,
        comms: &mut Comms<'_>,
        weight: Option<f64>,
    ) -> Result<(), PlanError> {
        comms.set_plan(self.hash());
        let done = self.reduce_buckets(state, comms, Divisor(1.0));
        if done.is_err() {
            self.poison(state);
            return done;
        }
        self.accumulate(state, weight);
        Ok(())
    }

    /// Adds the gradients in the shards to the window's sums.
    pub(crate) fn accumulate(&self, state: &mut RankState, weight: Option<f64>) {
        let how = Absorb {
            first: state.micro_steps == 0,
            weight,
            last: None,
        };
        let lines = self
            .flats
            .iter()
            .zip(&state.shards)
            .zip(&mut state.shard_sums);
        for ((flat, shard), sums) in lines {
            let (dtype, grads) = (flat.grad_dtype, Some(shard.bytes()));
            match dtype {
                DType::F16 | DType::BF16 => {
                    let sums = bytemuck::cast_slice_mut(sums.bytes_mut());
                    absorb(dtype, &mut [], Some(sums), grads, how);
                }
                _ => absorb(dtype, sums.bytes_mut(), None, grads, how),
            }
        }
        let mut bytes = state.weights_hash.to_le_bytes().to_vec();
        bytes.extend(weight.unwrap_or(1.0).to_le_bytes());
        state.weights_hash = xxhash_rust::xxh3::xxh3_64(&bytes);
    }

    /// Puts what the window's sums come to into the shards.
    pub(crate) fn conclude_window(&self, state: &mut RankState, divisor: Divisor) {
        let how = Absorb {
            first: false,
            weight: None,
            last: Some(divisor),
        };
        let lines = self
            .flats
            .iter()
            .zip(&mut state.shards)
            .zip(&mut state.shard_sums);
        for ((flat, shard), sums) in lines {
            match flat.grad_dtype {
                DType::F16 | DType::BF16 => {
                    let sums = bytemuck::cast_slice_mut(sums.bytes_mut());
                    absorb(flat.grad_dtype, shard.bytes_mut(), Some(sums), None, how);
                }
                dtype => {
                    absorb(dtype, sums.bytes_mut(), None, None, how);
                    shard.bytes_mut().copy_from_slice(sums.bytes());
                }
            }
        }
    }

    /// What ranks compare to know that they have weighed micro-steps alike: the largest of each byte and of its complement.
    pub(crate) fn weights_to_compare(state: &RankState) -> [u8; WEIGHTS_BYTES] {
        let mut bytes = [0; WEIGHTS_BYTES];
        bytes[..8].copy_from_slice(&state.weights_hash.to_le_bytes());
        bytes[8..].copy_from_slice(&(!state.weights_hash).to_le_bytes());
        bytes
    }

    /// Fails on all ranks if one has other weights: their sums would not be those of one batch.
    pub(crate) fn check_weights(&self, largest: &[u8]) -> Result<(), PlanError> {
        let (low, high) = largest.split_at(largest.len() / 2);
        if low
            .iter()
            .zip(high)
            .all(|(byte, complement)| byte ^ complement == 0xff)
        {
            return Ok(());
        }
        Err(PlanError::Topology {
            expected:
                "the same weights of micro-steps on all ranks, since gradients are reduced in each"
                    .to_owned(),
            found: "others; weigh gradients themselves, or reduce once per window".to_owned(),
        })
    }
}

//! How far parameters moved in a step of several ranks, with the bits of one.
//!
//! A shard begins and ends with chunks of the fixed tree where updates are measured, so every chunk is updated by one rank. Ranks gather
//! the sums of all chunks and add them up alike.

use fusestep_collective::Operation;
use fusestep_tensor::DType;

use super::comms::Comms;
use super::{Flat, Held, RankPlan, RankState};
use crate::passes::Zero;
use crate::update_norms::chunks_of;
use crate::{PlanError, StepReport};

/// The memory for the sums.
#[derive(Debug)]
pub(crate) struct RankUpdates {
    /// For each line the sums of all chunks, of all ranks.
    chunks: Vec<Vec<f64>>,
    /// For each line how many of them each rank has; nothing if this one has all.
    counts: Vec<Vec<usize>>,
    /// For each parameter the sum over this rank's, which is that of all ranks' unless they have slices of their own.
    sums: Vec<f64>,
    /// For each parameter its sum, that of rank 0 where ranks have slices of their own.
    of_first: Vec<f64>,
}

impl RankUpdates {
    /// The memory for a plan; `None` if updates are not measured.
    pub(crate) fn of(plan: &RankPlan) -> Option<Self> {
        if !plan.whole.update_norms {
            return None;
        }
        let counts = plan.flats.iter().map(|flat| plan.chunk_counts(flat));
        let counts: Vec<Vec<usize>> = counts.collect();
        let chunks = counts.iter().zip(&plan.flats).map(|(counts, flat)| {
            let all = match counts.len() {
                0 => flat.starts.windows(2).map(|s| chunks_of(s[1] - s[0])).sum(),
                _ => counts.iter().sum(),
            };
            vec![0.0; all]
        });
        let params = plan.params().len();
        Some(Self {
            chunks: chunks.collect(),
            counts,
            sums: vec![0.0; params],
            of_first: vec![0.0; params],
        })
    }
}

impl RankPlan {
    /// Chunks of a line that each rank updates; nothing if every rank updates all of them alike.
    fn chunk_counts(&self, flat: &Flat) -> Vec<usize> {
        let of = |elements| flat.pieces(elements).map(|piece| chunks_of(piece.numel));
        match (flat.held, self.zero()) {
            (Held::Apart, _) => vec![of(0..flat.total()).sum(); self.topology().world],
            (Held::Together, Zero::Zero0) => Vec::new(),
            (Held::Together, _) => (0..self.shard_place().world)
                .map(|rank| of(flat.shard(rank)).sum())
                .collect(),
        }
    }

    /// Completes the local report of a step: gathers what all ranks have measured.
    pub(crate) fn report_update_norm(
        &self,
        state: &mut RankState,
        comms: &mut Comms<'_>,
        report: &mut StepReport,
    ) -> Result<(), PlanError> {
        let Some(updates) = &mut state.updates else {
            return Ok(());
        };
        updates.sums.fill(0.0);
        updates.of_first.fill(0.0);
        if report.skipped {
            return Ok(());
        }
        let (mut local, mut others) = (0, Vec::new());
        for (line, (flat, pieces)) in self.flats.iter().zip(&self.pieces).enumerate() {
            let (rank, ranks) = match flat.held {
                Held::Together => (comms.group_rank(), 1),
                Held::Apart => (comms.rank(), comms.world()),
            };
            let (all, counts) = (&mut updates.chunks[line], &updates.counts[line]);
            let mut at: usize = counts.iter().take(rank).sum();
            for piece in pieces {
                let position = match self.zero() {
                    Zero::Zero0 => piece.param as usize,
                    _ => local,
                };
                local += 1;
                let own = state.local.update_chunks(position);
                all[at..at + own.len()].copy_from_slice(own);
                at += own.len();
            }
            if !counts.is_empty() {
                let lengths: Vec<usize> = counts.iter().map(|n| n * size_of::<f64>()).collect();
                let (lengths, bytes) = (Some(lengths.as_slice()), bytemuck::cast_slice_mut(all));
                match flat.held {
                    Held::Together => {
                        comms.in_group(Operation::AllGather, DType::U8, lengths, bytes)?;
                    }
                    Held::Apart => {
                        comms.in_place(Operation::AllGather, DType::U8, lengths, bytes)?;
                    }
                }
            }
            let mut rest = &all[..];
            for slice in 0..ranks {
                for (&member, ends) in flat.members.iter().zip(flat.starts.windows(2)) {
                    let (own, after) = rest.split_at(chunks_of(ends[1] - ends[0]));
                    rest = after;
                    let sum = own.iter().fold(0.0, |sum, chunk| sum + chunk);
                    match slice {
                        0 => updates.of_first[member as usize] = sum,
                        _ => others.push(sum),
                    }
                    if ranks == 1 || slice == rank {
                        updates.sums[member as usize] = sum;
                    }
                }
            }
        }
        let all = updates.of_first.iter().chain(&others);
        let sum: f64 = all.fold(0.0, |sum, own| sum + own);
        report.update_norm = Some(sum.sqrt());
        Ok(())
    }
}

impl RankState {
    /// How far each parameter moved in the last update, ‖new − old‖ in plan order, whoever updated it; of a parameter of which ranks
    /// have slices of their own, this rank's. `None` without pass [`UpdateNorms`](crate::UpdateNorms).
    ///
    /// With [`LocalSgd`](crate::LocalSgd) ranks update apart, and what averaging moves is not in it.
    pub fn update_norms(&self) -> Option<Vec<f64>> {
        let updates = self.updates.as_ref()?;
        Some(updates.sums.iter().map(|sum| sum.sqrt()).collect())
    }
}

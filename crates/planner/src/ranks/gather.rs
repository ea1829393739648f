//! Parameters out of their shards.

use fusestep_collective::Operation;
use fusestep_launch::Backend;
use fusestep_tensor::Role;

use super::comms::Comms;
use super::flat::overlaps;
use super::words::Words;
use super::{Held, RankPlan, RankState};
use crate::PlanError;
use crate::passes::Zero;

/// Whole parameters, for as long as this value lives.
#[derive(Debug)]
pub struct GatheredParams {
    params: Vec<Words>,
}

impl GatheredParams {
    /// The bytes of the parameter that was asked for at this position.
    pub fn bytes(&self, position: usize) -> &[u8] {
        self.params.get(position).map_or(&[], Words::bytes)
    }

    /// Bytes of all of them: what dropping this value gives back.
    pub fn len_bytes(&self) -> usize {
        self.params.iter().map(|words| words.bytes().len()).sum()
    }
}

impl RankPlan {
    /// Parameters just before they are used; dropping them releases their memory. Under ZeRO stage 3 they come from all ranks, in
    /// one call for each dtype, and all ranks ask for the same; at other stages they are copied.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::Backend`]; [`PlanError::Collective`].
    pub fn gather(
        &self,
        state: &RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<GatheredParams, PlanError> {
        let indices = names.iter().map(|name| self.find(name));
        let indices = indices.collect::<Result<Vec<usize>, _>>()?;
        let mut params: Vec<Words> = indices
            .iter()
            .map(|&param| {
                let width = self.flats[self.places[param].0].dtype.len_bytes();
                Words::zeroed(self.params()[param].numel() as usize * width)
            })
            .collect();
        if self.zero() != Zero::Zero3 {
            for (name, words) in names.iter().zip(&mut params) {
                self.read_param(state, backend, name, words.bytes_mut())?;
            }
            return Ok(GatheredParams { params });
        }
        for line in 0..self.flats.len() {
            self.gather_line(state, backend, comms, (line, &indices, &mut params))?;
        }
        Ok(GatheredParams { params })
    }

    fn gather_line(
        &self,
        state: &RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        (line, indices, params): (usize, &[usize], &mut [Words]),
    ) -> Result<(), PlanError> {
        let flat = &self.flats[line];
        let width = flat.dtype.len_bytes();
        // In the order they lie, so that each rank's part of all of them is one block.
        let mut wanted: Vec<(u64, usize)> = indices
            .iter()
            .enumerate()
            .filter(|&(_, &param)| self.places[param].0 == line)
            .map(|(at, &param)| (self.places[param].1, at))
            .collect();
        wanted.sort_unstable();
        if wanted.is_empty() {
            return Ok(());
        }
        let numel = |at: usize| self.params()[indices[at]].numel();
        let apart = flat.held == Held::Apart;
        let mut counts = vec![0; flat.bounds.len() - 1];
        for &(start, at) in &wanted {
            for (count, part) in counts
                .iter_mut()
                .zip(overlaps(&flat.bounds, &(start..start + numel(at))))
            {
                *count += part;
            }
        }
        let rank = self.shard_place().rank;
        let total = match apart {
            true => wanted.iter().map(|&(_, at)| numel(at) as usize).sum(),
            false => counts.iter().sum::<usize>(),
        };
        let mut words = Words::zeroed(total * width);
        let mut next = match apart {
            true => 0,
            false => counts[..rank].iter().sum::<usize>() * width,
        };
        for &(_, at) in &wanted {
            for (piece, local) in self.pieces_of(indices[at]) {
                let end = next + piece.numel as usize * width;
                let name = &self.local.params()[local].name;
                let bytes = &mut words.bytes_mut()[next..end];
                state.local.read(backend, Role::Param, name, bytes)?;
                next = end;
            }
        }
        if !apart {
            let counts = Some(counts.as_slice());
            comms.in_group(Operation::AllGather, flat.dtype, counts, words.bytes_mut())?;
        }
        let mut next = 0;
        for &(_, at) in &wanted {
            let end = next + numel(at) as usize * width;
            params[at]
                .bytes_mut()
                .copy_from_slice(&words.bytes()[next..end]);
            next = end;
        }
        Ok(())
    }

    /// Brings every rank's updated parameters to all ranks, where all of them hold all.
    pub(crate) fn replicate(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<(), PlanError> {
        if !matches!(self.zero(), Zero::Zero1 | Zero::Zero2) {
            return Ok(());
        }
        let rank = self.shard_place().rank;
        let mut local = 0;
        for (line, flat) in self.flats.iter().enumerate() {
            let width = flat.dtype.len_bytes();
            let start = flat.own(self.zero(), rank).start;
            let replica = state.replicas[line].bytes_mut();
            for piece in &self.pieces[line] {
                let (from, to) = (start + piece.at, start + piece.at + piece.numel);
                let bytes = &mut replica[from as usize * width..to as usize * width];
                let name = &self.local.params()[local].name;
                state.local.read(backend, Role::Param, name, bytes)?;
                local += 1;
            }
            let together = flat.held == Held::Together && self.broadcasts.is_empty();
            if self.topology().world > 1 && together {
                let counts: Vec<usize> = flat
                    .bounds
                    .windows(2)
                    .map(|b| (b[1] - b[0]) as usize)
                    .collect();
                comms.in_group(Operation::AllGather, flat.dtype, Some(&counts), replica)?;
            }
        }
        for group in &self.broadcasts {
            let dtype = self.flats[group.flat].dtype;
            let width = dtype.len_bytes();
            let (from, to) = (group.elements.start as usize, group.elements.end as usize);
            let bytes = &mut state.replicas[group.flat].bytes_mut()[from * width..to * width];
            let operation = Operation::Broadcast { root: group.owner };
            comms.in_group(operation, dtype, None, bytes)?;
        }
        Ok(())
    }
}

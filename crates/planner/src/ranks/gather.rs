//! Parameters out of their shards.

use std::ops::Range;

use fusestep_collective::Operation;
use fusestep_launch::Backend;
use fusestep_tensor::{DType, Role};

use super::comms::Comms;
use super::flat::overlaps;
use super::words::Words;
use super::{Held, RankPlan, RankState};
use crate::PlanError;
use crate::passes::Zero;

/// Whole parameters, for as long as this value lives.
#[derive(Debug)]
pub struct GatheredParams {
    lines: Vec<Words>,
    /// For each parameter its buffer and its bytes there.
    places: Vec<(usize, Range<usize>)>,
}

impl GatheredParams {
    /// The bytes of the parameter that was asked for at this position.
    pub fn bytes(&self, position: usize) -> &[u8] {
        match self.places.get(position) {
            Some((line, range)) => &self.lines[*line].bytes()[range.clone()],
            None => &[],
        }
    }

    /// Bytes of all of them: what dropping this value gives back.
    pub fn len_bytes(&self) -> usize {
        self.lines.iter().map(|words| words.bytes().len()).sum()
    }
}

/// Buffers that have this rank's part of parameters and take the others'.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) lines: Vec<LineBuffer>,
    places: Vec<(usize, Range<usize>)>,
}

/// Parameters of one dtype.
#[derive(Debug)]
pub(crate) struct LineBuffer {
    pub(crate) dtype: DType,
    /// Elements of each rank's part; `None` if this rank has them all.
    pub(crate) counts: Option<Vec<usize>>,
    pub(crate) words: Words,
}

impl Asked {
    /// Bytes of all buffers.
    pub(crate) fn len_bytes(&self) -> usize {
        let lines = self.lines.iter();
        lines.map(|line| line.words.bytes().len()).sum()
    }

    /// What the buffers hold, once all parts are there.
    pub(crate) fn whole(self) -> GatheredParams {
        GatheredParams {
            lines: self.lines.into_iter().map(|line| line.words).collect(),
            places: self.places,
        }
    }
}

impl RankPlan {
    /// Parameters just before they are used; dropping them releases their memory. Under ZeRO stage 3 they come from all ranks, in
    /// one call for each dtype, and all ranks ask for the same; at other stages they are copied. [`Self::prefetch`] asks ahead.
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
        let mut asked = self.own_parts(state, backend, names)?;
        for line in &mut asked.lines {
            if let Some(counts) = &line.counts {
                let bytes = line.words.bytes_mut();
                comms.in_group(Operation::AllGather, line.dtype, Some(counts), bytes)?;
            }
        }
        Ok(asked.whole())
    }

    /// Buffers for parameters, with this rank's part of them in its place.
    pub(crate) fn own_parts(
        &self,
        state: &RankState,
        backend: &dyn Backend,
        names: &[&str],
    ) -> Result<Asked, PlanError> {
        let indices = names.iter().map(|name| self.find(name));
        let indices = indices.collect::<Result<Vec<usize>, _>>()?;
        let mut asked = Asked {
            lines: Vec::new(),
            places: vec![(0, 0..0); names.len()],
        };
        if self.zero() == Zero::Zero3 {
            for line in 0..self.flats.len() {
                self.own_part(state, backend, (line, &indices, &mut asked))?;
            }
            return Ok(asked);
        }
        for (at, (name, &param)) in names.iter().zip(&indices).enumerate() {
            let dtype = self.flats[self.places[param].0].dtype;
            let len_bytes = self.params()[param].numel() as usize * dtype.len_bytes();
            let mut words = Words::zeroed(len_bytes);
            self.read_param(state, backend, name, words.bytes_mut())?;
            asked.places[at] = (at, 0..len_bytes);
            asked.lines.push(LineBuffer {
                dtype,
                counts: None,
                words,
            });
        }
        Ok(asked)
    }

    fn own_part(
        &self,
        state: &RankState,
        backend: &dyn Backend,
        (line, indices, asked): (usize, &[usize], &mut Asked),
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
        let mut counts = vec![0; flat.bounds.len() - 1];
        let mut total = 0;
        for &(start, at) in &wanted {
            let elements = start..start + numel(at);
            for (count, part) in counts.iter_mut().zip(overlaps(&flat.bounds, &elements)) {
                *count += part;
            }
            let from = total * width;
            total += numel(at) as usize;
            asked.places[at] = (asked.lines.len(), from..total * width);
        }
        let counts = (flat.held == Held::Together).then_some(counts);
        let mut words = Words::zeroed(total * width);
        let rank = self.shard_place().rank;
        let mut next = counts
            .as_ref()
            .map_or(0, |counts| counts[..rank].iter().sum::<usize>() * width);
        for &(_, at) in &wanted {
            for (piece, local) in self.pieces_of(indices[at]) {
                let end = next + piece.numel as usize * width;
                let name = &self.local.params()[local].name;
                let bytes = &mut words.bytes_mut()[next..end];
                state.local.read(backend, Role::Param, name, bytes)?;
                next = end;
            }
        }
        asked.lines.push(LineBuffer {
            dtype: flat.dtype,
            counts,
            words,
        });
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

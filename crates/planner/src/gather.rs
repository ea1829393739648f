//! Parameters out of the parts of ranks.

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_collective::{CollectiveError, Operation};
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::{DType, Role};

use crate::averages::{Beside, Values};
use crate::comms::{Bytes, Comms};
use crate::passes::FuseAllReduce;
use crate::stage::{Extent, Gather};
use crate::{Plan, PlanError, State, ZeroStage};

/// Whole parameters, for as long as this value lives.
#[derive(Debug)]
pub struct GatheredParams {
    buffers: Vec<HostMemory>,
    /// For each parameter its buffer and its bytes there.
    places: Vec<(usize, Range<usize>)>,
}

impl GatheredParams {
    /// The bytes of the parameter that was asked for at this position.
    pub fn bytes(&self, position: usize) -> &[u8] {
        match self.places.get(position) {
            Some((buffer, range)) => &self.buffers[*buffer].bytes()[range.clone()],
            None => &[],
        }
    }

    /// Bytes of all of them: what dropping this value gives back.
    pub fn len_bytes(&self) -> usize {
        self.buffers.iter().map(|memory| memory.bytes().len()).sum()
    }
}

/// Buffers that have this rank's part of parameters and take the others'.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) buffers: Vec<AskedBuffer>,
    places: Vec<(usize, Range<usize>)>,
}

/// A parameter of which each rank has a part.
struct Wanted {
    segment: usize,
    /// Its elements in the storage.
    elements: Range<u64>,
    /// Where it was asked for.
    at: usize,
    /// That of its average, if that is asked for.
    factor: Option<f64>,
}

/// Parameters that lie one behind the other in one segment's range.
#[derive(Debug)]
pub(crate) struct AskedBuffer {
    pub(crate) dtype: DType,
    /// For each bucket its bytes here and the elements of each rank's part; nothing if this rank
    /// has them all.
    pub(crate) calls: Vec<(Range<usize>, Vec<usize>)>,
    pub(crate) memory: HostMemory,
}

impl Asked {
    /// Bytes of all buffers.
    pub(crate) fn len_bytes(&self) -> usize {
        let buffers = self.buffers.iter();
        buffers.map(|buffer| buffer.memory.bytes().len()).sum()
    }

    /// What the buffers hold, once all parts are there.
    pub(crate) fn whole(self) -> GatheredParams {
        GatheredParams {
            buffers: self.buffers.into_iter().map(|b| b.memory).collect(),
            places: self.places,
        }
    }
}

impl Plan {
    /// Stage `gather`: brings this rank's part of a bucket to all ranks, and theirs here.
    pub(crate) fn bring(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        gather: &Gather,
    ) -> Result<(), PlanError> {
        let bucket = &self.buckets[gather.bucket];
        let spec = &self.storages[bucket.storage];
        let Some(index) = spec.list(Role::Param) else {
            return Ok(());
        };
        let dtype = spec.param_dtype();
        let width = dtype.len_bytes();
        let bytes = |range: &Range<u64>| range.start as usize * width..range.end as usize * width;
        let buffer = &mut state.storages[bucket.storage].lists[index].buffer;
        let mut call = |range, operation, counts: Option<Vec<usize>>| {
            if comms.takes(backend, buffer.as_ref()) && buffer.host().is_none() {
                backend.hand_over(buffer.as_mut())?;
                comms.on_device(buffer, bytes(range), (operation, dtype, counts))?;
                return Ok(backend.take_back(buffer.as_mut())?);
            }
            in_place(
                backend,
                comms,
                (buffer.as_mut(), bytes(range)),
                |comms, own| comms.in_group(operation, dtype, counts.as_deref(), own),
            )
        };
        for part in &gather.broadcasts {
            let operation = Operation::Broadcast { root: part.owner };
            call(&part.elements, operation, None)?;
        }
        if gather.broadcasts.is_empty() {
            let counts = Some(bucket.counts());
            call(&bucket.elements, Operation::AllGather, counts)?;
        }
        Ok::<_, PlanError>(())
    }

    /// Parameters just before they are used; dropping them releases their memory. Under ZeRO stage
    /// 3 they come from all ranks, in one call for each bucket, and all ranks ask for the same;
    /// at other stages they are copied. [`Self::prefetch`] asks ahead.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::Backend`]; [`PlanError::Collective`].
    pub fn gather(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<GatheredParams, PlanError> {
        self.gather_values(state, backend, comms, names, Values::Params)
    }

    /// Parameters, or their averages.
    pub(crate) fn gather_values(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
        values: Values,
    ) -> Result<GatheredParams, PlanError> {
        let mut asked = self.own_parts(state, backend, names, values)?;
        for buffer in &mut asked.buffers {
            for (range, counts) in &buffer.calls {
                let bytes = &mut buffer.memory.bytes_mut()[range.clone()];
                comms.in_group(Operation::AllGather, buffer.dtype, Some(counts), bytes)?;
            }
        }
        Ok(asked.whole())
    }

    /// Buffers for parameters, with this rank's part of them in its place.
    pub(crate) fn own_parts(
        &self,
        state: &State,
        backend: &dyn Backend,
        names: &[&str],
        values: Values,
    ) -> Result<Asked, PlanError> {
        let mut asked = Asked {
            buffers: Vec::new(),
            places: vec![(0, 0..0); names.len()],
        };
        // By bucket and place there, so that each rank's part of neighbours is one block.
        let mut wanted = Vec::with_capacity(names.len());
        for (at, name) in names.iter().enumerate() {
            let param = state.find(name)?;
            let (storage, tensor) = self.places[param];
            let spec = &self.storages[storage];
            let elements = spec.layout.range(tensor);
            let factor = match values {
                Values::Params => None,
                Values::Averages => state.averaging(param),
            };
            // Averages come from those that have the state.
            let shared_from = match factor {
                None => ZeroStage::Three,
                Some(_) => ZeroStage::One,
            };
            let shared = self.zero >= shared_from && self.reduces() && !spec.distributed;
            let segment = self.segments.iter().position(|segment| {
                segment.storage == storage && segment.elements.contains(&elements.start)
            });
            match segment.filter(|_| shared && !elements.is_empty()) {
                Some(segment) => wanted.push(Wanted {
                    segment,
                    elements,
                    at,
                    factor,
                }),
                None => {
                    let len_bytes =
                        self.params[param].numel() as usize * spec.param_dtype().len_bytes();
                    let mut memory = HostMemory::zeroed(len_bytes)?;
                    if len_bytes > 0 {
                        let bytes = memory.bytes_mut();
                        match values {
                            Values::Params => state.read(backend, Role::Param, name, bytes)?,
                            Values::Averages => state.read_average(backend, name, bytes)?,
                        }
                    }
                    asked.places[at] = (asked.buffers.len(), 0..len_bytes);
                    asked.buffers.push(AskedBuffer {
                        dtype: spec.param_dtype(),
                        calls: Vec::new(),
                        memory,
                    });
                }
            }
        }
        wanted.sort_unstable_by_key(|one| (one.segment, one.elements.start));
        for group in wanted.chunk_by(|a, b| a.segment == b.segment) {
            self.own_part(state, backend, group, &mut asked)?;
        }
        Ok(asked)
    }

    /// The tensors of one segment, one call for each of its buckets.
    fn own_part(
        &self,
        state: &State,
        backend: &dyn Backend,
        wanted: &[Wanted],
        asked: &mut Asked,
    ) -> Result<(), PlanError> {
        let segment = &self.segments[wanted[0].segment];
        let dtype = self.storages[segment.storage].param_dtype();
        let width = dtype.len_bytes();
        let rank = self.shard_place().rank;
        let mut total = 0;
        for one in wanted {
            let from = total;
            total += (one.elements.end - one.elements.start) as usize * width;
            asked.places[one.at] = (asked.buffers.len(), from..total);
        }
        let mut memory = HostMemory::zeroed(total)?;
        let (mut calls, mut end) = (Vec::new(), 0);
        for bucket in &self.buckets[segment.buckets.clone()] {
            let mut counts = vec![0; bucket.bounds.len() - 1];
            for one in wanted {
                for (count, part) in counts.iter_mut().zip(bucket.overlaps(&one.elements)) {
                    *count += part;
                }
            }
            let from = end;
            end += counts.iter().sum::<usize>() * width;
            let mut next = from + counts[..rank].iter().sum::<usize>() * width;
            let own = bucket.part(rank);
            for one in wanted {
                let inside = own.start.max(one.elements.start)..own.end.min(one.elements.end);
                let parts = self.own_bytes(state, backend, segment.storage, &inside, one.factor)?;
                for bytes in parts {
                    memory.bytes_mut()[next..next + bytes.len()].copy_from_slice(&bytes);
                    next += bytes.len();
                }
            }
            if from < end {
                calls.push((from..end, counts));
            }
        }
        asked.buffers.push(AskedBuffer {
            dtype,
            calls,
            memory,
        });
        Ok(())
    }

    /// This rank's bytes of some elements of a storage's parameters, range by range; of their
    /// averages with a factor.
    fn own_bytes(
        &self,
        state: &State,
        backend: &dyn Backend,
        storage: usize,
        elements: &Range<u64>,
        factor: Option<f64>,
    ) -> Result<Vec<Vec<u8>>, PlanError> {
        let spec = &self.storages[storage];
        let lists = &state.storages[storage].lists;
        let mut ranges = Vec::new();
        for part in &spec.shard {
            let start = part.elements.start.max(elements.start);
            let end = part.elements.end.min(elements.end);
            if start >= end {
                continue;
            }
            let read = |role| {
                let Some(index) = spec.list(role) else {
                    return Ok(None);
                };
                // A list that this rank has whole begins with the storage's first element.
                let at = match spec.extents[index] {
                    Extent::Shard => part.at + start - part.elements.start,
                    Extent::Whole | Extent::Segments => start,
                };
                let dtype = spec.lists[index].dtype;
                let width = dtype.len_bytes();
                let mut bytes = vec![0; (end - start) as usize * width];
                let buffer = lists[index].buffer.as_ref();
                backend.read(buffer, at as usize * width, &mut bytes)?;
                Ok::<_, PlanError>(Some((dtype, bytes)))
            };
            let Some((dtype, mut bytes)) = read(Role::Param)? else {
                continue;
            };
            if let Some(factor) = factor {
                Beside::read(read)?.average(dtype, factor, &mut bytes);
            }
            ranges.push(bytes);
        }
        Ok(ranges)
    }

    /// Brings the parameters of rank `root` to all ranks, before the first step: many in one call,
    /// as many bytes at once as a bucket has. At ZeRO stage 3 every rank sends what it has of
    /// them to nobody: all have written the same ([`State::write`]).
    ///
    /// # Errors
    /// [`PlanError::InShards`] at ZeRO stage 3; [`PlanError::Collective`]; [`PlanError::Backend`].
    pub fn broadcast_parameters(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        root: usize,
    ) -> Result<(), PlanError> {
        self.check_state(state)?;
        if let (ZeroStage::Three, Some(first)) = (self.zero, self.params.first()) {
            return Err(PlanError::InShards {
                name: first.name.clone(),
            });
        }
        comms.set_plan(self.hash());
        let of_buckets = self.caps.as_ref().map(|caps| caps.bytes);
        let cap_bytes = self.broadcast_cap_bytes.or(of_buckets);
        let cap_bytes = cap_bytes.unwrap_or(FuseAllReduce::DEFAULT_CAP_BYTES);
        for spec in self.storages.iter().filter(|spec| !spec.distributed) {
            let dtype = spec.param_dtype();
            let width = dtype.len_bytes();
            let cap = (usize::try_from(cap_bytes).unwrap_or(usize::MAX) / width).max(1) * width;
            let mut memory = HostMemory::zeroed(spec.layout.total_numel() as usize * width)?;
            let place = |tensor: usize| {
                let range = spec.layout.range(tensor);
                range.start as usize * width..range.end as usize * width
            };
            if comms.rank() == root {
                for (tensor, &member) in spec.members.iter().enumerate() {
                    let name = &self.params[member as usize].name;
                    let bytes = &mut memory.bytes_mut()[place(tensor)];
                    state.read(backend, Role::Param, name, bytes)?;
                }
            }
            for part in memory.bytes_mut().chunks_mut(cap) {
                comms.in_place(Operation::Broadcast { root }, dtype, None, part)?;
            }
            for (tensor, &member) in spec.members.iter().enumerate() {
                let name = &self.params[member as usize].name;
                state.write(backend, Role::Param, name, &memory.bytes()[place(tensor)])?;
            }
        }
        Ok(())
    }
}

/// Makes a call on bytes of a buffer where they lie, or on a copy of a device's where calls are
/// made in host memory.
pub(crate) fn in_place(
    backend: &dyn Backend,
    comms: &mut Comms<'_>,
    (buffer, range): (&mut dyn Buffer, Range<usize>),
    call: impl FnOnce(&mut Comms<'_>, Bytes<'_>) -> Result<(), CollectiveError>,
) -> Result<(), PlanError> {
    if comms.takes(backend, buffer) {
        backend.hand_over(buffer)?;
        if let Some(bytes) = Bytes::of(buffer, range.clone()) {
            call(comms, bytes)?;
            return Ok(backend.take_back(buffer)?);
        }
    }
    let mut staged = vec![0; range.len()];
    backend.read(buffer, range.start, &mut staged)?;
    call(comms, Bytes::Host(&mut staged))?;
    Ok(backend.write(buffer, range.start, &staged)?)
}

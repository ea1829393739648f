//! The gradient arena: where a gradient is written, added and handed to the calls that reduce it.
//!
//! ```text
//! push_grad, grad_mut ─► segment ─► Reduce, in place ─► Norm, Optimize read it there
//! ```

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_collective::Pending;
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::{DType, Role};

use crate::absorb::{Absorb, Divisor, absorb};
use crate::comms::Comms;
use crate::passes::{Accumulated, ReducedWhen};
use crate::ready::Ready;
use crate::stage::{Extent, Part};
use crate::state::{Allocator, check_len};
use crate::{Plan, PlanError, Stage, State, StorageSpec, ZeroStage};

/// Gradients that micro-steps add and ranks reduce.
#[derive(Debug)]
pub(crate) struct GradientArena {
    /// The segments of the plan.
    pub(crate) segments: Vec<SegmentState>,
    /// Which of them may be reduced.
    pub(crate) ready: Ready,
    /// Where each parameter's gradient is written.
    regions: Vec<Region>,
    /// For each region the sums of micro-steps, where the gradients' own memory cannot hold them.
    sums: Vec<Option<HostMemory>>,
    /// For each storage the sums of gradients that are reduced in every micro-step: of the shard, or of all of it.
    pub(crate) reduced_sums: Vec<Option<HostMemory>>,
    /// For each parameter in how many micro-steps its gradient was given.
    pub(crate) given: Vec<u32>,
    /// For each parameter how it was given in this micro-step.
    pub(crate) now: Vec<Given>,
    /// Micro-steps that are over, and the sum of their weights.
    pub(crate) micro_steps: u32,
    pub(crate) weights: f64,
    /// Weight of the micro-step under way.
    pub(crate) weight: Option<f64>,
    /// Stands for the weights of all micro-steps, if gradients are reduced in each.
    pub(crate) weights_hash: u64,
    /// Memory of segments that are through, for those that come.
    spare: Vec<Box<dyn Buffer>>,
    /// Segments from the front whose parts have been taken.
    pub(crate) through: usize,
    /// Bytes of segments, and the most there have been since the last update.
    held_bytes: u64,
    peak_bytes: u64,
    /// The most of several such numbers.
    pub(crate) seen_peak_bytes: u64,
    /// Bytes of gradients copied from one place to another since the last update.
    pub(crate) copied_bytes: u64,
    /// Time of calls behind the backward passes since the last update.
    pub(crate) exposed_ns: u64,
    /// Whether memory is the host's.
    on_host: bool,
    /// Whether micro-steps add their gradients before they are reduced.
    accumulates: bool,
    /// Whether segments may be reduced before the step is run: not where an update reduces them.
    starts_early: bool,
}

/// How a gradient came in a micro-step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Given {
    #[default]
    No,
    /// By `push_grad`: it is where it belongs.
    Pushed,
    /// Through a view that the caller may still write to.
    Viewed,
}

/// Who has a segment's memory.
#[derive(Debug)]
pub(crate) enum SegmentState {
    /// Gradients are being written, or are about to be; `None` until the first is.
    Here(Option<Box<dyn Buffer>>),
    /// A communication stream has it.
    InFlight(Pending<Box<dyn Buffer>>),
    /// It has been reduced, and this rank's part of it is in its shard.
    Through,
    /// A call has failed with it.
    Lost,
}

/// The memory that holds some gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Region {
    /// Index among all regions.
    index: usize,
    storage: usize,
    /// `None` for a storage whose gradients lie in its list.
    segment: Option<usize>,
    /// Element of the storage that it begins with, and element count.
    first: u64,
    numel: u64,
}

/// One gradient in its region.
struct Target<'a> {
    bytes: &'a mut [u8],
    sums: Option<&'a mut [u8]>,
}

impl GradientArena {
    pub(crate) fn allocate(plan: &Plan, allocator: &mut Allocator<'_>) -> Result<Self, PlanError> {
        let keeps = keeps_segments(plan);
        let mut segments = Vec::with_capacity(plan.segments.len());
        let mut held_bytes = 0;
        for segment in &plan.segments {
            let width = plan.storages[segment.storage].grad_dtype().len_bytes();
            let len_bytes = (segment.elements.end - segment.elements.start) as usize * width;
            let memory = if keeps {
                held_bytes += len_bytes as u64;
                Some(allocator.arena(len_bytes, true)?)
            } else {
                None
            };
            segments.push(SegmentState::Here(memory));
        }
        let (regions, count) = regions(plan);
        let mut arena = Self {
            ready: Ready::new(
                plan.segments
                    .iter()
                    .map(|s| full_tensors(plan, s))
                    .collect(),
            ),
            segments,
            sums: (0..count).map(|_| None).collect(),
            regions,
            reduced_sums: plan.storages.iter().map(|_| None).collect(),
            given: vec![0; plan.params.len()],
            now: vec![Given::No; plan.params.len()],
            micro_steps: 0,
            weights: 0.0,
            weight: None,
            weights_hash: 0,
            spare: Vec::new(),
            through: 0,
            held_bytes,
            peak_bytes: held_bytes,
            seen_peak_bytes: 0,
            copied_bytes: 0,
            exposed_ns: 0,
            on_host: allocator.backend().takes_host_memory(),
            accumulates: plan.micro_steps() > 1 && !plan.reduces_each(),
            starts_early: plan.stages.iter().any(|s| matches!(s, Stage::Reduce(_))),
        };
        arena.allocate_sums(plan)?;
        Ok(arena)
    }

    /// Sums for gradients of 16 bits, and for gradients that are reduced in every micro-step.
    fn allocate_sums(&mut self, plan: &Plan) -> Result<(), PlanError> {
        let Some(rule) = plan.accumulation().filter(|rule| rule.every.get() > 1) else {
            return Ok(());
        };
        if rule.reduced == ReducedWhen::PerMicroStep {
            for (storage, sums) in plan.storages.iter().zip(&mut self.reduced_sums) {
                let width = sum_width(storage.grad_dtype());
                *sums = Some(HostMemory::zeroed(storage.shard_numel() as usize * width)?);
            }
            return Ok(());
        }
        for region in self.regions.clone() {
            let narrow = plan.storages[region.storage].grad_dtype().len_bytes() < 4;
            if narrow || !self.on_host {
                self.sums_of(region, plan.storages[region.storage].grad_dtype())?;
            }
        }
        Ok(())
    }

    /// The sums of a region, allocated when they are first needed.
    fn sums_of(&mut self, region: Region, dtype: DType) -> Result<&mut HostMemory, PlanError> {
        let sums = &mut self.sums[region.index];
        if sums.is_none() {
            *sums = Some(HostMemory::zeroed(
                region.numel as usize * sum_width(dtype),
            )?);
        }
        sums.as_mut().ok_or(PlanError::Poisoned { step: 0 })
    }

    /// Bytes that are held right now besides the arenas of storages.
    pub(crate) fn held_bytes(&self) -> u64 {
        let sums = self.sums.iter().chain(&self.reduced_sums).flatten();
        let sums: usize = sums.map(|memory| memory.bytes().len()).sum();
        self.held_bytes + sums as u64
    }

    /// A segment's memory, made when it is first needed; `None` while a call has it.
    fn memory(
        &mut self,
        segment: usize,
        len_bytes: usize,
        mut allocate: impl FnMut(usize) -> Result<Box<dyn Buffer>, PlanError>,
    ) -> Result<Option<&mut Box<dyn Buffer>>, PlanError> {
        let SegmentState::Here(memory) = &mut self.segments[segment] else {
            return Ok(None);
        };
        if memory.is_none() {
            let fits = |spare: &Box<dyn Buffer>| spare.len_bytes() == len_bytes;
            let reused = self.spare.iter().position(fits);
            *memory = Some(match reused {
                Some(at) => self.spare.swap_remove(at),
                None => {
                    self.held_bytes += len_bytes as u64;
                    self.peak_bytes = self.peak_bytes.max(self.held_bytes);
                    allocate(len_bytes)?
                }
            });
        }
        Ok(memory.as_mut())
    }

    /// Takes a segment's memory; it counts as lost until it is put back.
    pub(crate) fn take(&mut self, segment: usize) -> SegmentState {
        std::mem::replace(&mut self.segments[segment], SegmentState::Lost)
    }

    /// Gives the memory of a segment that is through to those that come.
    pub(crate) fn give_back(&mut self, segment: usize, memory: Box<dyn Buffer>) {
        self.spare.push(memory);
        self.segments[segment] = SegmentState::Through;
    }

    /// Makes all segments fit for the next gradients; says the most bytes there have been.
    pub(crate) fn settle(&mut self, keeps: bool) -> u64 {
        self.through = 0;
        if !keeps {
            self.spare.clear();
            self.held_bytes = 0;
            for segment in &mut self.segments {
                *segment = SegmentState::Here(None);
            }
        }
        std::mem::replace(&mut self.peak_bytes, self.held_bytes)
    }

    /// Notes the most bytes that segments have had in one micro-step.
    pub(crate) fn seen_peak(&mut self, bytes: u64) {
        self.seen_peak_bytes = self.seen_peak_bytes.max(bytes);
    }

    /// Makes all segments fit to be written after a failure: calls have kept their memory.
    pub(crate) fn restore(&mut self) {
        for segment in &mut self.segments {
            if !matches!(segment, SegmentState::Here(_)) {
                *segment = SegmentState::Here(None);
            }
        }
        self.spare.clear();
        self.through = 0;
        self.ready.again();
        self.now.fill(Given::No);
        self.weight = None;
    }

    /// Forgets what was given, once it has been used.
    pub(crate) fn clear(&mut self) {
        self.micro_steps = 0;
        self.weights = 0.0;
        self.weights_hash = 0;
        self.given.fill(0);
        self.now.fill(Given::No);
        self.ready.again();
    }

    /// One tensor's gradient in its segment, if that is there and the host's.
    pub(crate) fn view(&self, spec: &StorageSpec, storage: usize, tensor: usize) -> Option<&[u8]> {
        let width = spec.grad_dtype().len_bytes();
        let range = spec.layout.range(tensor);
        let region = self.regions.iter().find(|region| {
            region.storage == storage
                && (region.first..region.first + region.numel.max(1)).contains(&range.start)
        })?;
        let SegmentState::Here(Some(memory)) = &self.segments[region.segment?] else {
            return None;
        };
        let start = (range.start - region.first) as usize * width;
        memory
            .host()?
            .get(start..start + (range.end - range.start) as usize * width)
    }

    /// The sums of one tensor's gradients so far, as a checkpoint keeps them; `None` if they are where the gradients lie.
    pub(crate) fn sums(&self, spec: &StorageSpec, param: usize, tensor: usize) -> Option<&[u8]> {
        let region = self.regions[param];
        let sums = self.sums[region.index].as_ref()?;
        let width = sum_width(spec.grad_dtype());
        let place = place_in(spec, &region, tensor, width);
        sums.bytes().get(place)
    }
}

/// Bytes of an element of sums.
pub(crate) fn sum_width(dtype: DType) -> usize {
    dtype.len_bytes().max(4)
}

/// Whether segments keep their memory once they are reduced. From ZeRO stage 2 on a rank needs no more than its shard.
pub(crate) fn keeps_segments(plan: &Plan) -> bool {
    plan.zero < ZeroStage::Two
}

fn full_tensors(plan: &Plan, segment: &crate::Segment) -> usize {
    let layout = &plan.storages[segment.storage].layout;
    let full = |&tensor: &u32| layout.numel(tensor as usize) > 0;
    segment.tensors.clone().filter(full).count()
}

/// The region of each parameter, and how many there are.
fn regions(plan: &Plan) -> (Vec<Region>, usize) {
    let mut regions: Vec<Option<Region>> = vec![None; plan.params.len()];
    for (index, segment) in plan.segments.iter().enumerate() {
        let spec = &plan.storages[segment.storage];
        for tensor in segment.tensors.clone() {
            regions[spec.members[tensor as usize] as usize] = Some(Region {
                index,
                storage: segment.storage,
                segment: Some(index),
                first: segment.elements.start,
                numel: segment.elements.end - segment.elements.start,
            });
        }
    }
    let count = plan.segments.len();
    let whole = |param: usize| {
        let (storage, _) = plan.places[param];
        Region {
            index: count + storage,
            storage,
            segment: None,
            first: 0,
            numel: plan.storages[storage].layout.total_numel(),
        }
    };
    let regions = regions.into_iter().enumerate();
    let regions = regions.map(|(param, region)| region.unwrap_or_else(|| whole(param)));
    (regions.collect(), count + plan.storages.len())
}

/// A tensor's bytes in its region.
fn place_in(spec: &StorageSpec, region: &Region, tensor: usize, width: usize) -> Range<usize> {
    let range = spec.layout.range(tensor);
    if range.is_empty() {
        return 0..0;
    }
    let place = |element: u64| (element - region.first) as usize * width;
    place(range.start)..place(range.end)
}

impl Plan {
    /// Takes the gradient of one parameter for the micro-step under way, in one pass that copies or adds it into the arena, and starts
    /// reducing every segment that is full, if `comms` has communication streams.
    ///
    /// A parameter whose gradient is not given before the step is run counts as zero if another rank, or another micro-step,
    /// has given it, else it is left out of the step.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::LenBytes`], [`PlanError::GradientTwice`], [`PlanError::ForeignState`];
    /// [`PlanError::Collective`], and the state refuses further steps then.
    pub fn push_grad(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        self.check_state(state)?;
        let param = state.find(name)?;
        let (storage, _) = state.places[param];
        let dtype = self.storages[storage].grad_dtype();
        let len_bytes = self.params[param].numel() as usize * dtype.len_bytes();
        check_len(Role::Grad, name, len_bytes, bytes.len())?;
        if state.arena.now[param] != Given::No {
            return Err(PlanError::GradientTwice {
                name: name.to_owned(),
            });
        }
        let how = self.how_to_absorb(state, param);
        state.absorb(self, backend, param, Some(bytes), how)?;
        state.arena.now[param] = Given::Pushed;
        state.arena.given[param] += 1;
        let Some(segment) = state.arena.regions[param].segment else {
            return Ok(());
        };
        if !bytes.is_empty() {
            state.arena.ready.given(segment);
        }
        let last = state.arena.micro_steps + 1 == self.micro_steps();
        let early = comms.has_streams() && state.arena.starts_early;
        if early && (last || self.reduces_each()) {
            self.take_reduced(state, backend)?;
            while let Some(segment) = state.arena.ready.full() {
                self.start_segment(state, backend, comms, segment)?;
            }
        }
        Ok(())
    }

    /// What a gradient of the micro-step under way does to the sums.
    pub(crate) fn how_to_absorb(&self, state: &State, param: usize) -> Absorb {
        let arena = &state.arena;
        if self.micro_steps() == 1 || self.reduces_each() {
            return Absorb {
                first: true,
                weight: None,
                last: (self.micro_steps() == 1).then_some(Divisor(1.0)),
            };
        }
        let last = arena.micro_steps + 1 == self.micro_steps();
        let weight = arena.weight.unwrap_or(1.0);
        Absorb {
            first: arena.given[param] == 0,
            weight: arena.weight,
            last: last.then(|| self.divisor(state, weight)),
        }
    }

    /// What the sum over micro-steps is divided by, with the weight of the micro-step under way.
    pub(crate) fn divisor(&self, state: &State, weight: f64) -> Divisor {
        match self.accumulation().map(|rule| rule.accumulated) {
            Some(Accumulated::Mean) => Divisor(state.arena.weights + weight),
            Some(Accumulated::Sum) | None => Divisor(1.0),
        }
    }

    /// Finishes gradients that were not pushed in the last micro-step: adds those that were written through views, divides what earlier
    /// micro-steps have added, and writes zeros where there is nothing.
    pub(crate) fn complete_gradients(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        divisor: Divisor,
    ) -> Result<(), PlanError> {
        let sums = self.micro_steps() > 1 && !self.reduces_each();
        for param in 0..self.params.len() {
            match state.arena.now[param] {
                Given::Pushed => continue,
                Given::Viewed => {
                    let how = Absorb {
                        last: Some(divisor),
                        ..self.how_to_absorb(state, param)
                    };
                    if sums {
                        state.absorb_view(self, param, how)?;
                    }
                    state.arena.given[param] += 1;
                }
                Given::No if sums && state.arena.given[param] > 0 => {
                    let how = Absorb {
                        first: false,
                        weight: None,
                        last: Some(divisor),
                    };
                    state.absorb(self, backend, param, None, how)?;
                }
                // What no rank has given is left out; what others, or other micro-steps, have is zero here.
                Given::No if self.reduces() || self.reduces_each() => state.write_zeros(self, backend, param)?,
                Given::No => {}
            }
        }
        Ok(())
    }

    /// Ends a micro-step that is not the last: what was written through views is added.
    pub(crate) fn add_views(&self, state: &mut State) -> Result<(), PlanError> {
        for param in 0..self.params.len() {
            if state.arena.now[param] == Given::Viewed {
                let how = self.how_to_absorb(state, param);
                if !self.reduces_each() {
                    state.absorb_view(self, param, how)?;
                }
                state.arena.given[param] += 1;
            }
        }
        Ok(())
    }
}

impl State {
    /// Weighs the gradients of the micro-step under way, before the first of them is given: the number of its samples, if
    /// updates are means of micro-steps of unequal length.
    pub fn set_weight(&mut self, weight: f64) -> Result<(), PlanError> {
        if weight.is_finite() && weight > 0.0 {
            self.arena.weight = Some(weight);
            return Ok(());
        }
        Err(PlanError::Weight { found: weight })
    }

    /// Micro-steps since the last update that are over.
    pub fn micro_steps(&self) -> u32 {
        self.arena.micro_steps
    }

    /// Segments of gradients whose reduction has been started: with communication streams, while gradients are still being given.
    pub fn segments_started(&self) -> usize {
        self.arena.ready.started()
    }

    /// The memory of a gradient's region and of its sums.
    fn target(
        &mut self,
        plan: &Plan,
        param: usize,
        allocate: impl FnMut(usize) -> Result<Box<dyn Buffer>, PlanError>,
    ) -> Result<Option<Target<'_>>, PlanError> {
        let region = self.arena.regions[param];
        let (_, tensor) = self.places[param];
        let spec = &plan.storages[region.storage];
        let width = spec.grad_dtype().len_bytes();
        let place = place_in(spec, &region, tensor, width);
        let sum_place = place_in(spec, &region, tensor, sum_width(spec.grad_dtype()));
        if let Some(segment) = region.segment {
            let len_bytes = region.numel as usize * width;
            self.arena.memory(segment, len_bytes, allocate)?;
        }
        let sums = self.arena.sums[region.index].as_mut();
        let sums = sums.and_then(|sums| sums.bytes_mut().get_mut(sum_place));
        let buffer = match region.segment {
            Some(segment) => match &mut self.arena.segments[segment] {
                SegmentState::Here(Some(memory)) => memory.host_mut(),
                _ => None,
            },
            None => {
                let storage = &mut self.storages[region.storage];
                let list = storage.list(Role::Grad);
                list.and_then(|list| storage.lists[list].buffer.host_mut())
            }
        };
        let bytes = buffer.and_then(|buffer| buffer.get_mut(place));
        Ok(bytes.map(|bytes| Target { bytes, sums }))
    }

    /// Writes or adds a gradient at its place.
    fn absorb(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        param: usize,
        grad: Option<&[u8]>,
        how: Absorb,
    ) -> Result<(), PlanError> {
        let (storage, _) = self.places[param];
        let dtype = plan.storages[storage].grad_dtype();
        let on_host = self.arena.on_host;
        if !on_host {
            return self.absorb_on_device(plan, backend, (param, dtype), grad, how);
        }
        // Without several micro-steps a gradient goes to the arena as it is.
        let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
        let Some(target) = self.target(plan, param, allocate)? else {
            return Ok(());
        };
        if how.first && how.weight.is_none() && how.last.is_none_or(|last| last.0 == 1.0) {
            if let (Some(grad), None) = (grad, &target.sums) {
                target.bytes.copy_from_slice(grad);
                return Ok(());
            }
        }
        absorb(dtype, target.bytes, target.sums, grad, how);
        Ok(())
    }

    /// Adds what was written through a view to the sums.
    fn absorb_view(&mut self, plan: &Plan, param: usize, how: Absorb) -> Result<(), PlanError> {
        let (storage, _) = self.places[param];
        let dtype = plan.storages[storage].grad_dtype();
        let allocate = |len_bytes| Ok(Box::new(HostMemory::zeroed(len_bytes)?) as Box<dyn Buffer>);
        let Some(target) = self.target(plan, param, allocate)? else {
            return Ok(());
        };
        let added = Absorb { last: None, ..how };
        let Some(sums) = target.sums else {
            return Ok(());
        };
        absorb(dtype, &mut [], Some(&mut *sums), Some(target.bytes), added);
        if how.last.is_some() {
            let ended = Absorb {
                first: false,
                ..how
            };
            absorb(dtype, target.bytes, Some(sums), None, ended);
        }
        Ok(())
    }

    /// Device memory has no view: sums are the host's, and what they come to is written.
    fn absorb_on_device(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        (param, dtype): (usize, DType),
        grad: Option<&[u8]>,
        how: Absorb,
    ) -> Result<(), PlanError> {
        let region = self.arena.regions[param];
        let (_, tensor) = self.places[param];
        let spec = &plan.storages[region.storage];
        let place = place_in(spec, &region, tensor, sum_width(dtype));
        let len_bytes = self.params[param].numel() as usize * dtype.len_bytes();
        // Aligned for elements of any type, also where it is empty.
        let mut memory = HostMemory::zeroed(len_bytes)?;
        let out = memory.bytes_mut();
        let sums = self.arena.sums[region.index].as_mut();
        let sums = sums.and_then(|sums| sums.bytes_mut().get_mut(place));
        if sums.is_none() {
            match grad {
                Some(grad) => out.copy_from_slice(grad),
                None => return Ok(()),
            }
        } else {
            absorb(dtype, out, sums, grad, how);
            if how.last.is_none() {
                return Ok(());
            }
        }
        self.write_gradient(backend, param, out)
    }

    fn write_zeros(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        param: usize,
    ) -> Result<(), PlanError> {
        let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
        if let Some(target) = self.target(plan, param, allocate)? {
            target.bytes.fill(0);
            return Ok(());
        }
        let (storage, _) = self.places[param];
        let width = plan.storages[storage].grad_dtype().len_bytes();
        let zeros = vec![0; self.params[param].numel() as usize * width];
        self.write_gradient(backend, param, &zeros)
    }

    /// Writes a whole gradient to its segment or list, wherever that lies.
    pub(crate) fn write_gradient(
        &mut self,
        backend: &dyn Backend,
        param: usize,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        let region = self.arena.regions[param];
        let (_, tensor) = self.places[param];
        let spec = self.storages[region.storage].spec.clone();
        let width = spec.grad_dtype().len_bytes();
        let place = place_in(&spec, &region, tensor, width);
        match region.segment {
            Some(segment) => {
                let len_bytes = region.numel as usize * width;
                let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
                if let Some(memory) = self.arena.memory(segment, len_bytes, allocate)? {
                    backend.write(memory.as_mut(), place.start, bytes)?;
                }
            }
            None => {
                let storage = &mut self.storages[region.storage];
                if let Some(list) = storage.list(Role::Grad) {
                    backend.write(storage.lists[list].buffer.as_mut(), place.start, bytes)?;
                }
            }
        }
        Ok(())
    }

    /// The view of a gradient in the arena, which counts as given from now on; `None` if the memory is not the host's.
    pub(crate) fn grad_view(&mut self, param: usize) -> Result<Option<&mut [u8]>, PlanError> {
        let region = self.arena.regions[param];
        let (_, tensor) = self.places[param];
        if self.arena.now[param] == Given::Pushed {
            return Err(PlanError::GradientTwice {
                name: self.params[param].name.clone(),
            });
        }
        let spec = self.storages[region.storage].spec.clone();
        let width = spec.grad_dtype().len_bytes();
        let place = place_in(&spec, &region, tensor, width);
        if !self.arena.on_host && region.segment.is_some() {
            return Ok(None);
        }
        if self.arena.accumulates && self.arena.sums[region.index].is_none() {
            self.sums_beside(region, &spec)?;
        }
        self.arena.now[param] = Given::Viewed;
        let Some(segment) = region.segment else {
            let storage = &mut self.storages[region.storage];
            let list = storage.list(Role::Grad);
            let buffer = list.and_then(|list| storage.lists[list].buffer.host_mut());
            return Ok(buffer.and_then(|buffer| buffer.get_mut(place)));
        };
        let allocate = |len_bytes| Ok(Box::new(HostMemory::zeroed(len_bytes)?) as Box<dyn Buffer>);
        let memory = self
            .arena
            .memory(segment, region.numel as usize * width, allocate)?;
        let buffer = memory.and_then(|memory| memory.host_mut());
        Ok(buffer.and_then(|buffer| buffer.get_mut(place)))
    }

    /// Moves sums out of the memory that a view will be written to.
    fn sums_beside(&mut self, region: Region, spec: &StorageSpec) -> Result<(), PlanError> {
        let copied = match region.segment {
            Some(segment) => match &self.arena.segments[segment] {
                SegmentState::Here(Some(memory)) => memory.host().map(<[u8]>::to_vec),
                _ => None,
            },
            None => {
                let storage = &self.storages[region.storage];
                let list = storage.list(Role::Grad);
                let bytes = list.and_then(|list| storage.lists[list].buffer.host());
                bytes.map(<[u8]>::to_vec)
            }
        };
        let sums = self.arena.sums_of(region, spec.grad_dtype())?;
        if let Some(copied) = copied {
            let len = copied.len().min(sums.bytes().len());
            sums.bytes_mut()[..len].copy_from_slice(&copied[..len]);
        }
        Ok(())
    }

    /// Bytes of everything that this rank holds right now: arenas, segments and sums; between steps what
    /// [`Plan::memory_bytes`] says.
    pub fn memory_bytes(&self) -> u64 {
        let lists = self.storages.iter().flat_map(|storage| &storage.lists);
        let lists: usize = lists.map(|list| list.buffer.len_bytes()).sum();
        lists as u64 + self.arena.held_bytes()
    }

    /// Writes what sums over micro-steps have come to so far back to where a checkpoint had them.
    pub(crate) fn restore_sums(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        param: usize,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
        if let Some(target) = self.target(plan, param, allocate)? {
            let place = target.sums.unwrap_or(target.bytes);
            place.copy_from_slice(bytes);
        }
        Ok(())
    }

    /// The reduced gradients of a part of this rank's shard.
    pub(crate) fn read_reduced(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        (storage, part): (usize, &Part),
        bytes: &mut [u8],
    ) -> Result<(), PlanError> {
        self.each_of_reduced(plan, (storage, part), &mut |buffer, place, range| {
            Ok(backend.read(buffer, place, &mut bytes[range])?)
        })
    }

    /// Writes them.
    pub(crate) fn write_reduced(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        (storage, part): (usize, &Part),
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        self.each_of_reduced(plan, (storage, part), &mut |buffer, place, range| {
            Ok(backend.write(buffer, place, &bytes[range])?)
        })
    }

    /// The buffers that have the gradients of a part, the place in each, and which bytes of the part these are.
    fn each_of_reduced(
        &mut self,
        plan: &Plan,
        (storage, part): (usize, &Part),
        with: &mut dyn FnMut(&mut dyn Buffer, usize, Range<usize>) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        let spec = &plan.storages[storage];
        let width = spec.grad_dtype().len_bytes();
        let Some(list) = spec.list(Role::Grad) else {
            return Ok(());
        };
        let numel = (part.elements.end - part.elements.start) as usize;
        let at = match spec.extents[list] {
            Extent::Whole => part.elements.start,
            Extent::Shard => part.at,
            Extent::Segments => {
                for (index, segment) in plan.segments.iter().enumerate() {
                    let start = segment.elements.start.max(part.elements.start);
                    let end = segment.elements.end.min(part.elements.end);
                    if segment.storage != storage || start >= end {
                        continue;
                    }
                    if let SegmentState::Here(Some(memory)) = &mut self.arena.segments[index] {
                        let place = (start - segment.elements.start) as usize * width;
                        let from = (start - part.elements.start) as usize * width;
                        let to = (end - part.elements.start) as usize * width;
                        with(memory.as_mut(), place, from..to)?;
                    }
                }
                return Ok(());
            }
        };
        let buffer = self.storages[storage].lists[list].buffer.as_mut();
        with(buffer, at as usize * width, 0..numel * width)
    }

    /// The sums over micro-steps of one gradient so far.
    pub(crate) fn sums_so_far(&self, plan: &Plan, param: usize) -> Vec<u8> {
        let (storage, tensor) = self.places[param];
        let spec = &plan.storages[storage];
        let width = sum_width(spec.grad_dtype());
        let zeros = || vec![0; self.params[param].numel() as usize * width];
        if self.arena.given[param] == 0 {
            return zeros();
        }
        if let Some(sums) = self.arena.sums(spec, param, tensor) {
            return sums.to_vec();
        }
        let view = match spec.list(Role::Grad).map(|list| (list, spec.extents[list])) {
            Some((list, Extent::Whole)) => {
                let place = place_in(spec, &self.arena.regions[param], tensor, width);
                let bytes = self.storages[storage].lists[list].buffer.host();
                bytes.and_then(|bytes| bytes.get(place))
            }
            _ => self.arena.view(spec, storage, tensor),
        };
        view.map_or_else(zeros, <[u8]>::to_vec)
    }
}

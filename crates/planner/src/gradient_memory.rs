//! Where a gradient is written: its place in a segment or a list, its sums, and views of it.

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::{DType, Role};

use crate::absorb::{Absorb, absorb};
use crate::arena::{Given, Region, SegmentState, Target, place_in, sum_width};
use crate::stage::{Extent, Part};
use crate::{Plan, PlanError, State, StorageSpec};

/// What is done with a buffer, a place in it, and the bytes of a part that lie there.
type WithReduced<'a> =
    &'a mut dyn FnMut(&mut dyn Buffer, usize, Range<usize>) -> Result<(), PlanError>;

impl State {
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
    pub(crate) fn absorb(
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
        let as_it_is =
            how.first && how.weight.is_none() && how.last.is_none_or(|last| last.0 == 1.0);
        if let (true, Some(grad), None) = (as_it_is, grad, &target.sums) {
            target.bytes.copy_from_slice(grad);
            return Ok(());
        }
        absorb(dtype, target.bytes, target.sums, grad, how);
        Ok(())
    }

    /// Adds what was written through a view to the sums.
    pub(crate) fn absorb_view(
        &mut self,
        plan: &Plan,
        param: usize,
        how: Absorb,
    ) -> Result<(), PlanError> {
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

    pub(crate) fn write_zeros(
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

    /// The view of a gradient in the arena, which counts as given from now on; `None` if the memory
    /// is not the host's.
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

    /// Bytes of everything that this rank holds right now: arenas, segments and sums; between steps
    /// what [`Plan::memory_bytes`] says.
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

    /// The buffers that have the gradients of a part, the place in each, and which bytes of the
    /// part these are.
    fn each_of_reduced(
        &mut self,
        plan: &Plan,
        (storage, part): (usize, &Part),
        with: WithReduced<'_>,
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
            _ => self.arena.view(spec, param, tensor),
        };
        view.map_or_else(zeros, <[u8]>::to_vec)
    }
}

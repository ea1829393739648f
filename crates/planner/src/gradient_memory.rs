//! Where a gradient is written: its place in a segment or a list, its sums, and views of it.

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_launch::{Accumulate, Backend, Buffer, DeviceSliceMut};
use fusestep_tensor::Role;

use crate::absorb::{Absorb, absorb};
use crate::arena::{Given, SegmentState};
use crate::region::{Region, Target, place_in, sum_width};
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
        let sums = sums.and_then(|sums| sums.host_mut()?.get_mut(sum_place));
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
            if let Some(grad) = grad {
                self.write_gradient(backend, param, grad)?;
            }
            return self.absorb_on_device(plan, backend, param, (grad.is_some(), how));
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
        backend: &dyn Backend,
        param: usize,
        how: Absorb,
    ) -> Result<(), PlanError> {
        if !self.arena.on_host {
            return self.absorb_on_device(plan, backend, param, (true, how));
        }
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

    /// Adds a gradient that lies at its place on a device to its sums, if there is one, and puts
    /// what they come to in its place.
    fn absorb_on_device(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        param: usize,
        (is_given, how): (bool, Absorb),
    ) -> Result<(), PlanError> {
        let region = self.arena.regions[param];
        let (_, tensor) = self.places[param];
        let spec = &plan.storages[region.storage];
        let dtype = spec.grad_dtype();
        let width = dtype.len_bytes();
        let Some(mut sums) = self.arena.sums[region.index].take() else {
            return Ok(());
        };
        let place = place_in(spec, &region, tensor, width);
        let sums_at = place_in(spec, &region, tensor, sum_width(dtype)).start;
        let grads = self.grad_buffer(backend, region, width)?;
        let added = match grads {
            Some(grads) => how.on_device(is_given, |what| {
                backend.accumulate(Accumulate {
                    dtype,
                    sums: (sums.as_mut(), sums_at),
                    grads: (grads.as_mut(), place.start),
                    numel: (place.len() / width) as u64,
                    what,
                })
            }),
            None => Ok(()),
        };
        self.arena.sums[region.index] = Some(sums);
        Ok(added?)
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
        match self.grad_buffer(backend, region, width)? {
            Some(buffer) => Ok(backend.write(buffer.as_mut(), place.start, bytes)?),
            None => Ok(()),
        }
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

    /// A gradient on a device, to be written where ranks reduce it and updates read it, no copy:
    /// what a framework enqueues for it begins behind `ready` of its order, and it records `done`.
    /// It counts as given in the micro-step under way, whose end follows `done` on the device;
    /// [`Plan::give_view`] says earlier that it is whole. Gradients of one bucket share the events
    /// and are written on one stream.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`]; [`PlanError::GradientTwice`] if it was pushed in this
    /// micro-step; [`PlanError::NotOnDevice`] on a backend of the host, and while a call has the
    /// memory; [`PlanError::Backend`].
    pub fn grad_on_device(
        &mut self,
        backend: &dyn Backend,
        name: &str,
    ) -> Result<DeviceSliceMut<'_>, PlanError> {
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        if self.arena.now[param] == Given::Pushed {
            return Err(PlanError::GradientTwice {
                name: name.to_owned(),
            });
        }
        let region = self.arena.regions[param];
        let spec = self.storages[region.storage].spec.clone();
        let width = spec.grad_dtype().len_bytes();
        let place = place_in(&spec, &region, tensor, width);
        let error = || PlanError::NotOnDevice {
            name: name.to_owned(),
        };
        if self.arena.on_host {
            return Err(error());
        }
        let buffer = self.grad_buffer(backend, region, width)?;
        backend.hand_over(buffer.ok_or_else(error)?.as_mut())?;
        self.arena.now[param] = Given::Viewed;
        let buffer = self.grad_buffer(backend, region, width)?;
        let slice = buffer.and_then(|buffer| buffer.device_mut()?.part(place));
        slice.ok_or_else(error)
    }

    /// Lets work of the backend follow what was enqueued for a view, if it lies on a device.
    pub(crate) fn take_view_back(
        &mut self,
        backend: &dyn Backend,
        param: usize,
    ) -> Result<(), PlanError> {
        if self.arena.on_host {
            return Ok(());
        }
        let region = self.arena.regions[param];
        let width = self.storages[region.storage].spec.grad_dtype().len_bytes();
        match self.grad_buffer(backend, region, width)? {
            Some(buffer) => Ok(backend.take_back(buffer.as_mut())?),
            None => Ok(()),
        }
    }

    /// The memory that a region's gradients lie in, made when it is first needed; `None` while a
    /// call has it.
    fn grad_buffer(
        &mut self,
        backend: &dyn Backend,
        region: Region,
        width: usize,
    ) -> Result<Option<&mut Box<dyn Buffer>>, PlanError> {
        Ok(match region.segment {
            Some(segment) => {
                let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
                let len_bytes = region.numel as usize * width;
                self.arena.memory(segment, len_bytes, allocate)?
            }
            None => {
                let storage = &mut self.storages[region.storage];
                let list = storage.list(Role::Grad);
                list.map(|list| &mut storage.lists[list].buffer)
            }
        })
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
        let allocate = |len_bytes| Ok(Box::new(HostMemory::zeroed(len_bytes)?) as Box<dyn Buffer>);
        let sums = self.arena.sums_of(region, spec.grad_dtype(), allocate)?;
        if let (Some(copied), Some(sums)) = (copied, sums.host_mut()) {
            let len = copied.len().min(sums.len());
            sums[..len].copy_from_slice(&copied[..len]);
        }
        Ok(())
    }

    /// Bytes of everything that this rank holds right now: arenas, segments and sums; between steps
    /// what [`Plan::memory_bytes`] says, and on a device from ZeRO stage 2 on the segments besides
    /// that it keeps for the next step.
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
        let region = self.arena.regions[param];
        let (_, tensor) = self.places[param];
        let spec = &plan.storages[region.storage];
        let place = place_in(spec, &region, tensor, sum_width(spec.grad_dtype()));
        if let Some(sums) = &mut self.arena.sums[region.index] {
            return Ok(backend.write(sums.as_mut(), place.start, bytes)?);
        }
        let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
        if let Some(target) = self.target(plan, param, allocate)? {
            target.bytes.copy_from_slice(bytes);
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

    /// Adds them to sums on a device that begin at a byte, or puts what these come to in their
    /// place.
    pub(crate) fn add_reduced(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
        (storage, part): (usize, &Part),
        (sums, sums_at, how): (&mut dyn Buffer, usize, Absorb),
    ) -> Result<(), PlanError> {
        let dtype = plan.storages[storage].grad_dtype();
        let (width, sum_width) = (dtype.len_bytes(), sum_width(dtype));
        let is_given = how.last.is_none();
        self.each_of_reduced(plan, (storage, part), &mut |buffer, place, range| {
            let done = how.on_device(is_given, |what| {
                backend.accumulate(Accumulate {
                    dtype,
                    sums: (&mut *sums, sums_at + range.start / width * sum_width),
                    grads: (&mut *buffer, place),
                    numel: (range.len() / width) as u64,
                    what,
                })
            });
            Ok(done?)
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
    pub(crate) fn sums_so_far(
        &self,
        plan: &Plan,
        backend: &dyn Backend,
        param: usize,
    ) -> Result<Vec<u8>, PlanError> {
        let (storage, tensor) = self.places[param];
        let spec = &plan.storages[storage];
        let width = sum_width(spec.grad_dtype());
        let zeros = || vec![0; self.params[param].numel() as usize * width];
        if self.arena.given[param] == 0 {
            return Ok(zeros());
        }
        if let Some(sums) = self.arena.sums(spec, backend, (param, tensor))? {
            return Ok(sums);
        }
        let view = match spec.list(Role::Grad).map(|list| (list, spec.extents[list])) {
            Some((list, Extent::Whole)) => {
                let place = place_in(spec, &self.arena.regions[param], tensor, width);
                let bytes = self.storages[storage].lists[list].buffer.host();
                bytes.and_then(|bytes| bytes.get(place))
            }
            _ => self.arena.view(spec, param, tensor),
        };
        Ok(view.map_or_else(zeros, <[u8]>::to_vec))
    }
}

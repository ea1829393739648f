//! Views of gradients: their places in a segment or a list, and their sums.

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_collective::Divisor;
use fusestep_launch::{Accumulate, Backend, Buffer};
use fusestep_tensor::{DType, DeviceSliceMut, Role};

use crate::error::{PlanError, Result};
use crate::plan::segments::{Region, Target, place_in, sum_width};
use crate::plan::storage::Extent;
use crate::run::memory::absorb::{Absorb, Addend, absorb};
use crate::run::memory::device;
use crate::run::memory::segment_state::{Given, SegmentState};
use crate::run::memory::state::State;

/// The place of a gradient.
pub(crate) struct Place {
    pub(crate) region: Region,
    pub(crate) dtype: DType,
    /// Bytes of the gradient in its region.
    pub(crate) bytes: Range<usize>,
    /// Bytes of the gradient's sums.
    pub(crate) sums: Range<usize>,
}

fn in_host_memory(len_bytes: usize) -> Result<Box<dyn Buffer>> {
    Ok(Box::new(HostMemory::zeroed(len_bytes)?))
}

impl State {
    /// The place of a gradient.
    pub(crate) fn place_of(&self, param: usize) -> Place {
        let region = self.arena.regions[param];
        let (_, tensor) = self.places[param];
        let spec = &self.storages[region.storage].spec;
        let dtype = spec.grad_dtype();
        Place {
            region,
            dtype,
            bytes: place_in(spec, &region, tensor, dtype.len_bytes()),
            sums: place_in(spec, &region, tensor, sum_width(dtype)),
        }
    }

    /// The memory of a gradient's region and of its sums.
    fn target(
        &mut self,
        param: usize,
        allocate: impl FnMut(usize) -> Result<Box<dyn Buffer>>,
    ) -> Result<Option<Target<'_>>> {
        let place = self.place_of(param);
        let region = place.region;
        self.memory_of(&place, allocate)?;
        let sums = self.arena.sums[region.index].as_mut();
        let sums = sums.and_then(|sums| sums.host_mut()?.get_mut(place.sums));
        let buffer = match region.segment {
            Some(segment) => match &mut self.arena.segments[segment] {
                SegmentState::Here(Some(memory)) => memory.host_mut(),
                _ => None,
            },
            None => {
                let storage = &mut self.storages[region.storage];
                let list = storage.spec.list(Role::Grad);
                list.and_then(|list| storage.lists[list].buffer.host_mut())
            }
        };
        let bytes = buffer.and_then(|buffer| buffer.get_mut(place.bytes));
        Ok(bytes.map(|bytes| Target { bytes, sums }))
    }

    /// Writes or adds a gradient at its place.
    pub(crate) fn absorb(
        &mut self,
        backend: &dyn Backend,
        param: usize,
        grad: Option<&[u8]>,
        how: Absorb,
    ) -> Result<()> {
        if !self.arena.on_host {
            let addend = match grad {
                Some(grad) => {
                    self.write_weighed(backend, param, grad, how)?;
                    Addend::InPlace
                }
                None => Addend::Missing,
            };
            return self.absorb_on_device(backend, param, &addend, how);
        }
        // Without several micro-steps a gradient goes to the arena as it is.
        let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
        let dtype = self.place_of(param).dtype;
        let Some(target) = self.target(param, allocate)? else {
            return Ok(());
        };
        let as_it_is =
            how.first && how.weight.is_none() && how.last.is_none_or(|last| last == Divisor::ONE);
        if let (true, Some(grad), None) = (as_it_is, grad, &target.sums) {
            target.bytes.copy_from_slice(grad);
            return Ok(());
        }
        absorb(dtype, target.bytes, target.sums, grad, how);
        Ok(())
    }

    /// Writes a gradient to a device, times its weight where no sum takes that.
    fn write_weighed(
        &mut self,
        backend: &dyn Backend,
        param: usize,
        grad: &[u8],
        how: Absorb,
    ) -> Result<()> {
        let place = self.place_of(param);
        if how.weight.is_none() || self.arena.sums[place.region.index].is_some() {
            return self.write_gradient(backend, param, grad);
        }
        let mut weighed = HostMemory::zeroed(grad.len())?;
        let weigh = Absorb { first: true, last: None, ..how };
        absorb(place.dtype, weighed.bytes_mut(), None, Some(grad), weigh);
        self.write_gradient(backend, param, weighed.bytes())
    }

    /// Adds what was written through a view to the sums.
    pub(crate) fn absorb_view(
        &mut self,
        backend: &dyn Backend,
        param: usize,
        how: Absorb,
    ) -> Result<()> {
        if !self.arena.on_host {
            return self.absorb_on_device(backend, param, &Addend::InPlace, how);
        }
        let dtype = self.place_of(param).dtype;
        let Some(target) = self.target(param, in_host_memory)? else {
            return Ok(());
        };
        let added = Absorb { last: None, ..how };
        let Some(sums) = target.sums else {
            return Ok(());
        };
        absorb(dtype, &mut [], Some(&mut *sums), Some(target.bytes), added);
        if how.last.is_some() {
            let ended = Absorb { first: false, ..how };
            absorb(dtype, target.bytes, Some(sums), None, ended);
        }
        Ok(())
    }

    /// Adds a gradient that lies at its place on a device to its sums, if there is one, and puts
    /// what they come to in its place.
    fn absorb_on_device(
        &mut self,
        backend: &dyn Backend,
        param: usize,
        addend: &Addend<'_>,
        how: Absorb,
    ) -> Result<()> {
        let place = self.place_of(param);
        let Some(mut sums) = self.arena.sums[place.region.index].take() else {
            return Ok(());
        };
        let added = match self.grad_buffer(backend, &place)? {
            Some(grads) => device::of_sums(backend).and_then(|device| {
                how.on_device(addend, |what| {
                    device.add_gradients(Accumulate {
                        dtype: place.dtype,
                        sums: (sums.as_mut(), place.sums.start),
                        grads: (grads.as_mut(), place.bytes.start),
                        numel: (place.bytes.len() / place.dtype.len_bytes()) as u64,
                        what,
                    })
                })
            }),
            None => Ok(()),
        };
        self.arena.sums[place.region.index] = Some(sums);
        Ok(added?)
    }

    /// Says that the next update is of so many micro-batches only, the first ones of its global
    /// batch: such as those left over at an epoch's end. All ranks say so, before the first
    /// gradient. A rank that has none of them makes its one step without a gradient.
    ///
    /// # Errors
    /// [`PlanError::MicroBatches`] for 0, for more than the plan has, without [`crate::Lanes`],
    /// and once a gradient has been given.
    pub fn set_micro_batches(&mut self, count: u64) -> Result<()> {
        let has_gradients = self.has_gradients();
        let refused = |expected: &str| {
            Err(PlanError::MicroBatches { expected: expected.to_owned(), found: count })
        };
        let Some(window) = &mut self.arena.window else {
            return refused("a plan with lanes");
        };
        let most = window.weights.len() as u64;
        if has_gradients {
            return refused("a number before the first gradient of the update");
        }
        if count == 0 || count > most {
            return refused(&format!("1 to {most}, which the plan has"));
        }
        window.limit(count);
        Ok(())
    }

    /// The number, within the global batch of an update, of the micro-batch whose gradients this
    /// rank gives next. `None` for a plan without [`crate::Lanes`], and for a rank that has given
    /// all of its own.
    pub fn micro_batch(&self) -> Option<u64> {
        let window = self.arena.window.as_ref()?;
        let step = self.arena.micro_steps as usize;
        let number = window.micro_batch(step).filter(|_| step < window.given_steps)?;
        Some(number as u64)
    }

    pub(crate) fn write_zeros(&mut self, backend: &dyn Backend, param: usize) -> Result<()> {
        let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
        if let Some(target) = self.target(param, allocate)? {
            target.bytes.fill(0);
            return Ok(());
        }
        let width = self.place_of(param).dtype.len_bytes();
        let zeros = vec![0; self.params[param].numel() as usize * width];
        self.write_gradient(backend, param, &zeros)
    }

    /// Writes a whole gradient to its segment or list, wherever that lies.
    pub(crate) fn write_gradient(
        &mut self,
        backend: &dyn Backend,
        param: usize,
        bytes: &[u8],
    ) -> Result<()> {
        let place = self.place_of(param);
        match self.grad_buffer(backend, &place)? {
            Some(buffer) => Ok(backend.write(buffer.as_mut(), place.bytes.start, bytes)?),
            None => Ok(()),
        }
    }

    /// The view of a gradient in the arena, which counts as given from now on; `None` if the memory
    /// is not the host's.
    pub(crate) fn grad_view(&mut self, param: usize) -> Result<Option<&mut [u8]>> {
        self.check_not_pushed(param)?;
        let place = self.place_of(param);
        let region = place.region;
        if !self.arena.on_host && region.segment.is_some() {
            return Ok(None);
        }
        // What there is no view of has not been given either.
        let memory = self.memory_of(&place, in_host_memory)?;
        if memory.is_none_or(|memory| memory.host().is_none()) {
            return Ok(None);
        }
        if self.arena.accumulates && self.arena.sums[region.index].is_none() {
            self.sums_beside(&place)?;
        }
        self.arena.now[param] = Given::Viewed;
        let memory = self.memory_of(&place, in_host_memory)?;
        Ok(memory.and_then(|memory| memory.host_mut()?.get_mut(place.bytes)))
    }

    /// Refuses a view of a gradient that was pushed in this micro-step.
    fn check_not_pushed(&self, param: usize) -> Result<()> {
        if self.arena.now[param] == Given::Pushed {
            return Err(PlanError::GradientTwice { name: self.params[param].name.clone() });
        }
        Ok(())
    }

    /// Mutable view of a gradient in device memory, where ranks reduce it and updates read it.
    /// Nothing is copied.
    ///
    /// With [`DeviceOrder::Events`], work that writes the view is enqueued behind the event
    /// `ready`. The caller records the event `done` behind that work. Gradients of one bucket share
    /// the events and are written on one stream.
    ///
    /// The view is not set to zero: old values count until the whole gradient is written. The
    /// gradient counts as given in the micro-step under way, whose end follows `done` on the
    /// device. [`crate::Run::give_view`] says before that end that the gradient is complete.
    ///
    /// [`DeviceOrder::Events`]: fusestep_tensor::DeviceOrder::Events
    ///
    /// # Errors
    /// [`PlanError::UnknownName`]. [`PlanError::GradientTwice`] if the gradient was pushed in this
    /// micro-step. [`PlanError::NotOnDevice`] on a host backend, and while a call between ranks has
    /// the memory. [`PlanError::Backend`], after which the state refuses further steps.
    pub fn grad_on_device(
        &mut self,
        backend: &dyn Backend,
        name: &str,
    ) -> Result<DeviceSliceMut<'_>> {
        let param = self.find(name)?;
        self.check_not_pushed(param)?;
        let place = self.place_of(param);
        let error = || PlanError::NotOnDevice { name: name.to_owned() };
        let device = backend.device().filter(|_| !self.arena.on_host).ok_or_else(error)?;
        let buffer = self.grad_buffer(backend, &place)?;
        let buffer = buffer.ok_or_else(error)?;
        // A step could read what is still being written where the order on the device is not known.
        let handed = device.hand_over(buffer.as_mut());
        self.or_poison(handed)?;
        self.arena.now[param] = Given::Viewed;
        let buffer = self.grad_buffer(backend, &place)?;
        let slice = buffer.and_then(|buffer| buffer.device_mut()?.part(place.bytes));
        slice.ok_or_else(error)
    }

    /// Lets work of the backend follow what was enqueued for a view, if it lies on a device.
    pub(crate) fn take_view_back(&mut self, backend: &dyn Backend, param: usize) -> Result<()> {
        if self.arena.on_host {
            return Ok(());
        }
        let place = self.place_of(param);
        match self.grad_buffer(backend, &place)? {
            Some(buffer) => Ok(device::take_back(backend, buffer.as_mut())?),
            None => Ok(()),
        }
    }

    /// The memory that a region's gradients lie in, made when it is first needed; `None` while a
    /// call has it.
    pub(crate) fn memory_of(
        &mut self,
        place: &Place,
        allocate: impl FnMut(usize) -> Result<Box<dyn Buffer>>,
    ) -> Result<Option<&mut Box<dyn Buffer>>> {
        let region = place.region;
        if let Some(segment) = region.segment {
            let len_bytes = region.numel as usize * place.dtype.len_bytes();
            return self.arena.memory(segment, len_bytes, allocate);
        }
        let storage = &mut self.storages[region.storage];
        let list = storage.spec.list(Role::Grad);
        Ok(list.map(|list| &mut storage.lists[list].buffer))
    }

    /// The memory of a gradient, made by the backend.
    pub(crate) fn grad_buffer(
        &mut self,
        backend: &dyn Backend,
        place: &Place,
    ) -> Result<Option<&mut Box<dyn Buffer>>> {
        self.memory_of(place, |len_bytes| Ok(backend.allocate(len_bytes)?))
    }

    /// Moves sums out of the memory that a view will be written to.
    fn sums_beside(&mut self, place: &Place) -> Result<()> {
        let memory = self.memory_of(place, in_host_memory)?;
        let copied = memory.and_then(|memory| memory.host().map(<[u8]>::to_vec));
        let sums = self.arena.sums_of(place.region, place.dtype, in_host_memory)?;
        if let (Some(copied), Some(sums)) = (copied, sums.host_mut()) {
            let len = copied.len().min(sums.len());
            sums[..len].copy_from_slice(&copied[..len]);
        }
        Ok(())
    }

    /// Bytes that this rank's state holds now: arenas, segments and sums.
    ///
    /// At ZeRO stage 3 these include parameters that were written since the last step. After a step
    /// the number is that of [`crate::Plan::memory_bytes`]. On a device, from ZeRO stage 2 on, it
    /// also has the segments kept for the next step.
    pub fn memory_bytes(&self) -> u64 {
        let lists = self.storages.iter().flat_map(|storage| &storage.lists);
        let lists: usize = lists.map(|list| list.buffer.len_bytes()).sum();
        (lists + self.written.len_bytes()) as u64 + self.arena.held_bytes()
    }

    /// Writes what sums over micro-steps have come to so far back to where a checkpoint had them.
    pub(crate) fn restore_sums(
        &mut self,
        backend: &dyn Backend,
        param: usize,
        bytes: &[u8],
    ) -> Result<()> {
        let place = self.place_of(param);
        if let Some(sums) = &mut self.arena.sums[place.region.index] {
            return Ok(backend.write(sums.as_mut(), place.sums.start, bytes)?);
        }
        let allocate = |len_bytes| Ok(backend.allocate(len_bytes)?);
        if let Some(target) = self.target(param, allocate)? {
            target.bytes.copy_from_slice(bytes);
        }
        Ok(())
    }

    pub(crate) fn sums_so_far(&self, backend: &dyn Backend, param: usize) -> Result<Vec<u8>> {
        let (storage, tensor) = self.places[param];
        let spec = &self.storages[storage].spec;
        let width = sum_width(spec.grad_dtype());
        let zeros = || vec![0; self.params[param].numel() as usize * width];
        if self.arena.given[param] == 0 {
            return Ok(zeros());
        }
        if let Some(sums) = self.arena.sums(spec, backend, param, tensor)? {
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

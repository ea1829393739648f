//! Tensors of a state, as callers read and write them.

use fusestep_coalesce::zeroed_bytes;

use fusestep_launch::{Backend, ListBuffer, Stride};
use fusestep_tensor::{DeviceSliceMut, Element, ParamDesc, Role};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{PlanError, Result};
use crate::plan::settings::Tensors;
use crate::plan::storage::Extent;
use crate::run::masters;
use crate::run::memory::evaluated;
use crate::run::memory::evaluated::Beside;
use crate::run::memory::gradient_view::GradMut;
use crate::run::memory::state::State;
use crate::run::memory::storage::{Held, check_len};

impl State {
    /// A tensor on the host that this rank has whole.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::NoSuchList`], [`PlanError::WrongDType`],
    /// [`PlanError::NotOnHost`], [`PlanError::InShards`].
    pub fn view<T: Element>(&self, role: Role, name: &str) -> Result<&[T]> {
        let (storage, list) = self.list_index(role, name)?;
        self.check_dtype::<T>(&self.storages[storage].lists[list], name)?;
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        let own = &self.storages[storage];
        let bytes = if own.spec.extents[list] == Extent::Segments {
            self.arena.view(&own.spec, param, tensor)
        } else {
            let held = whole(own.spec.held(tensor, list), &self.params[param])?;
            let place = held.place(own.lists[list].stride());
            let bytes = own.lists[list].buffer.host();
            bytes.and_then(|bytes| bytes.get(place))
        };
        let bytes = bytes.ok_or_else(|| self.not_on_host(role, name))?;
        // What has no elements lies nowhere, so not aligned either.
        Ok(if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) })
    }

    /// A tensor on the host that this rank has whole, to be written. At the next step an f32 master
    /// takes over the values of a parameter that it does not round to. Ranks write the same through
    /// it: steps compare what [`State::write`] has written, and [`crate::Run::handshake`] all.
    ///
    /// # Errors
    /// As [`State::view`].
    pub fn view_mut<T: Element>(&mut self, role: Role, name: &str) -> Result<&mut [T]> {
        let (storage, list) = self.list_index(role, name)?;
        self.check_dtype::<T>(&self.storages[storage].lists[list], name)?;
        let error = self.not_on_host(role, name);
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        if role == Role::Param {
            masters::lend_for_writing(self, param);
            self.params_version += 1;
        }
        if role == Role::Grad {
            return Ok(self.grad_mut(name)?.into_mut_slice());
        }
        let own = &mut self.storages[storage];
        let held = whole(own.spec.held(tensor, list), &self.params[param])?;
        let place = held.place(own.lists[list].stride());
        let bytes = own.lists[list].buffer.host_mut();
        let bytes = bytes.and_then(|bytes| bytes.get_mut(place));
        Ok(bytemuck::cast_slice_mut(bytes.ok_or(error)?))
    }

    /// A parameter on the host.
    ///
    /// # Errors
    /// As [`State::view`].
    pub fn param<T: Element>(&self, name: &str) -> Result<&[T]> {
        self.view(Role::Param, name)
    }

    /// A parameter that this rank has whole in device memory, where steps read and update it.
    /// Nothing is copied, and the memory stays there as long as the state.
    ///
    /// What the caller enqueues on it follows the event `ready`. It comes before later steps in the
    /// order of the backend's own stream, such as on that stream. Values are written by
    /// [`State::write`] instead where a master follows them.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`]; [`PlanError::InShards`]; [`PlanError::NotOnDevice`] on a host
    /// backend; [`PlanError::Backend`].
    pub fn param_on_device(
        &mut self,
        backend: &dyn Backend,
        name: &str,
    ) -> Result<DeviceSliceMut<'_>> {
        let (storage, list) = self.list_index(Role::Param, name)?;
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        let error = || PlanError::NotOnDevice { name: name.to_owned() };
        let device = backend.device().ok_or_else(error)?;
        let own = &mut self.storages[storage];
        let held = whole(own.spec.held(tensor, list), &self.params[param])?;
        let place = held.place(own.lists[list].stride());
        let buffer = own.lists[list].buffer.as_mut();
        device.hand_over(buffer)?;
        buffer.device_mut().and_then(|slice| slice.part(place)).ok_or_else(error)
    }

    /// Mutable view of a gradient on the host, in the arena where ranks reduce it and updates read
    /// it. Nothing is copied.
    ///
    /// The gradient counts as given in the micro-step under way. With several micro-steps to an
    /// update, it is added when the micro-step ends. Its elements are zero until written
    /// ([`GradMut`]).
    ///
    /// # Errors
    /// As [`State::view`]; [`PlanError::GradientTwice`] if it was pushed in this micro-step.
    pub fn grad_mut<T: Element>(&mut self, name: &str) -> Result<GradMut<'_, T>> {
        // Nothing is forgotten of a gradient that there is no view of.
        self.grad_values::<T>(name)?;
        let param = self.find(name)?;
        let is_stale = std::mem::take(&mut self.arena.stale[param]);
        Ok(GradMut::new(self.grad_values(name)?, is_stale))
    }

    fn grad_values<T: Element>(&mut self, name: &str) -> Result<&mut [T]> {
        let (storage, list) = self.list_index(Role::Grad, name)?;
        self.check_dtype::<T>(&self.storages[storage].lists[list], name)?;
        let error = self.not_on_host(Role::Grad, name);
        let param = self.find(name)?;
        let bytes = self.grad_view(param)?.ok_or(error)?;
        // What has no elements lies nowhere, so not aligned either.
        Ok(if bytes.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(bytes) })
    }

    /// Copies a whole tensor from the host; of one that is shared out this rank keeps what it has,
    /// and all ranks write the same, or the next step names the tensor. Rank 0 may write parameters
    /// alone that [`crate::Run::broadcast_parameters`] brings to the others. With a parameter goes
    /// its master, where it does not round to the values written.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::NoSuchList`], [`PlanError::LenBytes`],
    /// [`PlanError::Backend`]; [`PlanError::Coalesce`] for memory that cannot be had.
    /// # Cost
    /// A hash of the bytes. At ZeRO stage 3 a parameter is also kept whole in host memory until the
    /// next step, or until [`crate::Run::broadcast_parameters`], which takes it from there.
    pub fn write(
        &mut self,
        backend: &dyn Backend,
        role: Role,
        name: &str,
        bytes: &[u8],
    ) -> Result<()> {
        let (storage, list) = self.list_index(role, name)?;
        let (param, spec) = (self.find(name)?, &self.storages[storage].spec);
        if role == Role::Param && spec.extents[list] == Extent::Shard {
            let len_bytes = self.params[param].numel() as usize * spec.param_dtype().len_bytes();
            check_len(role, name, len_bytes, bytes.len())?;
            self.written.keep(param, bytes)?;
        }
        self.write_all(backend, role, name, bytes)
    }

    /// Writes a tensor as [`State::write`], of values that all ranks have from one place.
    pub(crate) fn write_all(
        &mut self,
        backend: &dyn Backend,
        role: Role,
        name: &str,
        bytes: &[u8],
    ) -> Result<()> {
        let (storage, list) = self.list_index(role, name)?;
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        let stride = self.storages[storage].lists[list].stride();
        let len_bytes = stride.len_bytes(self.params[param].numel() as usize);
        check_len(role, name, len_bytes, bytes.len())?;
        match role {
            Role::Param => {
                masters::follow_write(self, backend, name, bytes)?;
                self.params_version += 1;
            }
            Role::Master => self.masters.awaited[param] = false,
            _ => {}
        }
        let spec = &self.storages[storage].spec;
        if role != Role::Grad && !spec.distributed {
            self.written.note(param, role, spec.extents[list], bytes);
        }
        if role == Role::Grad {
            self.arena.stale[param] = false;
        }
        if role == Role::Grad && self.storages[storage].spec.extents[list] != Extent::Whole {
            return self.write_gradient(backend, param, bytes);
        }
        let own = &mut self.storages[storage];
        for held in own.spec.held(tensor, list) {
            let buffer = own.lists[list].buffer.as_mut();
            let place = held.place(stride);
            backend.write(buffer, place.start, &bytes[held.within(stride)])?;
        }
        Ok(())
    }

    /// Copies a tensor that this rank has whole to the host, wherever the state lies.
    ///
    /// # Errors
    /// As [`State::write`]; [`PlanError::InShards`] if this rank has only a part of it; use
    /// [`crate::Run::gather`] for parameters.
    pub fn read(
        &self,
        backend: &dyn Backend,
        role: Role,
        name: &str,
        bytes: &mut [u8],
    ) -> Result<()> {
        let (storage, list) = self.list_index(role, name)?;
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        let own = &self.storages[storage];
        let stride = own.lists[list].stride();
        let len_bytes = stride.len_bytes(self.params[param].numel() as usize);
        check_len(role, name, len_bytes, bytes.len())?;
        if own.spec.extents[list] == Extent::Segments {
            let view = self.arena.view(&own.spec, param, tensor);
            bytes.copy_from_slice(view.ok_or_else(|| self.not_on_host(role, name))?);
            return Ok(());
        }
        let held = whole(own.spec.held(tensor, list), &self.params[param])?;
        let place = held.place(stride);
        Ok(backend.read(own.lists[list].buffer.as_ref(), place.start, bytes)?)
    }

    /// Copies the ranges of a tensor in this rank's shard to the host.
    pub(crate) fn read_shard(
        &self,
        backend: &dyn Backend,
        role: Role,
        param: usize,
        mut with: impl FnMut(&Held, Vec<u8>),
    ) -> Result<()> {
        let stride = Stride::of(role, self.dtype(role, &self.params[param].name)?);
        for held in self.shard_places(role, param)? {
            let mut bytes = zeroed_bytes(held.place(stride).len())?;
            self.read_held(backend, role, param, &held, &mut bytes)?;
            with(&held, bytes);
        }
        Ok(())
    }

    /// The ranges of a tensor's elements in this rank's shard, and their places in its list.
    pub(crate) fn shard_places(&self, role: Role, param: usize) -> Result<Vec<Held>> {
        let (storage, list) = self.list_index(role, &self.params[param].name)?;
        let (_, tensor) = self.places[param];
        let spec = &self.storages[storage].spec;
        Ok(spec.held_of_shard(tensor, spec.extents[list]).collect())
    }

    /// Copies one of [`State::shard_places`] to the host.
    pub(crate) fn read_held(
        &self,
        backend: &dyn Backend,
        role: Role,
        param: usize,
        held: &Held,
        bytes: &mut [u8],
    ) -> Result<()> {
        let (storage, list) = self.list_index(role, &self.params[param].name)?;
        let list = &self.storages[storage].lists[list];
        let at = held.place(list.stride()).start;
        Ok(backend.read(list.buffer.as_ref(), at, bytes)?)
    }

    fn check_dtype<T: Element>(&self, list: &ListBuffer, name: &str) -> Result<()> {
        if list.dtype() == T::DTYPE {
            return Ok(());
        }
        Err(PlanError::WrongDType {
            role: list.role(),
            name: name.to_owned(),
            expected: list.dtype(),
            found: T::DTYPE,
        })
    }

    pub(crate) fn not_on_host(&self, role: Role, name: &str) -> PlanError {
        PlanError::NotOnHost { role, name: name.to_owned(), backend: self.backend }
    }

    /// Whether ranks have parameters of their own, since they have stepped after their last average
    /// (LocalSGD).
    pub fn is_between_averages(&self) -> bool {
        self.averages_ranks && self.since_average > 0
    }

    /// Whether a model is evaluated with other values than its parameters: a rule of them averages
    /// ([`fusestep_launch::UpdateRule::averaging`]).
    pub fn averages(&self) -> bool {
        (0..self.params.len()).any(|param| evaluated::factor_of(self, param).is_some())
    }

    /// Copies to the host what a model is evaluated with: under a rule that averages
    /// ([`fusestep_launch::UpdateRule::averaging`]) the average, rounded to the parameter's dtype,
    /// under any other the parameter. Nothing is written: training goes on with its bits.
    ///
    /// # Errors
    /// As [`State::read`]; [`PlanError::InShards`] if this rank has only a part of what it takes;
    /// use [`crate::Run::gather_averages`].
    pub fn read_average(&self, backend: &dyn Backend, name: &str, bytes: &mut [u8]) -> Result<()> {
        self.read(backend, Role::Param, name, bytes)?;
        self.average_borrowed(backend, name, bytes)
    }

    /// [`State::read_average`] of a parameter that the caller lends: `bytes` has its values and
    /// takes the average.
    ///
    /// # Errors
    /// As [`State::read_average`]; [`PlanError::LenBytes`].
    pub fn average_borrowed(
        &self,
        backend: &dyn Backend,
        name: &str,
        bytes: &mut [u8],
    ) -> Result<()> {
        let param = self.find(name)?;
        let (dtype, numel) = (self.params[param].dtype, self.params[param].numel() as usize);
        check_len(Role::Param, name, numel * dtype.len_bytes(), bytes.len())?;
        let Some(factor) = evaluated::factor_of(self, param) else {
            return Ok(());
        };
        let roles = self.roles(name)?;
        let beside = Beside::read(|role| {
            if !roles.contains(&role) {
                return Ok(None);
            }
            let dtype = self.dtype(role, name)?;
            let mut own = zeroed_bytes(numel * dtype.len_bytes())?;
            self.read(backend, role, name, &mut own)?;
            Ok(Some((dtype, own)))
        })?;
        beside.average(dtype, factor, bytes);
        Ok(())
    }

    /// Lets the f32 master of a parameter that the caller lends follow the parameter's values,
    /// `bytes`: the master takes over those that it does not round to. To be called before the
    /// first step, and whenever such a parameter was written outside of a step;
    /// without a master it does nothing.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::LenBytes`], [`PlanError::Backend`].
    pub fn follow_borrowed(
        &mut self,
        backend: &dyn Backend,
        name: &str,
        bytes: &[u8],
    ) -> Result<()> {
        if !self.roles(name)?.contains(&Role::Master) {
            return Ok(());
        }
        let param = &self.params[self.find(name)?];
        let dtype = param.dtype;
        let len_bytes = param.numel() as usize * dtype.len_bytes();
        check_len(Role::Param, name, len_bytes, bytes.len())?;
        let mut master = zeroed_bytes(2 * bytes.len())?;
        self.read(backend, Role::Master, name, &mut master)?;
        masters::follow_master(dtype, bytes, &mut master);
        self.write(backend, Role::Master, name, &master)
    }

    /// xxh3 of all parameters' names, types, shapes and values, in the order of their names; `None`
    /// where the caller keeps them.
    ///
    /// # Errors
    /// [`PlanError::Backend`]; [`PlanError::InShards`].
    /// # Cost
    /// One read of the parameters.
    pub fn parameters_xxh3(&self, backend: &dyn Backend) -> Result<Option<String>> {
        if self.tensors.are_borrowed() {
            return Ok(None);
        }
        let mut params: Vec<&ParamDesc> = self.params.iter().collect();
        params.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let mut hasher = Xxh3::new();
        for param in params {
            hasher.update(format!("{}\0{} {}\0", param.name, param.dtype, param.shape).as_bytes());
            let mut bytes = zeroed_bytes(param.numel() as usize * param.dtype.len_bytes())?;
            self.read(backend, Role::Param, &param.name, &mut bytes)?;
            hasher.update(&bytes);
        }
        Ok(Some(format!("{:016x}", hasher.digest())))
    }

    /// Has state files and checkpoints loaded from now on that were saved under other settings
    /// than this state's, as far as the state means the same under both: other decays, momenta,
    /// ε, parameters that are excluded, clipping. Those of this state count then.
    pub fn any_settings(&mut self) {
        self.any_settings = true;
    }

    /// Refuses files of other settings from now on, as at first.
    pub fn same_settings(&mut self) {
        self.any_settings = false;
    }

    /// Whether files of other settings are accepted ([`State::any_settings`]).
    pub fn takes_any_settings(&self) -> bool {
        self.any_settings
    }

    /// A tensor's storage, and its list there.
    pub(crate) fn list_index(&self, role: Role, name: &str) -> Result<(usize, usize)> {
        let (storage, _) = self.places[self.find(name)?];
        let lists = &self.storages[storage].lists;
        let list = lists.iter().position(|list| list.role() == role);
        let list = list.ok_or_else(|| PlanError::NoSuchList {
            role,
            name: name.to_owned(),
            hint: why_no_list(self.tensors, role),
        })?;
        Ok((storage, list))
    }
}

/// Hint that explains why a state has no list of a role.
fn why_no_list(tensors: Tensors, role: Role) -> &'static str {
    match (tensors, role) {
        (Tensors::Borrowed, Role::Param | Role::Grad) | (Tensors::BorrowedWithState, _) => {
            "the caller lends it"
        }
        (_, Role::MaxMoment2) => "only AMSGrad has it",
        (_, Role::Velocity) => "only rules with momentum have it",
        (_, Role::MaxGrad) => "only Adamax has it",
        (_, Role::Sum) => "only Adagrad has it",
        (_, Role::Base) => "only Schedule-Free has it",
        (_, Role::Master | Role::Remainder) => "the plan's precision asks for none",
        (_, units) if units.unit_of().is_some() => "only state in int8 has units",
        _ => "the optimizer has no such state",
    }
}

/// The one range that has a whole tensor.
fn whole(held: Vec<Held>, desc: &ParamDesc) -> Result<Held> {
    let nothing = Held { elements: 0..0, at: 0 };
    let one = held.into_iter().next().unwrap_or(nothing);
    if one.elements == (0..desc.numel()) {
        return Ok(one);
    }
    Err(PlanError::InShards { name: desc.name.clone() })
}

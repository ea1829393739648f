//! The memory that a plan runs on.

use std::collections::HashMap;
use std::sync::Arc;

use fusestep_launch::{Backend, Batch, ListBuffer};
use fusestep_tensor::{DType, Element, ParamDesc, Role};

use crate::group::Classes;
use crate::master::Masters;
use crate::norm::{NormState, Placed};
use crate::storage::StorageState;
use crate::table::Tables;
use crate::update_norms::{UpdateReader, UpdateSlots};
use crate::{Optimizer, Plan, PlanError, Precisions, Tensors};

/// Tensors, step counts and learning rate of one training run, allocated by [`Plan::allocate`].
#[derive(Debug)]
pub struct State {
    pub(crate) plan_hash: u64,
    pub(crate) params: Arc<[ParamDesc]>,
    pub(crate) tensors: Tensors,
    /// The rule at the current learning rate.
    pub(crate) optimizer: Optimizer,
    precisions: Precisions,
    pub(crate) storages: Vec<StorageState>,
    /// For each parameter its storage and its position there.
    pub(crate) places: Vec<(usize, usize)>,
    /// What masters have to follow.
    pub(crate) masters: Masters,
    index: HashMap<String, usize>,
    /// Steps run.
    pub(crate) step: u64,
    /// For each parameter the steps it has missed.
    steps_behind: Vec<u64>,
    /// For each parameter whether the next step leaves it out.
    absent: Vec<bool>,
    pub(crate) absent_count: u64,
    pub(crate) schedule: Schedule,
    pub(crate) tables: Tables,
    pub(crate) poisoned: Option<u64>,
    /// The memory of stage `norm`, if the plan has it.
    pub(crate) norm: Option<NormState>,
    /// Whether the plan scales the loss.
    pub(crate) scaled: bool,
    /// The storage of each stage that updates.
    pub(crate) updated: Vec<usize>,
    /// If updates leave sums over what they change.
    pub(crate) update_reader: Option<UpdateReader>,
    backend: &'static str,
}

/// The batches to run: the plan's own, unless tensors are absent or behind.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) classes: Classes,
    /// One entry for each stage that updates.
    pub(crate) batches: Vec<Vec<Batch>>,
    /// One entry for each storage, if gradients are read before they are used.
    pub(crate) norm: Vec<Vec<Batch>>,
    /// The pattern of absent tensors or missed steps has changed since it was made.
    pub(crate) stale: bool,
}

impl Plan {
    /// Allocates zeroed tensors on `backend`; parameters are zero until written.
    ///
    /// # Errors
    /// [`PlanError::Backend`] if memory cannot be had.
    pub fn allocate(&self, backend: &dyn Backend) -> Result<State, PlanError> {
        let mut storages = Vec::with_capacity(self.storages.len());
        let mut places = vec![(0, 0); self.params.len()];
        for (storage, spec) in self.storages.iter().enumerate() {
            for (position, &member) in spec.members.iter().enumerate() {
                places[member as usize] = (storage, position);
            }
            let Some(&first) = spec.members.first() else {
                continue;
            };
            let kernel = self.kernel_of(first)?;
            let mut lists = Vec::with_capacity(spec.lists.len());
            for &list in &spec.lists {
                // The layout guarantees that the widest element's bytes fit an i64.
                let len_bytes = spec.layout.total_numel() as usize * list.dtype.len_bytes();
                let buffer = backend.allocate(len_bytes)?;
                lists.push(ListBuffer { list, buffer });
            }
            let layout = kernel.argument_layout();
            let mut scalars = vec![0; layout.scalar_bytes];
            kernel.write_scalars(&mut scalars);
            let (members, before) = self.origins_of(spec);
            storages.push(StorageState {
                kernel,
                members,
                before,
                offsets: spec.layout.offsets().to_vec(),
                params: spec.members.clone(),
                lists,
                scalars,
                sets: vec![0; layout.set_bytes * self.classes.classes.len()],
                update_slots: match self.update_norms {
                    true => Some(UpdateSlots::allocate(spec, backend)?),
                    false => None,
                },
            });
        }
        let names = self.params.iter().enumerate();
        Ok(State {
            plan_hash: self.hash,
            params: Arc::clone(&self.params),
            tensors: self.tensors,
            optimizer: self.optimizer,
            precisions: self.precisions.clone(),
            storages,
            places,
            masters: Masters::new(self),
            index: names.map(|(i, param)| (param.name.clone(), i)).collect(),
            step: 0,
            steps_behind: vec![0; self.params.len()],
            absent: vec![false; self.params.len()],
            absent_count: 0,
            schedule: Schedule {
                classes: self.classes.clone(),
                batches: self.optimize_stages().map(|s| s.batches.clone()).collect(),
                norm: self.norm_stage().map_or(Vec::new(), |norm| {
                    norm.reads.iter().map(|read| read.batches.clone()).collect()
                }),
                stale: false,
            },
            tables: Tables::of(self),
            poisoned: None,
            norm: NormState::allocate(self, backend)?,
            scaled: self.gradients.loss_scale.is_some(),
            updated: self.optimize_stages().map(|stage| stage.storage).collect(),
            update_reader: UpdateReader::of(self),
            backend: backend.name(),
        })
    }
}

impl State {
    /// Steps run so far, as far as [`State::settle`] has read.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Steps that this parameter has taken: fewer than [`State::step`] if it was absent.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`].
    pub fn step_of(&self, name: &str) -> Result<u64, PlanError> {
        Ok(self.step - self.steps_behind[self.find(name)?])
    }

    /// Sets the steps run so far, for all parameters: what resuming from a file does.
    pub fn set_step(&mut self, step: u64) {
        self.tables.supersede();
        self.step = step;
        self.steps_behind.fill(0);
        self.schedule.stale = true;
    }

    /// Sets the steps that one parameter has taken.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`]; [`PlanError::StepAhead`] if it exceeds [`State::step`].
    pub fn set_step_of(&mut self, name: &str, step: u64) -> Result<(), PlanError> {
        let param = self.find(name)?;
        let behind = self
            .step
            .checked_sub(step)
            .ok_or_else(|| PlanError::StepAhead {
                name: name.to_owned(),
                expected: self.step,
                found: step,
            })?;
        self.schedule.stale |= self.steps_behind[param] != behind;
        self.steps_behind[param] = behind;
        Ok(())
    }

    /// The learning rate of the next step.
    pub fn lr(&self) -> f64 {
        self.optimizer.lr()
    }

    /// Sets the learning rate from the next step on.
    ///
    /// # Errors
    /// The optimizer's error if `lr` is negative or not finite; the old one stays.
    pub fn set_lr(&mut self, lr: f64) -> Result<(), PlanError> {
        let optimizer = self.optimizer.with_lr(lr);
        optimizer.validate()?;
        self.optimizer = optimizer;
        Ok(())
    }

    /// The rule, at the current learning rate.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Changes the rule's hyper-parameters from the next step on.
    ///
    /// # Errors
    /// The optimizer's error for a value out of range; [`PlanError::OtherLists`] if the rule keeps other tensors. The old rule
    /// stays then.
    pub fn set_optimizer(&mut self, optimizer: Optimizer) -> Result<(), PlanError> {
        optimizer.validate()?;
        let mut kernels = Vec::with_capacity(self.storages.len());
        for (index, storage) in self.storages.iter().enumerate() {
            let member = self.places.iter().position(|place| place.0 == index);
            let Some(member) = member else {
                continue;
            };
            let kernel = optimizer.kernel(&self.params[member], &self.precisions)?;
            let (expected, found) = (storage.kernel.lists(), kernel.lists());
            if expected != found {
                return Err(PlanError::OtherLists {
                    expected: crate::stage::role_names(expected),
                    found: crate::stage::role_names(found),
                });
            }
            kernels.push(kernel);
        }
        for (storage, kernel) in self.storages.iter_mut().zip(kernels) {
            kernel.write_scalars(&mut storage.scalars);
            storage.kernel = kernel;
        }
        self.schedule.stale = true;
        self.optimizer = optimizer;
        Ok(())
    }

    /// Leaves a parameter out of the next step: it has no gradient. It, its state and its step stay as they are.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`].
    pub fn set_absent(&mut self, name: &str) -> Result<(), PlanError> {
        let param = self.find(name)?;
        self.set_absent_at(param);
        Ok(())
    }

    /// [`State::set_absent`] by the parameter's position in the plan.
    ///
    /// # Panics
    /// If the plan has no such parameter.
    pub fn set_absent_at(&mut self, param: usize) {
        if !self.absent[param] {
            self.absent[param] = true;
            self.absent_count += 1;
            self.schedule.stale = true;
        }
    }

    /// A tensor on the host.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::NoSuchList`], [`PlanError::WrongDType`], [`PlanError::NotOnHost`].
    pub fn view<T: Element>(&self, role: Role, name: &str) -> Result<&[T], PlanError> {
        let (list, range) = self.locate(role, name)?;
        self.check_dtype::<T>(list, name)?;
        let bytes = list.buffer.host().and_then(|bytes| bytes.get(range));
        let bytes = bytes.ok_or_else(|| self.not_on_host(role, name))?;
        Ok(bytemuck::cast_slice(bytes))
    }

    /// A tensor on the host, to be written. At the next step an f32 master takes over the values of a parameter that it does not
    /// round to.
    ///
    /// # Errors
    /// As [`State::view`].
    pub fn view_mut<T: Element>(&mut self, role: Role, name: &str) -> Result<&mut [T], PlanError> {
        let (list, range) = self.locate(role, name)?;
        self.check_dtype::<T>(list, name)?;
        let error = self.not_on_host(role, name);
        if role == Role::Param {
            self.lend_for_writing(self.find(name)?);
        }
        let (storage, list) = self.list_index(role, name)?;
        let buffer = &mut self.storages[storage].lists[list].buffer;
        let bytes = buffer.host_mut().and_then(|bytes| bytes.get_mut(range));
        Ok(bytemuck::cast_slice_mut(bytes.ok_or(error)?))
    }

    /// A parameter on the host.
    ///
    /// # Errors
    /// As [`State::view`].
    pub fn param<T: Element>(&self, name: &str) -> Result<&[T], PlanError> {
        self.view(Role::Param, name)
    }

    /// A gradient on the host, to be written: a view into the coalesced buffer, no copy.
    ///
    /// # Errors
    /// As [`State::view`].
    pub fn grad_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T], PlanError> {
        self.view_mut(Role::Grad, name)
    }

    /// Copies a tensor from the host, wherever the state lies. With a parameter goes its master, where it does not round to the
    /// values written.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::NoSuchList`], [`PlanError::LenBytes`], [`PlanError::Backend`].
    pub fn write(
        &mut self,
        backend: &dyn Backend,
        role: Role,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        let (_, range) = self.locate(role, name)?;
        check_len(role, name, range.len(), bytes.len())?;
        self.before_write(backend, role, name, bytes)?;
        let (storage, list) = self.list_index(role, name)?;
        let buffer = self.storages[storage].lists[list].buffer.as_mut();
        Ok(backend.write(buffer, range.start, bytes)?)
    }

    /// Copies a tensor to the host, wherever the state lies.
    ///
    /// # Errors
    /// As [`State::write`].
    pub fn read(
        &self,
        backend: &dyn Backend,
        role: Role,
        name: &str,
        bytes: &mut [u8],
    ) -> Result<(), PlanError> {
        let (list, range) = self.locate(role, name)?;
        check_len(role, name, range.len(), bytes.len())?;
        Ok(backend.read(list.buffer.as_ref(), range.start, bytes)?)
    }

    /// Roles that the state keeps for a parameter.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`].
    pub fn roles(&self, name: &str) -> Result<Vec<Role>, PlanError> {
        let (storage, _) = self.places[self.find(name)?];
        let lists = self.storages[storage].lists.iter();
        Ok(lists.map(ListBuffer::role).collect())
    }

    /// The storage type of a tensor.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::NoSuchList`].
    pub fn dtype(&self, role: Role, name: &str) -> Result<DType, PlanError> {
        let (storage, list) = self.list_index(role, name)?;
        Ok(self.storages[storage].lists[list].dtype())
    }

    /// Makes the batches anew if the pattern of absent tensors or missed steps has changed.
    pub(crate) fn refresh(&mut self, plan: &Plan) -> Result<(), PlanError> {
        if !self.schedule.stale {
            return Ok(());
        }
        let classes = Classes::new(&self.params, |param| self.steps_behind[param]);
        let mut batches = Vec::with_capacity(plan.stages.len());
        for stage in plan.optimize_stages() {
            let members = &plan.storages[stage.storage].members;
            let present = |&tensor: &u32| !self.absent[members[tensor as usize] as usize];
            let tensors: Vec<u32> = stage.tensors.iter().copied().filter(present).collect();
            batches.push(plan.batches(stage.storage, &tensors, &classes)?);
        }
        for storage in &mut self.storages {
            let set_bytes = storage.kernel.argument_layout().set_bytes;
            storage.sets.resize(set_bytes * classes.classes.len(), 0);
        }
        let mut norm = Vec::new();
        // Without the stage others read the gradients: those of shards are summed across ranks.
        if let (Some(state), Some(_)) = (&mut self.norm, plan.norm_stage()) {
            for storage in 0..plan.storages.len() {
                norm.push(plan.norm_batches(storage, |param| !self.absent[param])?);
            }
            state.placed = Placed::No;
        }
        self.schedule = Schedule {
            classes,
            batches,
            norm,
            stale: false,
        };
        Ok(())
    }

    /// Counts a step that has been run.
    pub(crate) fn advance(&mut self) {
        self.step += 1;
        if self.absent_count > 0 {
            for (behind, absent) in self.steps_behind.iter_mut().zip(&mut self.absent) {
                *behind += u64::from(std::mem::take(absent));
            }
            self.absent_count = 0;
            self.schedule.stale = true;
        }
    }

    /// After a skipped step nobody has missed anything.
    pub(crate) fn forget_absent(&mut self) {
        if self.absent_count > 0 {
            self.absent.fill(false);
            self.absent_count = 0;
            self.schedule.stale = true;
        }
    }

    pub(crate) fn find(&self, name: &str) -> Result<usize, PlanError> {
        let found = self.index.get(name).copied();
        found.ok_or_else(|| PlanError::UnknownName {
            name: name.to_owned(),
            parameters: self.params.len(),
        })
    }

    fn list_index(&self, role: Role, name: &str) -> Result<(usize, usize), PlanError> {
        let (storage, _) = self.places[self.find(name)?];
        let lists = &self.storages[storage].lists;
        let list = lists.iter().position(|list| list.role() == role);
        let hint = match (self.tensors, role) {
            (Tensors::Lent, Role::Param | Role::Grad) => "the caller lends it",
            (_, Role::MaxMoment2) => "only AMSGrad has it",
            (_, Role::Velocity) => "only SGD with momentum has it",
            (_, Role::Sum) => "only Adagrad has it",
            (_, Role::Master | Role::Remainder) => "the plan's precision asks for none",
            _ => "the optimizer has no such state",
        };
        let list = list.ok_or_else(|| PlanError::NoSuchList {
            role,
            name: name.to_owned(),
            hint,
        })?;
        Ok((storage, list))
    }

    /// A tensor's list and its bytes there.
    fn locate(
        &self,
        role: Role,
        name: &str,
    ) -> Result<(&ListBuffer, std::ops::Range<usize>), PlanError> {
        let param = self.find(name)?;
        let (storage, list) = self.list_index(role, name)?;
        let (_, position) = self.places[param];
        let storage = &self.storages[storage];
        let list = &storage.lists[list];
        let width = list.dtype().len_bytes();
        let start = storage.offsets[position] as usize * width;
        let len_bytes = self.params[param].numel() as usize * width;
        Ok((list, start..start + len_bytes))
    }

    fn check_dtype<T: Element>(&self, list: &ListBuffer, name: &str) -> Result<(), PlanError> {
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

    fn not_on_host(&self, role: Role, name: &str) -> PlanError {
        PlanError::NotOnHost {
            role,
            name: name.to_owned(),
            backend: self.backend,
        }
    }
}

pub(crate) fn check_len(
    role: Role,
    name: &str,
    expected: usize,
    found: usize,
) -> Result<(), PlanError> {
    if expected == found {
        return Ok(());
    }
    Err(PlanError::LenBytes {
        role,
        name: name.to_owned(),
        expected,
        found,
    })
}

//! The memory that a plan runs on.

use std::collections::HashMap;
use std::sync::Arc;

use fusestep_coalesce::HostMemory;
use fusestep_collective::Communicator;
use fusestep_launch::{Backend, Batch, Buffer, ListBuffer, MAX_SUMS};
use fusestep_tensor::{DType, Element, ParamDesc, Role};

use crate::average::Adapting;
use crate::exchange::Exchange;
use crate::gradients::GradientArena;
use crate::group::Classes;
use crate::master::Masters;
use crate::norm::{NormState, Placed};
use crate::stage::Extent;
use crate::storage::{Held, StorageState};
use crate::table::Tables;
use crate::update_norms::{UpdateReader, UpdateSlots};
use crate::{Optimizer, Plan, PlanError, Precisions, Tensors};

/// Tensors, step counts, gradients and learning rate of one rank of a training run, allocated by [`Plan::allocate`].
#[derive(Debug)]
pub struct State {
    pub(crate) plan_hash: u64,
    pub(crate) params: Arc<[ParamDesc]>,
    pub(crate) tensors: Tensors,
    /// The rules at their current learning rates.
    pub(crate) rules: Vec<Optimizer>,
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
    pub(crate) steps_behind: Vec<u64>,
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
    /// Gradients that micro-steps add and ranks reduce.
    pub(crate) arena: GradientArena,
    /// Sums that ranks tell each other.
    pub(crate) exchange: Exchange,
    /// Steps since parameters were averaged across ranks.
    pub(crate) since_average: u64,
    pub(crate) adapting: Adapting,
    /// How often parameters have been changed.
    pub(crate) params_version: u64,
    backend: &'static str,
}

/// The batches to run: the plan's own, unless tensors are absent or behind.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) classes: Classes,
    /// One entry for each stage that updates.
    pub(crate) batches: Vec<Vec<Batch>>,
    /// One entry for each read of stage `norm`.
    pub(crate) norm: Vec<Vec<Batch>>,
    /// The pattern of absent tensors or missed steps has changed since it was made.
    pub(crate) stale: bool,
}

/// Who gives memory for what ranks move.
pub(crate) enum Allocator<'a> {
    /// The backend, for everything.
    Backend(&'a dyn Backend),
    /// The communicator, so that ranks see it.
    Communicator(&'a dyn Backend, &'a mut dyn Communicator),
}

impl Allocator<'_> {
    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Allocator::Backend(backend) | Allocator::Communicator(backend, _) => *backend,
        }
    }

    /// Memory of an arena that calls move, or one that they do not.
    pub(crate) fn arena(
        &mut self,
        len_bytes: usize,
        moves: bool,
    ) -> Result<Box<dyn Buffer>, PlanError> {
        match self {
            Allocator::Communicator(backend, comm) if moves && backend.takes_host_memory() => {
                let memory: HostMemory = comm.allocate(len_bytes)?;
                Ok(Box::new(memory))
            }
            Allocator::Backend(backend) | Allocator::Communicator(backend, _) => {
                Ok(backend.allocate(len_bytes)?)
            }
        }
    }
}

impl Plan {
    /// Allocates zeroed tensors on `backend`; parameters are zero until written.
    ///
    /// # Errors
    /// [`PlanError::Backend`] if memory cannot be had, or the backend cannot do what a stage needs.
    pub fn allocate(&self, backend: &dyn Backend) -> Result<State, PlanError> {
        self.allocate_from(Allocator::Backend(backend))
    }

    /// [`Plan::allocate`], with arenas that calls move from the communicator: ranks of one machine then see each other's, and nothing
    /// is copied on the way.
    ///
    /// # Errors
    /// As [`Plan::allocate`]; [`PlanError::Collective`] if the communicator has not so much memory.
    pub fn allocate_on(
        &self,
        backend: &dyn Backend,
        comm: &mut dyn Communicator,
    ) -> Result<State, PlanError> {
        self.allocate_from(Allocator::Communicator(backend, comm))
    }

    fn allocate_from(&self, mut allocator: Allocator<'_>) -> Result<State, PlanError> {
        self.check_backend(allocator.backend())?;
        let mut storages = Vec::with_capacity(self.storages.len());
        for spec in &self.storages {
            let Some(&first) = spec.members.first() else {
                continue;
            };
            let kernel = self.kernel_of(first)?;
            let mut lists = Vec::with_capacity(spec.lists.len());
            for (index, &list) in spec.lists.iter().enumerate() {
                // The layout guarantees that the widest element's bytes fit an i64.
                let len_bytes = match spec.extents[index] {
                    Extent::Segments => 0,
                    _ => spec.list_numel(index) as usize * list.dtype.len_bytes(),
                };
                let moves = self.topology.world > 1 && spec.extents[index] == Extent::Whole;
                let buffer = allocator.arena(len_bytes, moves)?;
                lists.push(ListBuffer { list, buffer });
            }
            let layout = kernel.argument_layout();
            let mut scalars = vec![0; layout.scalar_bytes];
            kernel.write_scalars(&mut scalars);
            let summed = self.reduces() && kernel.normed().is_some();
            storages.push(StorageState {
                tensor_sums: summed.then(|| vec![[0.0; MAX_SUMS]; spec.members.len()]),
                kernel,
                spec: spec.clone(),
                lists,
                firsts: Vec::new(),
                scalars,
                sets: vec![0; layout.set_bytes * self.classes.classes.len()],
                update_slots: if self.update_norms {
                    Some(UpdateSlots::allocate(spec, allocator.backend())?)
                } else {
                    None
                },
            });
        }
        let arena = GradientArena::allocate(self, &mut allocator)?;
        let backend = allocator.backend();
        let names = self.params.iter().enumerate();
        Ok(State {
            plan_hash: self.hash,
            params: Arc::clone(&self.params),
            tensors: self.tensors,
            rules: self.rules.clone(),
            precisions: self.precisions.clone(),
            storages,
            places: self.places.clone(),
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
            arena,
            exchange: Exchange::of(self)?,
            since_average: 0,
            adapting: Adapting::default(),
            params_version: 0,
            backend: backend.name(),
        })
    }

    /// Refuses a backend that cannot run a stage of the plan.
    fn check_backend(&self, backend: &dyn Backend) -> Result<(), PlanError> {
        let in_host_memory = |stage: &crate::Stage| {
            matches!(stage, crate::Stage::Trust | crate::Stage::ReduceUpdate(_))
        };
        if backend.takes_host_memory() || !self.stages.iter().any(in_host_memory) {
            return Ok(());
        }
        Err(PlanError::Conflict {
            first: format!("backend {}", backend.name()),
            second: "a rule with sums over tensors, or fuse_reduce_into_update, on several ranks"
                .to_owned(),
            why: "do not go together, since ranks work on parts of tensors in host memory",
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

    /// The learning rate of the next step, of parameters without a rule of their own.
    pub fn lr(&self) -> f64 {
        self.rules[0].lr()
    }

    /// Sets the learning rate from the next step on, of parameters without a rule of their own.
    ///
    /// # Errors
    /// The optimizer's error if `lr` is negative or not finite; the old one stays.
    pub fn set_lr(&mut self, lr: f64) -> Result<(), PlanError> {
        self.set_lr_of(0, lr)
    }

    /// Sets the learning rate of one of the plan's rules ([`crate::Planner::group`]), which are numbered in the order they were given;
    /// 0 is that of all other parameters.
    ///
    /// # Errors
    /// As [`State::set_lr`]; [`PlanError::UnknownRule`].
    pub fn set_lr_of(&mut self, rule: usize, lr: f64) -> Result<(), PlanError> {
        let count = self.rules.len();
        let own = self.rules.get_mut(rule);
        let own = own.ok_or(PlanError::UnknownRule { rule, count })?;
        let optimizer = own.with_lr(lr);
        optimizer.validate()?;
        *own = optimizer;
        Ok(())
    }

    /// The rule of parameters without one of their own, at the current learning rate.
    pub fn optimizer(&self) -> &Optimizer {
        &self.rules[0]
    }

    /// All rules, at their current learning rates.
    pub fn rules(&self) -> &[Optimizer] {
        &self.rules
    }

    /// Changes the hyper-parameters of parameters without a rule of their own, from the next step on.
    ///
    /// # Errors
    /// The optimizer's error for a value out of range; [`PlanError::OtherLists`] if the rule keeps other tensors,
    /// [`PlanError::OtherRule`] if its kernel takes other scalars. The old rule stays then.
    pub fn set_optimizer(&mut self, optimizer: Optimizer) -> Result<(), PlanError> {
        optimizer.validate()?;
        let mut kernels = Vec::with_capacity(self.storages.len());
        for (index, storage) in self.storages.iter().enumerate() {
            if storage.spec.rule != 0 {
                continue;
            }
            let Some(&member) = storage.spec.members.first() else {
                continue;
            };
            let kernel = optimizer.kernel(&self.params[member as usize], &self.precisions)?;
            let (expected, found) = (storage.kernel.lists(), kernel.lists());
            if expected != found {
                return Err(PlanError::OtherLists {
                    expected: crate::stage::role_names(expected),
                    found: crate::stage::role_names(found),
                });
            }
            // Batches and workspaces were made for the kernel's argument layout and for whether it takes sums.
            let fits = storage.kernel.argument_layout() == kernel.argument_layout()
                && storage.kernel.normed().is_some() == kernel.normed().is_some();
            if !fits {
                return Err(PlanError::OtherRule {
                    expected: self.rules[0].name(),
                    found: optimizer.name(),
                });
            }
            kernels.push((index, kernel));
        }
        for (index, kernel) in kernels {
            let storage = &mut self.storages[index];
            kernel.write_scalars(&mut storage.scalars);
            storage.kernel = kernel;
        }
        self.schedule.stale = true;
        self.rules[0] = optimizer;
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

    /// A tensor on the host that this rank has whole.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::NoSuchList`], [`PlanError::WrongDType`], [`PlanError::NotOnHost`],
    /// [`PlanError::InShards`].
    pub fn view<T: Element>(&self, role: Role, name: &str) -> Result<&[T], PlanError> {
        let (storage, list) = self.list_index(role, name)?;
        self.check_dtype::<T>(&self.storages[storage].lists[list], name)?;
        let (_, tensor) = self.places[self.find(name)?];
        let own = &self.storages[storage];
        let bytes = if own.spec.extents[list] == Extent::Segments {
            self.arena.view(&own.spec, storage, tensor)
        } else {
            let held = whole(own.spec.held(tensor, list), &self.params[self.find(name)?])?;
            let place = held.place(size_of::<T>());
            let bytes = own.lists[list].buffer.host();
            bytes.and_then(|bytes| bytes.get(place))
        };
        let bytes = bytes.ok_or_else(|| self.not_on_host(role, name))?;
        Ok(bytemuck::cast_slice(bytes))
    }

    /// A tensor on the host that this rank has whole, to be written. At the next step an f32 master takes over the values of a parameter
    /// that it does not round to.
    ///
    /// # Errors
    /// As [`State::view`].
    pub fn view_mut<T: Element>(&mut self, role: Role, name: &str) -> Result<&mut [T], PlanError> {
        let (storage, list) = self.list_index(role, name)?;
        self.check_dtype::<T>(&self.storages[storage].lists[list], name)?;
        let error = self.not_on_host(role, name);
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        if role == Role::Param {
            self.lend_for_writing(param);
            self.params_version += 1;
        }
        if role == Role::Grad {
            return Ok(bytemuck::cast_slice_mut(
                self.grad_view(param)?.ok_or(error)?,
            ));
        }
        let own = &mut self.storages[storage];
        let held = whole(own.spec.held(tensor, list), &self.params[param])?;
        let bytes = own.lists[list].buffer.host_mut();
        let bytes = bytes.and_then(|bytes| bytes.get_mut(held.place(size_of::<T>())));
        Ok(bytemuck::cast_slice_mut(bytes.ok_or(error)?))
    }

    /// A parameter on the host.
    ///
    /// # Errors
    /// As [`State::view`].
    pub fn param<T: Element>(&self, name: &str) -> Result<&[T], PlanError> {
        self.view(Role::Param, name)
    }

    /// A gradient on the host, to be written: a view into the arena that ranks reduce and updates read, no copy. It counts as given in
    /// the micro-step under way. With several micro-steps to an update it is that of the micro-step, and added when that ends.
    ///
    /// # Errors
    /// As [`State::view`]; [`PlanError::GradientTwice`] if it was pushed in this micro-step.
    pub fn grad_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T], PlanError> {
        self.view_mut(Role::Grad, name)
    }

    /// Copies a whole tensor from the host; of one that is shared out this rank keeps what it has, and all ranks write the same. With a
    /// parameter goes its master, where it does not round to the values written.
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
        let (storage, list) = self.list_index(role, name)?;
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        let width = self.storages[storage].lists[list].dtype().len_bytes();
        let len_bytes = self.params[param].numel() as usize * width;
        check_len(role, name, len_bytes, bytes.len())?;
        self.before_write(backend, role, name, bytes)?;
        if role == Role::Param {
            self.params_version += 1;
        }
        if role == Role::Grad && self.storages[storage].spec.extents[list] != Extent::Whole {
            return self.write_gradient(backend, param, bytes);
        }
        let own = &mut self.storages[storage];
        for held in own.spec.held(tensor, list) {
            let buffer = own.lists[list].buffer.as_mut();
            let place = held.place(width);
            backend.write(buffer, place.start, &bytes[held.within(width)])?;
        }
        Ok(())
    }

    /// Copies a tensor that this rank has whole to the host, wherever the state lies.
    ///
    /// # Errors
    /// As [`State::write`]; [`PlanError::InShards`] if this rank has only a part of it; use [`crate::Plan::gather`] for parameters.
    pub fn read(
        &self,
        backend: &dyn Backend,
        role: Role,
        name: &str,
        bytes: &mut [u8],
    ) -> Result<(), PlanError> {
        let (storage, list) = self.list_index(role, name)?;
        let param = self.find(name)?;
        let (_, tensor) = self.places[param];
        let own = &self.storages[storage];
        let width = own.lists[list].dtype().len_bytes();
        let len_bytes = self.params[param].numel() as usize * width;
        check_len(role, name, len_bytes, bytes.len())?;
        if own.spec.extents[list] == Extent::Segments {
            let view = self.arena.view(&own.spec, storage, tensor);
            bytes.copy_from_slice(view.ok_or_else(|| self.not_on_host(role, name))?);
            return Ok(());
        }
        let held = whole(own.spec.held(tensor, list), &self.params[param])?;
        let place = held.place(width);
        Ok(backend.read(own.lists[list].buffer.as_ref(), place.start, bytes)?)
    }

    /// Copies what this rank's shard has of a tensor to the host, one call of `with` for each range of its elements.
    pub(crate) fn read_shard(
        &self,
        backend: &dyn Backend,
        role: Role,
        param: usize,
        mut with: impl FnMut(&Held, Vec<u8>),
    ) -> Result<(), PlanError> {
        let (storage, list) = self.list_index(role, &self.params[param].name)?;
        let (_, tensor) = self.places[param];
        let own = &self.storages[storage];
        let width = own.lists[list].dtype().len_bytes();
        let start = own.spec.layout.offset(tensor);
        for held in own.spec.held_of_shard(tensor) {
            // The same elements lie elsewhere in a list that this rank has whole.
            let at = match own.spec.extents[list] {
                Extent::Shard => held.at,
                _ => start + held.elements.start,
            };
            let placed = Held {
                elements: held.elements,
                at,
            };
            let place = placed.place(width);
            let mut bytes = vec![0; place.len()];
            backend.read(own.lists[list].buffer.as_ref(), place.start, &mut bytes)?;
            with(&placed, bytes);
        }
        Ok(())
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
            batches.push(plan.batches(stage, |param| !self.absent[param], &classes)?);
        }
        for storage in &mut self.storages {
            let set_bytes = storage.kernel.argument_layout().set_bytes;
            storage.sets.resize(set_bytes * classes.classes.len(), 0);
        }
        let mut norm = Vec::new();
        if let (Some(state), Some(stage)) = (&mut self.norm, plan.norm_stage()) {
            for read in &stage.reads {
                norm.push(plan.norm_batches(read, |param| !self.absent[param])?);
            }
            state.placed = Placed::No;
        }
        let absent = &self.absent;
        self.exchange
            .refresh(plan, |param| !absent[param], &classes)?;
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

    pub(crate) fn list_index(&self, role: Role, name: &str) -> Result<(usize, usize), PlanError> {
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

/// The one range that has a whole tensor.
fn whole(held: Vec<Held>, desc: &ParamDesc) -> Result<Held, PlanError> {
    let nothing = Held {
        elements: 0..0,
        at: 0,
    };
    let one = held.into_iter().next().unwrap_or(nothing);
    if one.elements == (0..desc.numel()) {
        return Ok(one);
    }
    Err(PlanError::InShards {
        name: desc.name.clone(),
    })
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

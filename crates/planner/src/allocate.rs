//! From a plan to its memory.

use std::sync::Arc;

use fusestep_coalesce::HostMemory;
use fusestep_collective::Communicator;
use fusestep_launch::{Backend, Buffer, ListBuffer, MAX_SUMS};

use crate::arena::GradientArena;
use crate::average::Adapting;
use crate::device_norm::DeviceNorm;
use crate::device_trust::DeviceTrust;
use crate::exchange::Exchange;
use crate::in_backward::InBackward;
use crate::master::Masters;
use crate::norm::NormState;
use crate::stage::Extent;
use crate::state::Schedule;
use crate::storage::StorageState;
use crate::table::Tables;
use crate::update_norms::{UpdateReader, UpdateSlots};
use crate::{Plan, PlanError, State};

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

    /// [`Plan::allocate`], with arenas that calls move from the communicator: ranks of one machine
    /// then see each other's, and nothing is copied on the way.
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
        let storages = self.allocate_storages(&mut allocator)?;
        let arena = GradientArena::allocate(self, &mut allocator)?;
        let backend = allocator.backend();
        let names = self.params.iter().enumerate();
        let mut exchange = Exchange::of(self)?;
        exchange.norm_on_device = DeviceNorm::of(self, &exchange, backend)?;
        exchange.trust_on_device = DeviceTrust::of(self, backend)?;
        Ok(State {
            plan_hash: self.hash,
            params: Arc::clone(&self.params),
            tensors: self.tensors,
            rules: self.rules.clone(),
            lr_schedule: self.schedule.clone(),
            precisions: self.precisions.clone(),
            storages,
            places: self.places.clone(),
            masters: Masters::new(self),
            index: names.map(|(i, param)| (param.name.clone(), i)).collect(),
            step: 0,
            steps_behind: vec![0; self.params.len()],
            without_gradient: vec![false; self.params.len()],
            without_gradient_count: 0,
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
            exchange,
            in_backward: InBackward::of(self),
            since_average: 0,
            adapting: Adapting::default(),
            params_version: 0,
            backend: backend.name(),
        })
    }

    /// The arenas of all lists.
    fn allocate_storages(
        &self,
        allocator: &mut Allocator<'_>,
    ) -> Result<Vec<StorageState>, PlanError> {
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
        Ok(storages)
    }

    /// Refuses a backend that cannot run a stage of the plan.
    fn check_backend(&self, backend: &dyn Backend) -> Result<(), PlanError> {
        let fused = |stage: &crate::Stage| matches!(stage, crate::Stage::ReduceUpdate(_));
        if backend.takes_host_memory() || !self.stages.iter().any(fused) {
            return Ok(());
        }
        Err(PlanError::Conflict {
            first: format!("backend {}", backend.name()),
            second: "fuse_reduce_into_update".to_owned(),
            why: "do not go together, since ranks read each other's gradients in host memory; \
                  reduce them first",
        })
    }
}

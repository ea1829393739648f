//! Allocation of a plan's memory.

use std::sync::Arc;

use fusestep_collective::Communicator;
use fusestep_launch::{Backend, ListBuffer, MAX_SUMS};
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::saved_settings::saved_settings;
use crate::plan::storage::Extent;
use crate::plan::value::Plan;
use crate::run::clock::Clock;
use crate::run::memory::adapting::Adapting;
use crate::run::memory::allocator::Allocator;
use crate::run::memory::device_sums::DeviceTrust;
use crate::run::memory::exchange::{DeviceNorm, Exchange};
use crate::run::memory::gradients::GradientArena;
use crate::run::memory::masters::Masters;
use crate::run::memory::norm::NormState;
use crate::run::memory::state::{Schedule, State};
use crate::run::memory::storage::StorageState;
use crate::run::memory::tables::Tables;
use crate::run::memory::units::InBackward;
use crate::run::memory::update_sums::{UpdateReader, UpdateRows};
use crate::run::memory::written::Written;

impl Plan {
    /// Allocates zeroed tensors on `backend`; parameters are zero until written.
    ///
    /// # Errors
    /// [`PlanError::Backend`] if memory cannot be had, or the backend cannot do what a stage needs.
    pub fn allocate(&self, backend: &dyn Backend) -> Result<State> {
        allocate_from(self, backend, None)
    }

    /// Allocates as [`Plan::allocate`], with the communicator's memory for arenas that calls move.
    ///
    /// Ranks of one machine then see each other's arenas, and their calls need no copies.
    ///
    /// # Errors
    /// As [`Plan::allocate`]; [`PlanError::Collective`] if the communicator has not so much memory.
    pub fn allocate_on(&self, backend: &dyn Backend, comm: &mut dyn Communicator) -> Result<State> {
        allocate_from(self, backend, Some(comm))
    }
}

/// Implementation of [`Plan::allocate`] and [`Plan::allocate_on`].
fn allocate_from<'a>(
    plan: &Plan,
    backend: &'a dyn Backend,
    comm: Option<&'a mut dyn Communicator>,
) -> Result<State> {
    check_backend(plan, backend)?;
    let mut allocator = Allocator { backend, comm };
    let storages = allocate_storages(plan, &mut allocator)?;
    let arena = GradientArena::allocate(plan, &mut allocator)?;
    let names = plan.params.iter().enumerate();
    let mut exchange = Exchange::of(plan)?;
    exchange.norm_on_device = DeviceNorm::of(plan, &exchange, backend)?;
    exchange.trust_on_device = DeviceTrust::of(plan, backend)?;
    Ok(State {
        plan_hash: plan.hash,
        params: Arc::clone(&plan.params),
        tensors: plan.tensors,
        rules: plan.rules.clone(),
        built: plan.rules.clone(),
        settings: saved_settings(plan),
        any_settings: false,
        averages_ranks: plan.averaging().is_some(),
        rules_hash: None,
        lr_schedule: plan.schedule.clone(),
        precisions: plan.precisions.clone(),
        storages,
        places: plan.places.clone(),
        masters: Masters::new(plan),
        index: names.map(|(i, param)| (param.name.clone(), i)).collect(),
        step: 0,
        steps_behind: vec![0; plan.params.len()],
        without_gradient: vec![false; plan.params.len()],
        without_gradient_count: 0,
        schedule: Schedule {
            groups: plan.groups.clone(),
            batches: plan.optimize_stages().map(|s| s.batches.clone()).collect(),
            norm: plan.norm_stage().map_or(Vec::new(), |norm| {
                norm.reads.iter().map(|read| read.batches.clone()).collect()
            }),
            stale: false,
        },
        tables: Tables::of(plan),
        poisoned: None,
        norm: NormState::allocate(plan, backend)?,
        scaled: plan.gradients.loss_scale.is_some(),
        updated: plan.optimize_stages().map(|stage| stage.storage).collect(),
        update_reader: UpdateReader::of(plan),
        arena,
        exchange,
        in_backward: InBackward::of(plan),
        since_average: 0,
        adapting: Adapting::default(),
        params_version: 0,
        written: Written::default(),
        backend: backend.name(),
        clock: Clock::default(),
    })
}

fn allocate_storages(plan: &Plan, allocator: &mut Allocator<'_>) -> Result<Vec<StorageState>> {
    let mut storages = Vec::with_capacity(plan.storages.len());
    for spec in &plan.storages {
        let Some(&first) = spec.members.first() else {
            continue;
        };
        let kernel = plan.kernel_of(first)?;
        let mut lists = Vec::with_capacity(spec.lists.len());
        for (index, &list) in spec.lists.iter().enumerate() {
            // The layout guarantees that the widest element's bytes fit an i64.
            let len_bytes = match spec.extents[index] {
                Extent::Segments => 0,
                _ => list.stride().len_bytes(spec.list_numel(index) as usize),
            };
            let is_reduced_into = list.role == Role::Grad && spec.extents[index] == Extent::Shard;
            let is_whole = spec.extents[index] == Extent::Whole;
            let moves = plan.topology.world > 1 && (is_whole || is_reduced_into);
            let buffer = allocator.arena(len_bytes, moves)?;
            lists.push(ListBuffer { list, buffer });
        }
        let layout = kernel.argument_layout();
        let mut scalars = vec![0; layout.scalar_bytes];
        kernel.write_scalars(&mut scalars);
        let summed = plan.reduces() && kernel.normed().is_some();
        storages.push(StorageState {
            tensor_sums: summed.then(|| vec![[0.0; MAX_SUMS]; spec.members.len()]),
            kernel,
            spec: spec.clone(),
            lists,
            firsts: Vec::new(),
            scalars,
            step_scalars: vec![0; layout.step_scalar_bytes * plan.groups.groups.len()],
            update_rows: if plan.update_norms {
                Some(UpdateRows::allocate(spec, allocator.backend)?)
            } else {
                None
            },
        });
    }
    Ok(storages)
}

/// Refuses a backend that cannot run a stage of the plan.
fn check_backend(plan: &Plan, backend: &dyn Backend) -> Result<()> {
    if backend.host().is_some() || !plan.is_fused() {
        return Ok(());
    }
    Err(PlanError::Conflict {
        first: format!("backend {}", backend.name()),
        second: "fuse_reduce_into_update".to_owned(),
        why: "do not go together, since ranks read each other's gradients in host memory; \
              reduce them first",
    })
}

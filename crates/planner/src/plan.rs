//! The plan as a value.

use std::ops::Range;
use std::sync::Arc;

use fusestep_launch::{
    Batch, Batchable, LaunchError, LaunchLimits, MAX_LAUNCHES, MultiTensorKernel, Precision,
    TensorList, batches,
};
use fusestep_schedule::Schedule;
use fusestep_tensor::{DType, ParamDesc, Role};

use crate::arena::kept_bytes;
use crate::bucket::{Caps, Grain};
use crate::group::Classes;
use crate::norm::Gradients;
use crate::passes::{GradientAccumulation, LocalSgd, Ownership, ReducedWhen};
use crate::{
    Bucket, HyperClass, Note, Optimize, Optimizer, PlanError, Precisions, Segment, SizeClass,
    Stage, StorageSpec, TableKind, Tensors, Topology, When, ZeroStage,
};

/// A training step's tail, planned: where tensors lie, what is launched and what ranks send, in
/// order.
///
/// Made by [`crate::Planner`]; `println!("{plan}")` documents the run. One rank is a world like any
/// other.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub(crate) params: Arc<[ParamDesc]>,
    /// The rule of all parameters without one of their own, then the others.
    pub(crate) rules: Vec<Optimizer>,
    /// For each parameter its rule.
    pub(crate) rule_of: Arc<[u32]>,
    /// What multiplies the learning rates.
    pub(crate) schedule: Option<Arc<Schedule>>,
    pub(crate) precisions: Precisions,
    pub(crate) limits: LaunchLimits,
    pub(crate) tensors: Tensors,
    /// Never [`TableKind::Auto`].
    pub(crate) table: TableKind,
    pub(crate) topology: Topology,
    pub(crate) zero: ZeroStage,
    /// Ranks that share one set of shards; the world unless pass `shard` says other.
    pub(crate) shard_group: usize,
    pub(crate) ownership: Ownership,
    pub(crate) storages: Vec<StorageSpec>,
    /// For each parameter its storage and its position there.
    pub(crate) places: Vec<(usize, usize)>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) buckets: Vec<Bucket>,
    /// The order in which gradients become ready.
    pub(crate) ready: Vec<u32>,
    /// How gradients are put into buckets; `None` for one each.
    pub(crate) caps: Option<Caps>,
    /// Bytes of a call that brings parameters of one owner; `None` for all-gathers.
    pub(crate) broadcast_cap_bytes: Option<u64>,
    pub(crate) stages: Vec<Stage>,
    pub(crate) notes: Vec<Note>,
    /// What passes ask of all gradients together.
    pub(crate) gradients: Gradients,
    /// Whether updates leave sums over what they change.
    pub(crate) update_norms: bool,
    /// Whether a bucket whose gradients are there is updated before the step is run.
    pub(crate) in_backward: bool,
    pub(crate) classes: Classes,
    pub(crate) naive_launches: usize,
    /// [`Plan::hash`], computed once the passes are through.
    pub(crate) hash: u64,
}

impl Plan {
    /// The parameters, in plan order.
    pub fn params(&self) -> &[ParamDesc] {
        &self.params
    }

    /// The update rule of parameters without one of their own.
    pub fn optimizer(&self) -> &Optimizer {
        &self.rules[0]
    }

    /// The update rule of one parameter.
    ///
    /// # Panics
    /// If the plan has no such parameter.
    pub fn optimizer_of(&self, param: usize) -> &Optimizer {
        &self.rules[self.rule_of[param] as usize]
    }

    /// What multiplies the learning rates of all rules.
    pub fn schedule(&self) -> Option<&Schedule> {
        self.schedule.as_deref()
    }

    /// How exactly parameters of this dtype and their state are kept.
    pub fn precision(&self, dtype: DType) -> Precision {
        self.precisions.of(dtype)
    }

    /// The limits that batches were made for.
    pub fn limits(&self) -> LaunchLimits {
        self.limits
    }

    /// This rank and the number of ranks.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// This rank within the group whose ranks share shards, and the size of that group: the world,
    /// unless pass `shard` says other.
    pub fn shard_place(&self) -> Topology {
        Topology {
            rank: self.topology.rank % self.shard_group,
            world: self.shard_group,
            reach: self.topology.reach,
        }
    }

    /// What is shared out.
    pub fn zero(&self) -> ZeroStage {
        self.zero
    }

    /// Where tensors lie.
    pub fn storages(&self) -> &[StorageSpec] {
        &self.storages
    }

    /// Allocations of gradients that ranks reduce, in the order they become ready.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Ranges of gradients that one call reduces, in the order of the calls; none on one rank.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// What is run, in order.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The distinct hyper-parameters.
    pub fn classes(&self) -> &[HyperClass] {
        &self.classes.classes
    }

    /// What the passes did and why: each application, split, skip and refusal.
    pub fn explain(&self) -> &[Note] {
        &self.notes
    }

    /// Micro-steps of an update.
    pub fn micro_steps(&self) -> u32 {
        self.accumulation().map_or(1, |rule| rule.every.get())
    }

    /// Launches of one step of this rank on a device.
    pub fn launches(&self) -> usize {
        self.count_launches(|optimize| self.launches_of(optimize))
    }

    /// Launches of one step of this rank in the host's memory, which has no tables to prepare.
    pub fn host_launches(&self) -> usize {
        self.count_launches(|optimize| optimize.batches.len())
    }

    fn count_launches(&self, of_update: impl Fn(&Optimize) -> usize) -> usize {
        let launches = self.stages.iter().map(|stage| match stage {
            Stage::Norm(norm) => norm.launches(),
            Stage::Optimize(optimize) | Stage::ReduceUpdate(optimize) => of_update(optimize),
            _ => 0,
        });
        launches.sum()
    }

    /// Launches that the naive plan of the same tensors needs on a device: with norms of gradients
    /// and of updates and resident tables where this plan has them, unless it would have more than
    /// [`MAX_LAUNCHES`] then.
    pub fn naive_launches(&self) -> usize {
        self.naive_launches
    }

    /// Elements of all parameters.
    pub fn elements(&self) -> u64 {
        self.params.iter().map(ParamDesc::numel).sum()
    }

    /// Bytes of optimizer state on this rank, padding included.
    pub fn state_bytes(&self) -> u64 {
        self.storages.iter().map(StorageSpec::state_bytes).sum()
    }

    /// Bytes of everything that this rank keeps between steps, padding included: from ZeRO stage 2
    /// on one bucket of gradients beside its shard.
    pub fn memory_bytes(&self) -> u64 {
        let arenas = self.storages.iter().map(StorageSpec::len_bytes);
        arenas.sum::<u64>() + self.accumulator_bytes() + kept_bytes(self)
    }

    /// Bytes of the f32 sums of 16-bit gradients, or of sums that lie in shards.
    fn accumulator_bytes(&self) -> u64 {
        let Some(rule) = self.accumulation() else {
            return 0;
        };
        let storages = self.storages.iter();
        storages
            .map(|spec| rule.sum_bytes(spec, spec.shard_numel()))
            .sum()
    }

    /// Bytes of memory traffic of one step on this rank: what the kernels' lists read and write,
    /// and the gradients once more for their norm. With ranks beyond number, `u64::MAX`.
    pub fn traffic_bytes(&self) -> u64 {
        let updates = self.stages.iter().filter_map(|stage| match stage {
            Stage::Optimize(optimize) => Some((optimize, false)),
            Stage::ReduceUpdate(optimize) => Some((optimize, true)),
            _ => None,
        });
        let bytes = updates.map(|(optimize, reduces)| {
            let Some(&tensor) = optimize.tensors.first() else {
                return 0;
            };
            let spec = &self.storages[optimize.storage];
            let member = spec.members[tensor as usize];
            let per_element = self.kernel_of(member).map_or(0, |k| k.traffic_bytes());
            // One pass reads every rank's gradient and writes all that every rank keeps whole.
            let others = if reduces {
                self.topology.world as u64 - 1
            } else {
                0
            };
            let replicated = self.replicated(spec).into_iter();
            let widths = replicated.map(|list| spec.lists[list].dtype.len_bytes());
            let width = spec.grad_dtype().len_bytes() + widths.sum::<usize>();
            let elements: u64 = optimize.batches.iter().map(Batch::elements).sum();
            (per_element + others * width as u64).saturating_mul(elements)
        });
        let norm = self.norm_stage().map_or(0, |_| self.gradient_bytes());
        bytes.fold(norm, u64::saturating_add)
    }

    /// Identifies parameters, layout, passes and stages: states and ranks with equal hashes fit
    /// together.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether buckets are updated as soon as their gradients are given, before the step is run
    /// (pass `update_in_backward`).
    pub fn updates_in_backward(&self) -> bool {
        self.in_backward
    }

    /// Whether gradients are reduced across ranks.
    pub fn reduces(&self) -> bool {
        self.topology.world > 1 && self.local_sgd().is_none()
    }

    pub(crate) fn accumulation(&self) -> Option<GradientAccumulation> {
        self.stages.iter().find_map(|stage| match stage {
            Stage::Accumulate(accumulate) => Some(accumulate.rule),
            _ => None,
        })
    }

    pub(crate) fn local_sgd(&self) -> Option<LocalSgd> {
        self.stages.iter().find_map(|stage| match stage {
            Stage::Average(rule) => Some(*rule),
            _ => None,
        })
    }

    /// Whether gradients are reduced in every micro-step.
    pub(crate) fn reduces_each(&self) -> bool {
        let each = |rule: GradientAccumulation| {
            rule.every.get() > 1 && rule.reduced == ReducedWhen::PerMicroStep
        };
        self.accumulation().is_some_and(each)
    }

    /// Stages that update, in order.
    pub(crate) fn optimize_stages(&self) -> impl Iterator<Item = &Optimize> {
        self.stages.iter().filter_map(|stage| match stage {
            Stage::Optimize(optimize) | Stage::ReduceUpdate(optimize) => Some(optimize),
            _ => None,
        })
    }

    pub(crate) fn optimize_stages_mut(&mut self) -> impl Iterator<Item = &mut Optimize> {
        self.stages.iter_mut().filter_map(|stage| match stage {
            Stage::Optimize(optimize) | Stage::ReduceUpdate(optimize) => Some(optimize),
            _ => None,
        })
    }

    /// Whether any rule needs sums over whole tensors.
    pub(crate) fn has_normed(&self) -> Result<bool, PlanError> {
        for spec in &self.storages {
            if let Some(&member) = spec.members.first()
                && self.kernel_of(member)?.normed().is_some()
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Where buckets and parts may be cut.
    pub(crate) fn grain(&self) -> Result<Grain, PlanError> {
        Ok(if self.ownership == Ownership::Tensors {
            Grain::Tensors
        } else if self.update_norms {
            Grain::Of(fusestep_launch::CHUNK_ELEMENTS.into())
        } else if self.gradients.rule().is_some() || self.has_normed()? {
            Grain::Of(fusestep_launch::LEAF_ELEMENTS)
        } else {
            Grain::Elements
        })
    }

    /// A stage over whole tensors of a storage, with its batches.
    pub(crate) fn optimize(
        &self,
        storage: usize,
        size_class: SizeClass,
        tensors: Vec<u32>,
    ) -> Result<Optimize, PlanError> {
        let mut optimize = Optimize {
            storage,
            bucket: None,
            size_class,
            tensors,
            elements: 0..self.storages[storage].layout.total_numel(),
            batches: Vec::new(),
        };
        optimize.batches = self.batches(&optimize, |_| true, &self.classes)?;
        Ok(optimize)
    }

    /// The batches of those tensors of a stage that take part, as far as they lie in its elements.
    pub(crate) fn batches(
        &self,
        stage: &Optimize,
        takes_part: impl Fn(usize) -> bool,
        classes: &Classes,
    ) -> Result<Vec<Batch>, PlanError> {
        let spec = &self.storages[stage.storage];
        let Some(&member) = spec.members.first() else {
            return Ok(Vec::new());
        };
        let kernel = self.kernel_of(member)?;
        let members = &spec.members;
        let present = |tensor: &&u32| takes_part(members[**tensor as usize] as usize);
        let batchable = stage.tensors.iter().filter(present).map(|&tensor| {
            let class = classes.of_param[members[tensor as usize] as usize];
            within(spec, tensor, &stage.elements, class)
        });
        let layout = kernel.argument_layout();
        let limits = self.batch_limits(self.limits_of(kernel.as_ref()));
        Ok(batches(kernel.entry(), batchable, layout, limits)?)
    }

    /// The limits of launches of a kernel.
    pub(crate) fn limits_of(&self, kernel: &dyn MultiTensorKernel) -> LaunchLimits {
        if self.update_norms {
            self.limits.measured()
        } else {
            self.limits.of(kernel)
        }
    }

    /// The limits of batches: a resident table has room for any number of tensors.
    pub(crate) fn batch_limits(&self, limits: LaunchLimits) -> LaunchLimits {
        match self.table {
            TableKind::Resident => LaunchLimits {
                argument_bytes: usize::MAX,
                ..limits
            },
            _ => limits,
        }
    }

    /// The kernel of one parameter.
    pub(crate) fn kernel_of(&self, param: u32) -> Result<Box<dyn MultiTensorKernel>, PlanError> {
        let rule = self.optimizer_of(param as usize);
        rule.kernel(&self.params[param as usize], &self.precisions)
    }

    /// Bytes of the narrowest element among lists, or of `dtype` if there is none: slots made for
    /// it are aligned in every list.
    pub(crate) fn narrowest(lists: &[TensorList], dtype: DType) -> usize {
        let widths = lists.iter().map(|list| list.dtype.len_bytes());
        widths.min().unwrap_or(dtype.len_bytes())
    }

    /// The lists that a kernel's tensors have in this plan: all, or only the state if the caller
    /// lends the rest, or none if it lends everything.
    pub(crate) fn kept_lists(tensors: Tensors, kernel: &dyn MultiTensorKernel) -> Vec<TensorList> {
        let borrowed = |role| matches!(role, Role::Param | Role::Grad);
        let lists = kernel.lists().iter().copied();
        match tensors {
            Tensors::Kept => lists.collect(),
            Tensors::Borrowed => lists.filter(|list| !borrowed(list.role)).collect(),
            Tensors::BorrowedWithState => Vec::new(),
        }
    }

    /// Writes down where each parameter lies.
    pub(crate) fn index_places(&mut self) {
        self.places = vec![(0, 0); self.params.len()];
        for (storage, spec) in self.storages.iter().enumerate() {
            for (position, &member) in spec.members.iter().enumerate() {
                self.places[member as usize] = (storage, position);
            }
        }
    }

    /// When a stage runs.
    pub fn when(&self, stage: &Stage) -> When {
        match stage {
            Stage::Accumulate(_) => When::MicroStep,
            Stage::Reduce(_) if self.reduces_each() => When::MicroStep,
            Stage::Average(rule) => When::Every(rule.every.get()),
            _ if self.in_backward => When::Ready,
            _ => When::Step,
        }
    }
}

impl GradientAccumulation {
    /// Bytes of a storage's sums on a rank whose shard of it has so many elements.
    pub(crate) fn sum_bytes(&self, spec: &StorageSpec, shard_numel: u64) -> u64 {
        let width = spec.grad_dtype().len_bytes() as u64;
        match self.reduced {
            _ if self.every.get() == 1 => 0,
            ReducedWhen::PerMicroStep => shard_numel * width.max(4),
            ReducedWhen::PerWindow if width < 4 => spec.layout.total_numel() * 4,
            ReducedWhen::PerWindow => 0,
        }
    }
}

/// What of a tensor lies in some elements of its storage.
pub(crate) fn within(
    spec: &StorageSpec,
    tensor: u32,
    elements: &Range<u64>,
    class: u32,
) -> Batchable {
    let own = spec.layout.range(tensor as usize);
    let start = own.start.max(elements.start).min(own.end);
    let end = own.end.min(elements.end).max(start);
    Batchable {
        tensor,
        first_element: start - own.start,
        numel: end - start,
        class,
    }
}

/// Launches of a plan's stages behind the first of each: a stage is bounded by itself, but there
/// may be one for every tensor.
#[derive(Debug, Default)]
pub(crate) struct LaunchCount(usize);

impl LaunchCount {
    /// Counts those of one more stage.
    ///
    /// # Errors
    /// [`LaunchError::TooMany`] beyond [`MAX_LAUNCHES`] of all stages together.
    pub(crate) fn add(&mut self, batches: &[Batch], kernel: &str) -> Result<(), PlanError> {
        self.0 += batches.len().saturating_sub(1);
        if self.0 < MAX_LAUNCHES {
            return Ok(());
        }
        Err(PlanError::Launch(LaunchError::TooMany {
            kernel: kernel.to_owned(),
            expected: MAX_LAUNCHES,
        }))
    }
}

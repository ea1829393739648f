//! Plan of a training step, as a value.

use std::collections::BTreeMap;
use std::sync::Arc;

use fusestep_launch::{LaunchLimits, MAX_LISTS, MultiTensorKernel, Precision, TensorList};
use fusestep_schedule::Schedule;
use fusestep_tensor::{DType, ParamDesc, Role, Shape, UNIT_ELEMENTS};
use smallvec::SmallVec;

use crate::error::Result;
use crate::plan::bucket::{Bucket, Segment};
use crate::plan::group::{ParameterGroup, ParameterGroups};
use crate::plan::lanes::Lanes;
use crate::plan::note::{Note, Verdict};
use crate::plan::rule::{Optimizer, Precisions};
use crate::plan::settings::{
    Caps, GradientAccumulation, Gradients, Grain, LocalSgd, Ownership, TableKind, Tensors,
    ZeroStage,
};
use crate::plan::stage::{Norm, Optimize, Stage, When};
use crate::plan::storage::{Extent, StorageKey, StorageSpec};
use crate::plan::topology::Topology;

/// A training step's tail, planned: where tensors lie, what is launched and what ranks send, in
/// order.
///
/// Made by [`crate::Planner`]; `println!("{plan}")` documents the run. One rank is a world like any
/// other.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub(crate) params: Arc<[ParamDesc]>,
    /// Rules: first that of all parameters without a rule of their own, then the others.
    pub(crate) rules: Vec<Optimizer>,
    pub(crate) rule_of: Arc<[u32]>,
    /// The schedule that multiplies the learning rates.
    pub(crate) schedule: Option<Arc<Schedule>>,
    pub(crate) precisions: Precisions,
    pub(crate) limits: LaunchLimits,
    pub(crate) tensors: Tensors,
    /// Place of the tables; never [`TableKind::Auto`].
    pub(crate) table: TableKind,
    pub(crate) topology: Topology,
    /// Shapes of all ranks' slices, for each parameter of which every rank has one of its own.
    pub(crate) slices: BTreeMap<usize, Vec<Shape>>,
    pub(crate) zero: ZeroStage,
    /// Ranks that share one set of shards; the world unless pass `shard` says other.
    pub(crate) shard_group: usize,
    pub(crate) ownership: Ownership,
    pub(crate) storages: Vec<StorageSpec>,
    /// Storage of each parameter, and the parameter's position there.
    pub(crate) places: Vec<(usize, usize)>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) buckets: Vec<Bucket>,
    /// The order in which gradients become ready.
    pub(crate) ready: Vec<u32>,
    /// Rules by which gradients are put into buckets; `None` for one bucket each.
    pub(crate) caps: Option<Caps>,
    /// Most bytes of a call that brings parameters of one owner; `None` for all-gathers.
    pub(crate) broadcast_cap_bytes: Option<u64>,
    pub(crate) stages: Vec<Stage>,
    pub(crate) notes: Vec<Note>,
    /// Clipping and loss scale, which act on all gradients together.
    pub(crate) gradients: Gradients,
    /// The type in which f32 gradients travel between ranks, if it is another.
    pub(crate) wire: Option<DType>,
    /// The lanes that gradients are added by; without them sums are in the order of ranks.
    pub(crate) lanes: Option<Lanes>,
    /// Memories of sums that a rank brings to an exchange: as many as the one that gives most.
    pub(crate) lanes_given: usize,
    /// Whether updates leave sums over what they change.
    pub(crate) update_norms: bool,
    /// Whether a bucket is updated as soon as its gradients are given, before the step is run.
    pub(crate) in_backward: bool,
    pub(crate) groups: ParameterGroups,
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

    /// Keeper of parameters and gradients.
    pub fn tensors(&self) -> Tensors {
        self.tensors
    }

    /// The schedule that multiplies the learning rates of all rules.
    pub fn schedule(&self) -> Option<&Schedule> {
        self.schedule.as_deref()
    }

    /// How exactly a parameter and its state are kept.
    ///
    /// # Panics
    /// If the plan has no such parameter.
    pub fn precision_of(&self, param: usize) -> Precision {
        self.precisions.of_param(&self.params[param])
    }

    /// How exactly parameters of this dtype and their state are kept, but for those whose state
    /// stays in f32 beside others in int8.
    pub fn precision(&self, dtype: DType) -> Precision {
        self.precisions.of(dtype)
    }

    /// The storage type of a parameter's gradient, in which ranks and micro-steps add it up, and in
    /// which a caller lends it.
    ///
    /// # Panics
    /// If the plan has no such parameter.
    pub fn grad_dtype(&self, param: usize) -> DType {
        self.precision_of(param).grad.of(self.params[param].dtype)
    }

    /// The limits that batches were made for.
    pub fn limits(&self) -> LaunchLimits {
        self.limits
    }

    /// The place of the tables: [`TableKind::Arguments`] or [`TableKind::Resident`].
    pub fn table(&self) -> TableKind {
        self.table
    }

    /// This rank and the number of ranks.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// This rank's place in its shard group, and the size of the group: the world, unless pass
    /// `shard` sets another.
    pub fn shard_place(&self) -> Topology {
        Topology {
            rank: self.topology.rank % self.shard_group,
            world: self.shard_group,
            reach: self.topology.reach,
        }
    }

    /// The ZeRO stage, which decides what ranks share out.
    pub fn zero(&self) -> ZeroStage {
        self.zero
    }

    /// Storages, which say where tensors lie.
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

    /// Stages, in the order in which they run.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The distinct hyper-parameters.
    pub fn groups(&self) -> &[ParameterGroup] {
        &self.groups.groups
    }

    /// Notes of the passes: each application, split, skip and refusal, with its reason.
    pub fn explain(&self) -> &[Note] {
        &self.notes
    }

    pub(crate) fn note(&mut self, pass: &str, verdict: Verdict, reason: impl Into<String>) {
        self.notes.push(Note { pass: pass.to_owned(), verdict, reason: reason.into() });
    }

    /// Micro-steps of an update on this rank. With lanes ranks may differ by those of one lane.
    pub fn micro_steps(&self) -> u32 {
        let Topology { rank, world, .. } = self.topology;
        let lanes = self.lanes.map_or(1, |lanes| lanes.of_rank(rank, world).len() as u32);
        lanes * self.of_lane()
    }

    /// Micro-steps of a lane, or of an update without lanes.
    pub(crate) fn of_lane(&self) -> u32 {
        self.accumulation().map_or(1, |rule| rule.every.get())
    }

    /// Whether any rank adds the gradients of several micro-steps.
    pub(crate) fn adds_micro_steps(&self) -> bool {
        self.of_lane() > 1
            || self.lanes.is_some_and(|lanes| lanes.count.get() as usize > self.topology.world)
    }

    /// The lanes that gradients are added by, whatever the number of ranks.
    pub fn lanes(&self) -> Option<Lanes> {
        self.lanes
    }

    /// Sums of lanes that a rank has memory for, of each gradient; none if each is a lane.
    pub fn lane_slots(&self, rank: usize) -> usize {
        let Some(lanes) = self.lanes.filter(|_| self.adds_micro_steps()) else {
            return 0;
        };
        let world = self.topology.world;
        let held = lanes.of_window(rank, world, self.of_lane()).slots;
        if !self.exchanges_lanes() {
            return held;
        }
        // Ranks that see each other's memory bring as many sums as the one that gives most.
        held.max(self.lanes_given)
    }

    /// Whether ranks exchange sums of lanes as they are, since these are not one for each rank.
    pub(crate) fn exchanges_lanes(&self) -> bool {
        let is_tree = |lanes: Lanes| lanes.is_tree_of_ranks(self.topology.world);
        self.lanes.is_some_and(|lanes| !is_tree(lanes)) && self.reduces()
    }

    /// Memories of sums of lanes that ranks show each other; 0 if each brings one gradient.
    pub(crate) fn sums_of_lanes(&self) -> usize {
        let Some(lanes) = self.lanes.filter(|_| self.exchanges_lanes()) else {
            return 0;
        };
        let sums = lanes.contributions(self.topology.world).into_iter();
        sums.map(|sum| sum.slot + 1).max().unwrap_or(1)
    }

    /// Hash of parameters, layout, passes and stages. States and ranks with equal hashes fit
    /// together.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether gradients are reduced across ranks.
    pub fn reduces(&self) -> bool {
        self.topology.world > 1 && self.averaging().is_none()
    }

    pub(crate) fn accumulation(&self) -> Option<GradientAccumulation> {
        self.stages.iter().find_map(|stage| match stage {
            Stage::Accumulate(stage) => Some(stage.rule),
            _ => None,
        })
    }

    /// Averages in place of reduced gradients, if [`LocalSgd`] asks for them.
    pub fn averaging(&self) -> Option<LocalSgd> {
        self.stages.iter().find_map(|stage| match stage {
            Stage::Average(rule) => Some(*rule),
            _ => None,
        })
    }

    /// Whether gradients are reduced in every micro-step.
    pub(crate) fn reduces_each(&self) -> bool {
        self.accumulation().is_some_and(GradientAccumulation::reduces_each)
    }

    /// Whether ranks reduce and update buckets in one pass.
    pub(crate) fn is_fused(&self) -> bool {
        let mut stages = self.stages.iter();
        stages.any(|stage| matches!(stage, Stage::ReduceUpdate(_)))
    }

    pub(crate) fn optimize_stages(&self) -> impl Iterator<Item = &Optimize> {
        self.stages.iter().filter_map(Stage::update)
    }

    /// Whether any rule needs sums over whole tensors.
    pub(crate) fn has_normed(&self) -> Result<bool> {
        for spec in &self.storages {
            if let Some(&member) = spec.members.first()
                && self.kernel_of(member)?.normed().is_some()
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Places at which buckets and parts may be cut.
    pub(crate) fn grain(&self) -> Result<Grain> {
        Ok(if self.ownership == Ownership::Tensors {
            Grain::Tensors
        } else if self.update_norms {
            Grain::Of(fusestep_launch::CHUNK_ELEMENTS.into())
        } else if self.gradients.rule().is_some() || self.has_normed()? {
            Grain::Of(fusestep_launch::LEAF_ELEMENTS)
        } else if self.storages.iter().any(StorageSpec::is_coded) {
            Grain::Of(UNIT_ELEMENTS)
        } else {
            Grain::Elements
        })
    }

    /// The limits of launches of a kernel.
    pub(crate) fn limits_of(&self, kernel: &dyn MultiTensorKernel) -> LaunchLimits {
        if self.update_norms { self.limits.measured() } else { self.limits.of(kernel) }
    }

    /// The limits of batches: a resident table has room for any number of tensors.
    pub(crate) fn batch_limits(&self, limits: LaunchLimits) -> LaunchLimits {
        match self.table {
            TableKind::Resident => LaunchLimits { argument_bytes: usize::MAX, ..limits },
            _ => limits,
        }
    }

    /// Key that a parameter has in common with those of its storage.
    pub(crate) fn storage_key(&self, param: usize) -> StorageKey {
        let desc = &self.params[param];
        let keeps_f32 = self.precisions.why_f32(desc).is_some();
        StorageKey { dtype: desc.dtype, rule: self.rule_of[param], keeps_f32 }
    }

    pub(crate) fn kernel_of(&self, param: u32) -> Result<Box<dyn MultiTensorKernel>> {
        let rule = self.optimizer_of(param as usize);
        rule.kernel(&self.params[param as usize], &self.precisions)
    }

    /// Refuses int8 that the rule of a parameter has not, however small the parameter is.
    pub(crate) fn check_int8(&self, param: usize) -> Result<()> {
        let desc = &self.params[param];
        match self.precisions.why_f32(desc) {
            Some(_) => self.optimizer_of(param).check_precision(desc, &self.precisions),
            None => Ok(()),
        }
    }

    /// The lists that the state keeps for a kernel's tensors. Borrowed lists are left out.
    pub(crate) fn kept_lists(tensors: Tensors, kernel: &dyn MultiTensorKernel) -> Vec<TensorList> {
        let borrowed = |role| matches!(role, Role::Param | Role::Grad);
        let lists = kernel.lists().iter().copied();
        match tensors {
            Tensors::Kept => lists.collect(),
            Tensors::Borrowed => lists.filter(|list| !borrowed(list.role)).collect(),
            Tensors::BorrowedWithState => Vec::new(),
        }
    }

    pub(crate) fn index_places(&mut self) {
        self.places = vec![(0, 0); self.params.len()];
        for (storage, spec) in self.storages.iter().enumerate() {
            for (position, &member) in spec.members.iter().enumerate() {
                self.places[member as usize] = (storage, position);
            }
        }
    }

    /// The time at which a stage runs.
    pub fn when(&self, stage: &Stage) -> When {
        match stage {
            Stage::Accumulate(_) => When::MicroStep,
            Stage::Reduce(_) if self.reduces_each() => When::MicroStep,
            Stage::Average(rule) => When::Every(rule.every.get()),
            _ if self.in_backward => When::Ready,
            _ => When::Step,
        }
    }

    pub(crate) fn norm_stage(&self) -> Option<&Norm> {
        self.stages.iter().find_map(|stage| match stage {
            Stage::Norm(norm) => Some(norm),
            _ => None,
        })
    }

    /// The lists that every rank keeps whole: parameters, and the state if it is not sharded.
    pub(crate) fn replicated(&self, spec: &StorageSpec) -> SmallVec<[usize; MAX_LISTS]> {
        let lists = spec.lists.iter().enumerate();
        let whole = lists.filter(|(index, list)| {
            list.role != Role::Grad && spec.extents[*index] == Extent::Whole
        });
        whole.map(|(index, _)| index).collect()
    }

    /// The element of its storage that a bucket's segment begins with; 0 of a whole storage.
    pub(crate) fn segment_start(&self, bucket: Option<usize>) -> u64 {
        bucket.map_or(0, |bucket| self.segments[self.buckets[bucket].segment].elements.start)
    }

    pub(crate) fn is_distributed(&self, param: usize) -> bool {
        self.storages[self.places[param].0].distributed
    }

    /// The shape that a parameter, or its slice, has on a rank.
    pub(crate) fn shape_on(&self, rank: usize, param: usize) -> &Shape {
        let slice = self.slices.get(&param).and_then(|slices| slices.get(rank));
        slice.unwrap_or(&self.params[param].shape)
    }

    pub(crate) fn name(&self, storage: usize, tensor: u32) -> &str {
        let member = self.storages[storage].members[tensor as usize];
        &self.params[member as usize].name
    }

    /// Whether every rank has its own values of a parameter and of its state.
    pub(crate) fn has_own(&self, param: usize) -> bool {
        self.is_distributed(param) || self.averaging().is_some()
    }

    /// Whether this rank saves values that other ranks have as well. Without shards rank 0 does,
    /// with shards the first shard group.
    pub(crate) fn saves_shared(&self) -> bool {
        let rank = self.topology().rank;
        match self.zero() {
            ZeroStage::None => rank == 0,
            _ => rank < self.shard_group,
        }
    }
}

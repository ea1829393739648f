//! Planner, which makes plans from descriptors of parameters.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use fusestep_launch::{LaunchLimits, Precision, TensorList};
use fusestep_schedule::Schedule;
use fusestep_tensor::{
    DType, ParamDesc, Quoted, check_total_numel, check_unique_names, counted_are,
};

use crate::error::{PlanError, Result};
use crate::plan::batches;
use crate::plan::batches::LaunchCount;
use crate::plan::group::{ParameterGroups, SizeClass};
use crate::plan::note::{Note, Verdict};
use crate::plan::passes::coalesce_gradients::CoalesceGradients;
use crate::plan::passes::fuse_optimizer::FuseOptimizer;
use crate::plan::passes::pass::Pass;
use crate::plan::passes::{buckets, kept_f32, order};
use crate::plan::rule::{Optimizer, Precisions};
use crate::plan::settings::{Gradients, Ownership, ReduceDType, TableKind, Tensors, ZeroStage};
use crate::plan::stage::{Reduce, Reduced, Stage};
use crate::plan::storage::{StorageKey, StorageSpec};
use crate::plan::topology::Topology;
use crate::plan::value::Plan;

/// Makes plans.
///
/// ```
/// use fusestep_planner::{Optimizer, Planner};
/// use fusestep_fused_adam::Adam;
/// use fusestep_tensor::{DType, ParamDesc, Shape};
///
/// let params = [
///     ParamDesc::new("w", Shape::new([128, 64])?, DType::F32),
///     ParamDesc::new("b", Shape::new([128])?, DType::F32),
/// ];
/// let plan = Planner::new(Optimizer::Adam(Adam::default())).plan(&params)?;
/// assert_eq!((plan.launches(), plan.naive_launches()), (1, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Planner {
    optimizer: Optimizer,
    groups: Vec<(Vec<String>, Optimizer)>,
    schedule: Option<Schedule>,
    limits: LaunchLimits,
    precisions: Precisions,
    reduce_dtype: ReduceDType,
    tensors: Tensors,
    table: TableKind,
    passes: Vec<Pass>,
    notes: Vec<Note>,
}

impl Planner {
    /// A planner with the default limits and passes: [`CoalesceGradients`], then [`FuseOptimizer`].
    pub fn new(optimizer: Optimizer) -> Self {
        Self {
            optimizer,
            groups: Vec::new(),
            schedule: None,
            limits: LaunchLimits::default(),
            precisions: Precisions::default(),
            reduce_dtype: ReduceDType::default(),
            tensors: Tensors::Kept,
            table: TableKind::default(),
            passes: vec![CoalesceGradients.into(), FuseOptimizer.into()],
            notes: Vec::new(),
        }
    }

    /// Gives the parameters `names` a rule and settings of their own: LARS for all but the
    /// embeddings, for example.
    ///
    /// Clipping and loss scaling go over all parameters alike. Launches are split by rule; the plan
    /// says so.
    ///
    /// Groups with equal rules and settings share launches. For differences between tensors of one
    /// rule, set the factors of [`ParamDesc`] on learning rate, weight decay and trust.
    pub fn group(
        mut self,
        names: impl IntoIterator<Item = impl Into<String>>,
        optimizer: Optimizer,
    ) -> Self {
        let names = names.into_iter().map(Into::into).collect();
        self.groups.push((names, optimizer));
        self
    }

    /// Multiplies every rule's learning rate by the schedule's factor at each update. The factor
    /// follows from [`crate::State::step`]: micro-steps and skipped steps do not count, and a
    /// resumed run goes on where it was.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Plans for these limits, a backend's for example.
    pub fn limits(mut self, limits: LaunchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Keeps all parameters and their state with this precision.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precisions = Precisions::all(precision);
        self
    }

    /// Keeps parameters of one dtype with a precision of their own: in a model of bf16 matrices and
    /// f32 norms only the former can have master weights.
    pub fn precision_of(mut self, dtype: DType, precision: Precision) -> Self {
        self.precisions.set(dtype, precision);
        self
    }

    /// Keeps in f32 the state of parameters in whose names one of these parts occurs, where others'
    /// is kept in int8. State of tensors with fewer than
    /// [`LEAST_INT8_ELEMENTS`](crate::LEAST_INT8_ELEMENTS) elements stays in f32 in any case.
    pub fn keep_f32(mut self, parts_of_names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.precisions.keep_f32(parts_of_names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the storage type in which gradients are added up and travel between ranks.
    pub fn reduce_dtype(mut self, dtype: ReduceDType) -> Self {
        self.reduce_dtype = dtype;
        self
    }

    /// Sets the keeper of parameters and gradients.
    pub fn tensors(mut self, tensors: Tensors) -> Self {
        self.tensors = tensors;
        self
    }

    /// Sets the place of the launches' tables, which changes launches, never a bit.
    pub fn table(mut self, table: TableKind) -> Self {
        self.table = table;
        self
    }

    /// Plans without any pass, those added so far included: one storage, one launch and, between
    /// ranks, one call per tensor. The oracle of every pass.
    pub fn naive(mut self) -> Self {
        self.passes.clear();
        self
    }

    /// Adds a pass. Passes that rewrite the same part of a plan apply in the order given.
    pub fn with(mut self, pass: impl Into<Pass>) -> Self {
        self.passes.push(pass.into());
        self
    }

    /// Adds a note on a decision that was taken before the plan is made. It is one of the plan's
    /// first.
    pub fn note(mut self, note: Note) -> Self {
        self.notes.push(note);
        self
    }

    /// Makes the plan of a world of one rank.
    ///
    /// # Errors
    /// A hyper-parameter or descriptor out of range, a name given twice, a dtype without a kernel,
    /// a precision that a parameter cannot have, limits too small for one tensor, two passes
    /// that contradict each other; each names what is wrong.
    /// # Cost
    /// Linear in the number of parameters.
    pub fn plan(&self, params: &[ParamDesc]) -> Result<Plan> {
        self.plan_for(params, Topology::SOLO)
    }

    /// Makes the plan of the rank that `topology` names. Ranks that plan the same parameters with
    /// the same passes have plans of equal hashes, whose calls fit together.
    ///
    /// # Errors
    /// As [`Planner::plan`]; [`PlanError::Topology`].
    /// # Cost
    /// Linear in the number of parameters and in buckets times ranks.
    pub fn plan_for(&self, params: &[ParamDesc], topology: Topology) -> Result<Plan> {
        #[cfg(feature = "tracing")]
        let _span =
            tracing::info_span!(target: "fusestep", "plan", tensors = params.len()).entered();
        topology.validate()?;
        self.limits.validate()?;
        if u32::try_from(params.len()).is_err() {
            return Err(PlanError::TooManyParameters { found: params.len() });
        }
        check_unique_names(params)?;
        check_total_numel(params)?;
        for param in params {
            param.validate()?;
        }
        if let Some(schedule) = &self.schedule {
            schedule.validate()?;
        }
        self.check_reduce_dtype(params)?;
        let mut plan = self.naive_plan(params, topology)?;
        order::rewrite(&mut plan, self.passes.iter(), self.table)?;
        if let Some(wire) = plan.wire.filter(|_| plan.reduces()) {
            let reason = format!(
                "gradients of f32 travel between ranks as {wire}: each rank rounds its own once, and \
                 their sum is f32"
            );
            plan.note(ReduceDType::NAME, Verdict::Applied, reason);
        }
        let reads_or_derives = plan.gradients.rule().is_some() || plan.update_norms;
        if reads_or_derives || plan.table == TableKind::Resident {
            let naive = self.naive_with_passes_of(&plan);
            plan.naive_launches = naive.map_or(plan.naive_launches, |naive| naive.launches());
        }
        Ok(plan)
    }

    /// Refuses a type of sums that no parameter has use for.
    fn check_reduce_dtype(&self, params: &[ParamDesc]) -> Result<()> {
        let has = |dtypes: &[DType]| params.iter().any(|param| dtypes.contains(&param.dtype));
        let conflict = |name: &str, second: &str, why| {
            let first = format!("{} {name}", ReduceDType::NAME);
            Err(PlanError::Conflict { first, second: second.to_owned(), why })
        };
        match (self.reduce_dtype, self.reduce_dtype.wire()) {
            (ReduceDType::F32, _) if !has(&[DType::F16, DType::BF16]) => conflict(
                "f32",
                "a model without parameters of f16 or bf16",
                "do not go together, since its gradients are added in f32 in any case; leave \
                 `reduce_dtype` out",
            ),
            (_, Some(wire)) if !has(&[DType::F32]) => conflict(
                wire.name(),
                "a model without parameters of f32",
                "do not go together, since only gradients of f32 travel in fewer bits; leave \
                 `reduce_dtype` out",
            ),
            _ => Ok(()),
        }
    }

    /// The naive plan with the same arithmetic as this plan's; `None` if it has too many launches.
    fn naive_with_passes_of(&self, plan: &Plan) -> Option<Plan> {
        let mut naive = self.naive_plan(&plan.params, plan.topology).ok()?;
        (naive.gradients, naive.update_norms) = (plan.gradients, plan.update_norms);
        naive.lanes = plan.lanes;
        // Ranks that average read whole gradients, not parts of buckets.
        naive.stages.extend(plan.averaging().map(Stage::Average));
        order::rewrite(&mut naive, std::iter::empty(), self.table).ok()?;
        Some(naive)
    }

    /// The distinct rules, and each parameter's.
    fn rules(&self, params: &[ParamDesc]) -> Result<(Vec<Optimizer>, Vec<u32>)> {
        let mut rules = vec![self.optimizer];
        // Of the groups, one of which may have the optimizer's own rule.
        let mut rule_of = vec![None; params.len()];
        let names = params.iter().enumerate();
        let index: HashMap<&str, usize> = names.map(|(at, p)| (p.name.as_str(), at)).collect();
        for (names, rule) in &self.groups {
            let known = rules.iter().position(|known| known == rule);
            let at = known.unwrap_or_else(|| {
                rules.push(*rule);
                rules.len() - 1
            });
            for name in names {
                let Some(&param) = index.get(name.as_str()) else {
                    return Err(PlanError::UnknownName {
                        name: name.clone(),
                        parameters: params.len(),
                    });
                };
                if let Some(first) = rule_of[param].replace(at as u32) {
                    return Err(PlanError::Conflict {
                        first: format!(
                            "`{}`: the group of {}",
                            Quoted(name),
                            rules[first as usize].name()
                        ),
                        second: format!("the group of {}", rule.name()),
                        why: "both have this parameter, or one has it twice",
                    });
                }
            }
        }
        for rule in &rules {
            rule.validate()?;
        }
        Ok((rules, rule_of.into_iter().map(Option::unwrap_or_default).collect()))
    }

    /// One storage, one launch and one call for each tensor.
    fn naive_plan(&self, params: &[ParamDesc], topology: Topology) -> Result<Plan> {
        let (rules, rule_of) = self.rules(params)?;
        let mut precisions = self.precisions.clone();
        // Sums of lanes are f32 as it is, so that rounding them would only lose bits.
        let has_lanes = self.passes.iter().any(|pass| matches!(pass, Pass::Lanes(_)));
        if has_lanes || self.reduce_dtype == ReduceDType::F32 {
            precisions.widen_gradients();
        }
        let mut plan = Plan {
            params: Arc::from(params),
            rules,
            rule_of: Arc::from(rule_of),
            schedule: self.schedule.clone().map(Arc::new),
            precisions,
            limits: self.limits,
            tensors: self.tensors,
            table: TableKind::Arguments,
            topology,
            slices: BTreeMap::new(),
            zero: ZeroStage::None,
            shard_group: topology.world,
            ownership: Ownership::default(),
            storages: Vec::with_capacity(params.len()),
            places: Vec::new(),
            segments: Vec::new(),
            buckets: Vec::new(),
            ready: (0..params.len() as u32).rev().collect(),
            caps: None,
            broadcast_cap_bytes: None,
            stages: Vec::with_capacity(params.len()),
            notes: self.notes.clone(),
            gradients: Gradients::default(),
            wire: self.reduce_dtype.wire(),
            lanes: None,
            lanes_given: 0,
            update_norms: false,
            in_backward: false,
            groups: ParameterGroups::new(params, |_| 0),
            naive_launches: 0,
            hash: 0,
        };
        self.naive_storages(&mut plan)?;
        plan.index_places();
        plan.naive_launches = plan.launches();
        if topology.world > 1 {
            // Where the first call stands is where all of them come.
            plan.stages.insert(0, Stage::Reduce(Reduce { bucket: 0, result: Reduced::Whole }));
            buckets::make(&mut plan)?;
        }
        kept_f32::explain(&mut plan);
        let empty = params.iter().filter(|param| param.numel() == 0).count();
        if empty > 0 {
            let empty = counted_are(empty as u64, "empty tensor");
            let reason = format!("{empty} kept in the state, without a place in a launch");
            plan.note("naive", Verdict::Skipped, reason);
        }
        Ok(plan)
    }

    /// A storage and an update of its own for every tensor.
    fn naive_storages(&self, plan: &mut Plan) -> Result<()> {
        let mut kernels = HashMap::<StorageKey, (&'static str, Vec<TensorList>)>::new();
        let params = Arc::clone(&plan.params);
        let mut launches = LaunchCount::default();
        for (index, param) in params.iter().enumerate() {
            let rule = plan.rule_of[index];
            let (kernel, lists) = match kernels.entry(plan.storage_key(index)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    plan.check_int8(index)?;
                    let kernel = plan.kernel_of(index as u32)?;
                    let lists = Plan::kept_lists(self.tensors, kernel.as_ref());
                    new.insert((kernel.entry(), lists))
                }
            };
            let spec = StorageSpec::of(&params, kernel, rule, vec![index as u32], lists.clone())?;
            plan.storages.push(spec);
            let size_class = SizeClass::of(param.numel(), self.limits);
            let stage = batches::update_stage(plan, index, size_class, vec![0])?;
            launches.add(&stage.batches, kernel)?;
            plan.stages.push(Stage::Optimize(stage));
        }
        Ok(())
    }
}

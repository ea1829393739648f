//! From descriptors to a plan.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use fusestep_coalesce::{FlatLayout, LayoutOptions};
use fusestep_launch::{LaunchLimits, Precision, TensorList};
use fusestep_tensor::{DType, ParamDesc, check_unique_names};
use serde::Serialize;

use crate::group::Classes;
use crate::norm::Gradients;
use crate::passes::{ActsOn, CoalesceGradients, FuseOptimizer, Pass};
use crate::ranks::{RankOptions, Topology};
use crate::{
    Note, Optimizer, Plan, PlanError, Precisions, SizeClass, Stage, StorageSpec, TableKind, Verdict,
};

/// Who keeps parameters and gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
pub enum Tensors {
    /// The state does; a caller writes gradients into its views.
    #[default]
    Kept,
    /// The caller's framework does and lends them for each step; the state keeps only the optimizer's own tensors.
    Lent,
}

/// Makes plans.
///
/// ```
/// use fusestep_planner::{Optimizer, Planner};
/// use fusestep_fused_adam::Adam;
/// use fusestep_tensor::{DType, ParamDesc, Shape};
///
/// let params = [ParamDesc::new("w", Shape::new([128, 64])?, DType::F32), ParamDesc::new("b", Shape::new([128])?, DType::F32)];
/// let plan = Planner::new(Optimizer::Adam(Adam::default())).plan(&params)?;
/// assert_eq!((plan.launches(), plan.naive_launches()), (1, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Planner {
    optimizer: Optimizer,
    limits: LaunchLimits,
    precisions: Precisions,
    tensors: Tensors,
    table: TableKind,
    passes: Vec<Box<dyn Pass>>,
}

impl Planner {
    /// A planner with the default limits and passes: [`CoalesceGradients`], then [`FuseOptimizer`].
    pub fn new(optimizer: Optimizer) -> Self {
        Self {
            optimizer,
            limits: LaunchLimits::default(),
            precisions: Precisions::default(),
            tensors: Tensors::Kept,
            table: TableKind::default(),
            passes: vec![Box::new(CoalesceGradients), Box::new(FuseOptimizer)],
        }
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

    /// Keeps parameters of one dtype with a precision of their own: in a model of bf16 matrices and f32 norms only the former
    /// can have master weights.
    pub fn precision_of(mut self, dtype: DType, precision: Precision) -> Self {
        self.precisions.set(dtype, precision);
        self
    }

    /// Says who keeps parameters and gradients.
    pub fn tensors(mut self, tensors: Tensors) -> Self {
        self.tensors = tensors;
        self
    }

    /// Says where the tables of launches lie; it changes launches, never a bit.
    pub fn table(mut self, table: TableKind) -> Self {
        self.table = table;
        self
    }

    /// Plans without any pass: one storage and one launch per tensor. The oracle of every pass.
    pub fn naive(mut self) -> Self {
        self.passes.clear();
        self
    }

    /// Adds a pass after those already there.
    pub fn with(mut self, pass: impl Pass + 'static) -> Self {
        self.passes.push(Box::new(pass));
        self
    }

    /// Makes the plan.
    ///
    /// # Errors
    /// A hyper-parameter or descriptor out of range, a name given twice, a dtype without a kernel, a precision that a parameter
    /// cannot have, or limits too small for one tensor; each names what is wrong.
    /// # Cost
    /// Linear in the number of parameters.
    pub fn plan(&self, params: &[ParamDesc]) -> Result<Plan, PlanError> {
        let mut passes = self.passes.iter();
        if let Some(pass) = passes.find(|pass| pass.acts_on() == ActsOn::Ranks) {
            return Err(PlanError::WithoutRanks { pass: pass.name() });
        }
        self.plan_with(params, Topology::SOLO, |_| true)
    }

    /// The plan of one rank by those passes that `takes_part` accepts.
    pub(crate) fn plan_with(
        &self,
        params: &[ParamDesc],
        topology: Topology,
        takes_part: impl Fn(ActsOn) -> bool,
    ) -> Result<Plan, PlanError> {
        self.optimizer.validate()?;
        self.limits.validate()?;
        if u32::try_from(params.len()).is_err() {
            return Err(PlanError::TooManyParameters {
                found: params.len(),
            });
        }
        check_unique_names(params)?;
        for param in params {
            param.validate()?;
        }
        let mut plan = self.naive_plan(params)?;
        plan.ranks.topology = topology;
        for pass in &self.passes {
            if takes_part(pass.acts_on()) {
                pass.apply(&mut plan)?;
            }
        }
        if plan.update_norms {
            // Those made before the pass have chunks and records of other sizes.
            plan.make_batches_anew()?;
        }
        plan.place_norm()?;
        plan.place_tables(self.table)?;
        plan.hash = plan.compute_hash();
        Ok(plan)
    }

    /// One storage and one stage per tensor.
    fn naive_plan(&self, params: &[ParamDesc]) -> Result<Plan, PlanError> {
        let mut plan = Plan {
            params: Arc::from(params),
            optimizer: self.optimizer,
            precisions: self.precisions.clone(),
            limits: self.limits,
            tensors: self.tensors,
            table: TableKind::Arguments,
            storages: Vec::with_capacity(params.len()),
            stages: Vec::with_capacity(params.len()),
            notes: Vec::new(),
            gradients: Gradients::default(),
            update_norms: false,
            classes: Classes::new(params, |_| 0),
            naive_launches: 0,
            ranks: RankOptions::default(),
            origins: Vec::new(),
            hash: 0,
        };
        let mut kernels = HashMap::<DType, (&'static str, Vec<TensorList>)>::new();
        for (index, param) in params.iter().enumerate() {
            let (kernel, lists) = match kernels.entry(param.dtype) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let kernel = self.optimizer.kernel(param, &self.precisions)?;
                    let lists = Plan::kept_lists(self.tensors, kernel.as_ref());
                    new.insert((kernel.entry(), lists))
                }
            };
            plan.storages.push(StorageSpec {
                kernel,
                members: vec![index as u32],
                layout: FlatLayout::new(
                    [param.numel()],
                    LayoutOptions::new(Plan::narrowest(lists, param.dtype)),
                )?,
                lists: lists.clone(),
            });
            let size_class = SizeClass::of(param.numel(), self.limits);
            let stage = plan.optimize(index, size_class, vec![0])?;
            plan.stages.push(Stage::Optimize(stage));
        }
        plan.naive_launches = plan.launches();
        let empty = params.iter().filter(|param| param.numel() == 0).count();
        if empty > 0 {
            plan.notes.push(Note::new(
                "naive",
                Verdict::Skipped,
                format!(
                    "{empty} empty tensors are kept in the state and take no place in a launch"
                ),
            ));
        }
        Ok(plan)
    }
}

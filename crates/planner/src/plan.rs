//! The plan as a value.

use std::hash::Hasher;
use std::sync::Arc;

use fusestep_amp::MaxNorm;
use fusestep_launch::{
    Batchable, ControlRule, LaunchLimits, MultiTensorKernel, Precision, Rounding, TensorList,
    batches,
};
use fusestep_tensor::{DType, ParamDesc, Role};
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::group::Classes;
use crate::norm::Gradients;
use crate::ranks::RankOptions;
use crate::{
    HyperClass, Note, Optimize, Optimizer, PlanError, Precisions, SizeClass, Stage, StorageSpec,
    TableKind, Tensors,
};

/// A training step's tail, planned: where tensors lie and what is launched, in order.
///
/// Made by [`crate::Planner`]; `println!("{plan}")` documents the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub(crate) params: Arc<[ParamDesc]>,
    pub(crate) optimizer: Optimizer,
    pub(crate) precisions: Precisions,
    pub(crate) limits: LaunchLimits,
    pub(crate) tensors: Tensors,
    /// Never [`TableKind::Auto`].
    pub(crate) table: TableKind,
    pub(crate) storages: Vec<StorageSpec>,
    pub(crate) stages: Vec<Stage>,
    pub(crate) notes: Vec<Note>,
    /// What passes ask of all gradients together.
    pub(crate) gradients: Gradients,
    /// Whether updates leave sums over what they change.
    pub(crate) update_norms: bool,
    pub(crate) classes: Classes,
    pub(crate) naive_launches: usize,
    /// What passes say about ranks.
    pub(crate) ranks: RankOptions,
    /// For each parameter, if they are pieces of others, whose it is and its first element there; else empty.
    pub(crate) origins: Vec<(u32, u64)>,
    /// [`Plan::hash`], computed once the passes are through.
    pub(crate) hash: u64,
}

impl Plan {
    /// The parameters, in plan order.
    pub fn params(&self) -> &[ParamDesc] {
        &self.params
    }

    /// The update rule.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// How exactly parameters of this dtype and their state are kept.
    pub fn precision(&self, dtype: DType) -> Precision {
        self.precisions.of(dtype)
    }

    /// The limits that batches were made for.
    pub fn limits(&self) -> LaunchLimits {
        self.limits
    }

    /// Where tensors lie.
    pub fn storages(&self) -> &[StorageSpec] {
        &self.storages
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

    /// Launches of one step.
    pub fn launches(&self) -> usize {
        let launches = self.stages.iter().map(|stage| match stage {
            Stage::Norm(norm) => norm.launches(),
            Stage::Optimize(optimize) => self.launches_of(optimize),
        });
        launches.sum()
    }

    /// Launches that the naive plan of the same tensors needs.
    pub fn naive_launches(&self) -> usize {
        self.naive_launches
    }

    /// Elements of all parameters.
    pub fn elements(&self) -> u64 {
        self.params.iter().map(ParamDesc::numel).sum()
    }

    /// Bytes of optimizer state, padding included.
    pub fn state_bytes(&self) -> u64 {
        self.storages.iter().map(StorageSpec::state_bytes).sum()
    }

    /// Bytes of memory traffic of one step: what the kernels' lists read and write, and the gradients once more for their norm.
    pub fn traffic_bytes(&self) -> u64 {
        let bytes = self.params.iter().map(|param| {
            let per_element = self
                .optimizer
                .kernel(param, &self.precisions)
                .map_or(0, |k| k.traffic_bytes());
            per_element * param.numel()
        });
        let norm = self.norm_stage().map_or(0, |_| self.gradient_bytes());
        bytes.sum::<u64>() + norm
    }

    /// Identifies parameters, layout and stages: states and ranks with equal hashes fit together.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn compute_hash(&self) -> u64 {
        let mut hasher = Xxh3::new();
        for param in self.params.iter() {
            hasher.write_usize(param.name.len());
            hasher.write(param.name.as_bytes());
            hasher.write(param.dtype.name().as_bytes());
            if let Rounding::Stochastic { seed } = self.precision(param.dtype).rounding {
                hasher.write_u64(seed);
            }
            for &dim in param.shape.dims() {
                hasher.write_u64(dim);
            }
        }
        for storage in &self.storages {
            hasher.write(storage.kernel.as_bytes());
            for list in &storage.lists {
                hasher.write(list.role.name().as_bytes());
                hasher.write(list.dtype.name().as_bytes());
            }
            for (&member, &offset) in storage.members.iter().zip(storage.layout.offsets()) {
                hasher.write_u32(member);
                hasher.write_u64(offset);
            }
        }
        for stage in self.optimize_stages() {
            hasher.write_usize(stage.storage);
            for &tensor in &stage.tensors {
                hasher.write_u32(tensor);
            }
        }
        if self.update_norms {
            hasher.write(b"update norms");
        }
        // Ranks that clip or scale differently must not take each other for equal.
        if let Some(rule) = self.gradients.rule() {
            hasher.write(&rule.scalars());
            hasher.write_u64(rule.loss_scale.scale().to_bits());
        }
        hasher.finish()
    }

    /// The numbers that `fusestep plan --json` prints.
    pub fn summary(&self) -> PlanSummary {
        PlanSummary {
            optimizer: self.optimizer.name(),
            parameters: self.params.len(),
            elements: self.elements(),
            launches: self.launches(),
            naive_launches: self.naive_launches(),
            state_bytes: self.state_bytes(),
            traffic_bytes: self.traffic_bytes(),
            argument_bytes: self.limits.argument_bytes,
            table: self.table,
            max_norm: self.gradients.max_norm.map(MaxNorm::value),
            loss_scale: self.gradients.loss_scale.map(|scale| scale.scale()),
            hash: format!("{:016x}", self.hash),
            notes: self.notes.iter().map(Note::to_string).collect(),
        }
    }

    pub(crate) fn optimize_stages(&self) -> impl Iterator<Item = &Optimize> {
        self.stages.iter().filter_map(|stage| match stage {
            Stage::Norm(_) => None,
            Stage::Optimize(optimize) => Some(optimize),
        })
    }

    /// A stage over these tensors of a storage, with its batches.
    pub(crate) fn optimize(
        &self,
        storage: usize,
        size_class: SizeClass,
        tensors: Vec<u32>,
    ) -> Result<Optimize, PlanError> {
        let batches = self.batches(storage, &tensors, &self.classes)?;
        Ok(Optimize {
            storage,
            size_class,
            tensors,
            batches,
        })
    }

    /// The batches of these tensors of a storage.
    pub(crate) fn batches(
        &self,
        storage: usize,
        tensors: &[u32],
        classes: &Classes,
    ) -> Result<Vec<fusestep_launch::Batch>, PlanError> {
        let spec = &self.storages[storage];
        let Some(&member) = spec.members.first() else {
            return Ok(Vec::new());
        };
        let kernel = self.kernel_of(member)?;
        let batchable = tensors.iter().map(|&tensor| Batchable {
            tensor,
            numel: spec.layout.numel(tensor as usize),
            class: classes.of_param[spec.members[tensor as usize] as usize],
        });
        let mut layout = kernel.argument_layout();
        if self.update_norms {
            layout = layout.with_update_sums();
        }
        let limits = self.batch_limits(self.limits_of(kernel.as_ref()));
        Ok(batches(kernel.entry(), batchable, layout, limits)?)
    }

    /// The limits of launches of a kernel.
    pub(crate) fn limits_of(&self, kernel: &dyn MultiTensorKernel) -> LaunchLimits {
        match self.update_norms {
            true => self.limits.measured(),
            false => self.limits.of(kernel),
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
        let param = &self.params[param as usize];
        self.optimizer.kernel(param, &self.precisions)
    }

    /// Bytes of the narrowest element among lists, or of `dtype` if there is none: slots made for it are aligned in every list.
    pub(crate) fn narrowest(lists: &[TensorList], dtype: DType) -> usize {
        let widths = lists.iter().map(|list| list.dtype.len_bytes());
        widths.min().unwrap_or(dtype.len_bytes())
    }

    /// The lists that a kernel's tensors have in this plan: all, or only the state if the caller lends the rest.
    pub(crate) fn kept_lists(tensors: Tensors, kernel: &dyn MultiTensorKernel) -> Vec<TensorList> {
        let lent = |role| matches!(role, Role::Param | Role::Grad);
        let lists = kernel.lists().iter().copied();
        match tensors {
            Tensors::Kept => lists.collect(),
            Tensors::Lent => lists.filter(|list| !lent(list.role)).collect(),
        }
    }
}

/// The numbers of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanSummary {
    /// The update rule.
    pub optimizer: &'static str,
    /// Number of parameters.
    pub parameters: usize,
    /// Their elements.
    pub elements: u64,
    /// Launches of one step.
    pub launches: usize,
    /// Launches of the naive plan.
    pub naive_launches: usize,
    /// Bytes of optimizer state, padding included.
    pub state_bytes: u64,
    /// Bytes of memory traffic of one step.
    pub traffic_bytes: u64,
    /// The limit that batches were made for.
    pub argument_bytes: usize,
    /// Where the tables of launches lie.
    pub table: TableKind,
    /// The limit of the gradients' norm; `null` if they are not clipped.
    pub max_norm: Option<f64>,
    /// The loss scale of the first step; `null` if the loss is not scaled.
    pub loss_scale: Option<f64>,
    /// [`Plan::hash`] in hexadecimal.
    pub hash: String,
    /// What the passes did and why.
    pub notes: Vec<String>,
}

//! A plan described: its calls, what they cost, its launches and bytes counted, and pages and
//! pictures of it.

use fusestep_amp::MaxNorm;
use fusestep_launch::Batch;
use fusestep_tensor::{ParamDesc, Role};

use crate::plan::calls::PlannedCall;
use crate::plan::cost::{CostModel, Event};
use crate::plan::note::Note;
use crate::plan::page::html_page;
use crate::plan::passes::fuse_reduce_into_update;
use crate::plan::rank_summary::RankSummary;
use crate::plan::settings::{GradientAccumulation, ReducedWhen, TableKind};
use crate::plan::stage::Stage;
use crate::plan::storage::StorageSpec;
use crate::plan::summary::PlanSummary;
use crate::plan::value::Plan;
use crate::plan::{calls, cost, page, rank_summary};

impl Plan {
    /// The numbers that `fusestep plan --json` prints.
    pub fn summary(&self) -> PlanSummary {
        PlanSummary {
            optimizer: self.optimizer().name(),
            schedule: self.schedule().map(ToString::to_string),
            parameters: self.params.len(),
            elements: self.elements(),
            launches: self.launches(),
            host_launches: self.host_launches(),
            naive_launches: self.naive_launches(),
            state_bytes: self.state_bytes(),
            traffic_bytes: self.traffic_bytes(),
            argument_bytes: self.limits.argument_bytes,
            table: self.table,
            update_in_backward: self.in_backward,
            max_norm: self.gradients.max_norm.map(MaxNorm::value),
            loss_scale: self.gradients.loss_scale.map(|scale| scale.scale()),
            hash: format!("{:016x}", self.hash),
            notes: self.notes.iter().map(Note::to_string).collect(),
        }
    }

    /// The calls of a step, in order. At ZeRO stage 3 parameters are gathered for each layer, the
    /// name up to the last `.`, before the forward pass and again before the backward pass; a
    /// program that asks otherwise makes other calls.
    pub fn calls(&self) -> Vec<PlannedCall> {
        calls::planned(self)
    }

    /// The calls of a step on its clock, in the order they start.
    pub fn timeline(&self, model: &CostModel) -> Vec<Event> {
        cost::timeline(self, model)
    }

    /// The numbers of a step of ranks; `model` predicts its time.
    pub fn rank_summary(&self, model: impl Into<CostModel>) -> RankSummary {
        rank_summary::rank_summary(self, model)
    }

    /// Bytes that all ranks together read and write for each element of a model of one dtype, from
    /// gradients in the arena to parameters on every rank that keeps them: 36 for AdamW in f32
    /// at 2 ranks and ZeRO stage 1, reduced and updated in one pass. What is done to all
    /// gradients together comes on top.
    pub fn bytes_per_element(&self) -> u64 {
        fuse_reduce_into_update::bytes_of_element(self)
    }

    /// A self-contained HTML page: totals, storages and launches drawn to scale, and every note.
    pub fn to_html(&self) -> String {
        let title = format!("Plan: {}", self.optimizer());
        html_page(&title, &self.to_html_fragment())
    }

    /// The body of [`Plan::to_html`], to be put into another page.
    pub fn to_html_fragment(&self) -> String {
        page::fragment(self)
    }

    /// The launches as a picture of their own, dark or light as the reader has it: one bar for each
    /// launch, its length its share of the largest, each block a tensor to scale.
    pub fn to_svg(&self) -> String {
        page::svg(self)
    }

    /// A page: the timeline drawn to scale, what passes did, and this rank's own launches.
    pub fn ranks_to_html(&self, model: &CostModel) -> String {
        page::page_of_ranks(self, model)
    }

    /// Launches of one step of this rank on a device.
    pub fn launches(&self) -> usize {
        // Before each update from a resident table, one derives its step scalars.
        self.count_launches(if self.table == TableKind::Resident { 2 } else { 1 })
    }

    /// Launches of one step of this rank in the host's memory, which has no tables to prepare.
    pub fn host_launches(&self) -> usize {
        self.count_launches(1)
    }

    fn count_launches(&self, of_batch: usize) -> usize {
        let launches = self.stages.iter().map(|stage| match stage {
            Stage::Norm(norm) => norm.launches(),
            Stage::Optimize(update) | Stage::ReduceUpdate(update) => {
                of_batch * update.batches.len()
            }
            _ => 0,
        });
        launches.sum()
    }

    /// Launches that the naive plan of the same tensors needs on a device: with norms of gradients
    /// and of updates and resident tables where this plan has them, unless it would have more than
    /// [`MAX_LAUNCHES`](fusestep_launch::MAX_LAUNCHES) then.
    pub fn naive_launches(&self) -> usize {
        self.naive_launches
    }

    /// Elements of all parameters.
    pub fn elements(&self) -> u64 {
        self.params.iter().map(ParamDesc::numel).sum()
    }

    /// Bytes of optimizer state on this rank, padding included.
    pub fn state_bytes(&self) -> u64 {
        rank_summary::rank_bytes(self, self.topology.rank, 0).state_bytes
    }

    /// Bytes of everything that this rank keeps between steps, padding included: from ZeRO stage 2
    /// on one bucket of gradients beside its shard.
    pub fn memory_bytes(&self) -> u64 {
        rank_summary::rank_bytes(self, self.topology.rank, 0).memory_bytes
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
            // One pass reads every rank's gradient and writes all that every rank keeps whole.
            let others = if reduces { self.topology.world as u64 - 1 } else { 0 };
            let replicated = self.replicated(spec).into_iter();
            let elements: u64 = optimize.batches.iter().map(Batch::elements).sum();
            let own = self.kernel_of(member).map_or(0, |k| k.traffic_bytes(elements));
            let grads = (spec.grad_dtype().len_bytes() as u64).saturating_mul(elements);
            let replicas = replicated.map(|list| spec.lists[list].stride().bytes(elements));
            let of_other = replicas.fold(grads, u64::saturating_add);
            own.saturating_add(others.saturating_mul(of_other))
        });
        let norm = self.norm_stage().map_or(0, |_| self.gradient_bytes());
        bytes.fold(norm, u64::saturating_add)
    }

    pub(crate) fn gradient_bytes(&self) -> u64 {
        let storages = self.storages.iter().map(|spec| {
            let grads = spec.lists.iter().find(|list| list.role == Role::Grad);
            let members = spec.members.iter();
            let bytes = members.map(|&member| {
                let param = &self.params[member as usize];
                let dtype = grads.map_or(param.dtype, |list| list.dtype);
                dtype.len_bytes() as u64 * param.numel()
            });
            bytes.sum::<u64>()
        });
        storages.sum()
    }
}

impl GradientAccumulation {
    /// Bytes of a storage's sums on a rank whose shard of it has so many elements.
    pub(crate) fn sum_bytes(&self, spec: &StorageSpec, shard_numel: u64) -> u64 {
        let width = spec.grad_dtype().len_bytes() as u64;
        match self.reduced {
            _ if self.every.get() == 1 => 0,
            ReducedWhen::PerMicroStep => shard_numel * width.max(4),
            ReducedWhen::PerWindow if width < 4 && spec.distributed => shard_numel * 4,
            ReducedWhen::PerWindow if width < 4 => spec.layout.total_numel() * 4,
            ReducedWhen::PerWindow => 0,
        }
    }
}

//! A plan described: its calls, what they cost, its numbers, and pages and pictures of it.

use crate::passes::fuse_reduce_into_update;
use crate::{
    CostModel, Event, Plan, PlanSummary, PlannedCall, RankSummary, calls, cost, cost_page, html,
    html_page, rank_summary, summary,
};

impl Plan {
    /// The numbers that `fusestep plan --json` prints.
    pub fn summary(&self) -> PlanSummary {
        summary::of(self)
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
        html::fragment(self)
    }

    /// The launches as a picture of their own, dark or light as the reader has it: one bar for each
    /// launch, its length its share of the largest, each block a tensor to scale.
    pub fn to_svg(&self) -> String {
        html::svg(self)
    }

    /// A page: the timeline drawn to scale, what passes did, and this rank's own launches.
    pub fn ranks_to_html(&self, model: &CostModel) -> String {
        cost_page::page(self, model)
    }
}

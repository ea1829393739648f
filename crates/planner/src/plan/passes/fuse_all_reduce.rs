//! Pass `fuse_all_reduce`: many gradients in one call.

use fusestep_coalesce::FlatLayout;
use fusestep_tensor::{counted, counted_are};

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::buckets;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::segments::full_tensors;
use crate::plan::settings::{Caps, Oversize};
use crate::plan::stage::Stage;
use crate::plan::value::Plan;

/// Lays gradients in the order in which they become ready, the plan's from its end unless another
/// is given, and cuts that into buckets, each reduced by one call.
///
/// A bucket has at most the cap's bytes, padding included, and at most a number of gradients. Bits
/// do not depend on either: sums across ranks are formed element by element in rank order.
#[derive(Clone, Debug, PartialEq)]
pub struct FuseAllReduce {
    cap_bytes: u64,
    cap_count: usize,
    oversize: Oversize,
    ready: Vec<u32>,
}

impl Default for FuseAllReduce {
    fn default() -> Self {
        Self::of_bytes(Self::DEFAULT_CAP_BYTES)
    }
}

impl FuseAllReduce {
    /// 25 MiB, as PyTorch's DDP has it.
    pub const DEFAULT_CAP_BYTES: u64 = 25 << 20;

    /// Buckets of at most this many bytes.
    pub fn of_bytes(cap_bytes: u64) -> Self {
        Self { cap_bytes, cap_count: usize::MAX, oversize: Oversize::Split, ready: Vec::new() }
    }

    /// Buckets of at most this many gradients, too.
    pub fn cap_count(mut self, cap_count: usize) -> Self {
        self.cap_count = cap_count;
        self
    }

    /// Says how longer gradients are cut.
    pub fn oversize(mut self, oversize: Oversize) -> Self {
        self.oversize = oversize;
        self
    }

    /// The order in which gradients become ready, as positions in the plan; parameters that it
    /// leaves out come last.
    pub fn ready_order(mut self, order: Vec<u32>) -> Self {
        self.ready = order;
        self
    }

    /// All parameters in the order their gradients become ready.
    fn order(&self, params: usize) -> Vec<u32> {
        let mut order = Vec::with_capacity(params);
        let mut known = vec![false; params];
        let given = self.ready.iter().copied();
        for param in given.chain((0..params as u32).rev()) {
            if let Some(known) = known.get_mut(param as usize)
                && !std::mem::replace(known, true)
            {
                order.push(param);
            }
        }
        order
    }

    fn explain(&self, plan: &mut Plan) {
        let (mut tensors, mut calls, mut cut) = (0, 0, 0);
        for segment in &plan.segments {
            tensors += full_tensors(plan, segment);
            calls += segment.buckets.len();
            cut += segment.buckets.len() - 1;
        }
        let reason = format!(
            "{} reduced in {} ({cut} cut by the cap)",
            counted_are(tensors as u64, "gradient"),
            counted(calls as u64, "call"),
        );
        plan.note(Self::NAME, Verdict::Applied, reason);
    }
}

impl Rewrite for FuseAllReduce {
    const NAME: &'static str = "fuse_all_reduce";
    const ACTS_ON: ActsOn = ActsOn::Buckets;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.caps.is_some())?;
        plan.ready = self.order(plan.params.len());
        if plan.topology.world == 1 {
            let reason = "a world of 1 rank has nothing to reduce";
            plan.note(Self::NAME, Verdict::Skipped, reason);
            return Ok(());
        }
        lay_in_order(plan)?;
        plan.caps =
            Some(Caps { bytes: self.cap_bytes, count: self.cap_count, oversize: self.oversize });
        buckets::make(plan)?;
        self.explain(plan);
        Ok(())
    }
}

/// Puts the members of every storage into the order of readiness; stages follow.
fn lay_in_order(plan: &mut Plan) -> Result<()> {
    let mut turn = vec![0usize; plan.params.len()];
    for (at, &param) in plan.ready.iter().enumerate() {
        turn[param as usize] = at;
    }
    let mut moved = Vec::with_capacity(plan.storages.len());
    for spec in &mut plan.storages {
        let mut order: Vec<u32> = (0..spec.members.len() as u32).collect();
        order.sort_by_key(|&position| turn[spec.members[position as usize] as usize]);
        let numels = order.iter().map(|&position| spec.layout.numel(position as usize));
        spec.layout = FlatLayout::new(numels, spec.layout.options())?;
        let members = order.iter().map(|&position| spec.members[position as usize]);
        spec.members = members.collect();
        let mut new = vec![0; order.len()];
        for (at, &position) in order.iter().enumerate() {
            new[position as usize] = at as u32;
        }
        moved.push(new);
    }
    for stage in &mut plan.stages {
        let (Stage::Optimize(stage) | Stage::ReduceUpdate(stage)) = stage else {
            continue;
        };
        for tensor in &mut stage.tensors {
            *tensor = moved[stage.storage][*tensor as usize];
        }
        stage.tensors.sort_unstable();
    }
    plan.index_places();
    Ok(())
}

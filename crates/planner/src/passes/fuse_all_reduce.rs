//! Pass `fuse_all_reduce`: many gradients in one call.

use fusestep_tensor::ParamDesc;

use super::{ActsOn, Pass};
use crate::{Note, Plan, PlanError, Verdict, groups_by_layer};

/// What becomes of a gradient that is longer than a bucket's cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Oversize {
    /// It is cut into buckets of exactly the cap and a rest.
    #[default]
    Split,
    /// It is a bucket of its own, beyond the cap.
    Alone,
}

/// Puts gradients of one dtype into buckets, in the order they become ready: the plan's from its end, unless another is given.
///
/// A bucket has at most the cap's bytes, without padding, and at most a number of gradients. Bits do not depend on either: sums
/// across ranks are formed element by element in rank order.
#[derive(Clone, Debug, PartialEq)]
pub struct FuseAllReduce {
    pub(crate) cap_bytes: u64,
    pub(crate) cap_count: usize,
    pub(crate) oversize: Oversize,
    ready: Option<Vec<u32>>,
    pub(crate) layers: Option<(f64, usize)>,
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
        Self {
            cap_bytes,
            cap_count: usize::MAX,
            oversize: Oversize::Split,
            ready: None,
            layers: None,
        }
    }

    /// Groups of layers in place of the caps; see [`groups_by_layer`].
    pub fn by_layer(mib: f64, most: usize) -> Self {
        Self {
            layers: Some((mib, most)),
            ..Self::default()
        }
    }

    /// Buckets of at most this many gradients, too.
    pub fn cap_count(mut self, cap_count: usize) -> Self {
        self.cap_count = cap_count;
        self
    }

    /// What becomes of longer gradients.
    pub fn oversize(mut self, oversize: Oversize) -> Self {
        self.oversize = oversize;
        self
    }

    /// The order in which gradients become ready, as positions in the plan; parameters that it leaves out come last.
    pub fn ready_order(mut self, order: Vec<u32>) -> Self {
        self.ready = Some(order);
        self
    }

    /// The parameters in groups that share no bucket, each in the order their gradients become ready.
    pub(crate) fn groups(&self, params: &[ParamDesc]) -> Vec<Vec<u32>> {
        let count = params.len() as u32;
        if let Some((mib, most)) = self.layers {
            let order: Vec<u32> = (0..count).collect();
            let mut groups = groups_by_layer(params, &order, mib, most);
            groups.reverse();
            return groups;
        }
        let mut order = Vec::with_capacity(params.len());
        let mut known = vec![false; params.len()];
        let given = self.ready.iter().flatten().copied();
        for param in given.chain((0..count).rev()) {
            if let Some(known) = known.get_mut(param as usize)
                && !std::mem::replace(known, true)
            {
                order.push(param);
            }
        }
        vec![order]
    }
}

impl Pass for FuseAllReduce {
    fn name(&self) -> &'static str {
        "fuse_all_reduce"
    }

    fn acts_on(&self) -> ActsOn {
        ActsOn::Ranks
    }

    fn apply(&self, plan: &mut Plan) -> Result<(), PlanError> {
        if plan.ranks.fuse.is_some() {
            return Err(PlanError::PassTwice { pass: self.name() });
        }
        if plan.ranks.topology.world == 1 {
            let reason = "a world of 1 rank has nothing to reduce".to_owned();
            let note = Note::new(self.name(), Verdict::Skipped, reason);
            plan.notes.push(note);
        }
        plan.ranks.fuse = Some(self.clone());
        Ok(())
    }
}

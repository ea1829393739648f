//! Stage `ReduceUpdate`: a bucket is reduced and updated in one pass over the memory of all ranks.

use fusestep_collective::{CallContext, OfRanks, RankMemory, ReduceUpdate, Replica};
use fusestep_launch::{
    Backend, BackendError, Buffer, HostLaunches, LaunchReport, MAX_LISTS, Replicas, Replicated,
    SumsOfRanks,
};
use smallvec::SmallVec;

use crate::error::Result;
use crate::plan::lanes::Contribution;
use crate::plan::stage::Optimize;
use crate::plan::value::Plan;
use crate::run::comms::bytes::Elsewhere;
use crate::run::memory::segment_state::SegmentState;
use crate::run::memory::state::State;
use crate::run::run::Run;
use crate::run::stages::{lanes, launches};

/// Reduces a bucket and updates this rank's part of it, everywhere, in one pass.
pub(crate) fn reduce_and_update(
    run: &mut Run<'_, '_>,
    stage: &Optimize,
    update: usize,
) -> Result<LaunchReport> {
    let Some(index) = stage.bucket else {
        return Ok(LaunchReport::default());
    };
    let bucket = &run.plan.buckets[index];
    let segment = &run.plan.segments[bucket.segment];
    let spec = &run.plan.storages[bucket.storage];
    let SegmentState::Here(Some(mut memory)) = run.state.arena.take(bucket.segment) else {
        return Err(run.state.poison());
    };
    let replicated = run.plan.replicated(spec);
    let given = match Given::of(run, replicated.len()) {
        Some(given) => given,
        None => {
            if segment.buckets.start == index {
                lanes::bring_to_first_rank(run, bucket.segment, memory.as_mut())?;
            }
            Given::default()
        }
    };
    let mut sums = OwnSums::take(run.state, bucket.segment, given.slots);
    let mut buffers: SmallVec<[_; MAX_LISTS]> = SmallVec::new();
    for &index in &replicated {
        let buffer = &mut run.state.storages[bucket.storage].lists[index].buffer;
        buffers.push(std::mem::replace(buffer, Box::new(Elsewhere)));
    }
    let grad = spec.grad_dtype();
    let in_segment = bucket.place(segment.elements.start, grad.len_bytes());
    // The bucket's part of the lists that all ranks have whole.
    let replicas = replicated.iter().zip(&mut buffers).map(|(&index, buffer)| {
        let list = spec.lists[index];
        let all = buffer.host_mut().unwrap_or_default();
        let bytes = all.get_mut(bucket.place_in(list.stride()));
        let elements = 1 << list.role.shift();
        Replica { dtype: list.dtype, elements, bytes: bytes.unwrap_or_default() }
    });
    // Behind them further sums of the bucket, of which other ranks read their part.
    let further = sums.further.iter_mut().map(|sums| {
        let bytes = sums.host_mut().and_then(|all| all.get_mut(in_segment.clone()));
        Replica { dtype: grad, elements: 1, bytes: bytes.unwrap_or_default() }
    });
    let first = sums.first.as_deref().unwrap_or(memory.as_ref());
    let call = ReduceUpdate {
        grad_dtype: grad,
        grads: first.host().and_then(|all| all.get(in_segment.clone())).unwrap_or_default(),
        replicas: replicas.chain(further).collect(),
        counts: &bucket.counts(),
    };
    let context = CallContext { plan_hash: run.plan.hash(), bucket: Some(index as u32) };
    let of_update = OfUpdate { stage, update, replicated: &replicated, given: &given };
    let divisor = run.plan.lanes.map(|_| lanes::divisor(run).value());
    let mut outcome = Ok(LaunchReport::default());
    let (plan, state, backend) = (run.plan, &mut *run.state, run.backend);
    let done = run.comms.reduce_update(call, context, &mut |memory| {
        outcome = of_update.launch(plan, state, backend, memory, divisor);
    });
    run.state.arena.segments[bucket.segment] = SegmentState::Here(Some(memory));
    sums.put_back(run.state, bucket.segment);
    for (&index, buffer) in replicated.iter().zip(buffers) {
        run.state.storages[bucket.storage].lists[index].buffer = buffer;
    }
    done?;
    Ok(outcome?)
}

/// An update of a bucket, and what of its memory all ranks see.
struct OfUpdate<'a> {
    stage: &'a Optimize,
    update: usize,
    /// The lists that all ranks have whole.
    replicated: &'a [usize],
    given: &'a Given,
}

impl OfUpdate<'_> {
    /// Updates this rank's part in the memory of all ranks; `divisor` is that of lanes.
    fn launch(
        &self,
        plan: &Plan,
        state: &mut State,
        backend: &dyn Backend,
        memory: RankMemory<'_>,
        divisor: Option<f64>,
    ) -> Result<LaunchReport, BackendError> {
        let RankMemory { rank, grads, mut replicas } = memory;
        let further = replicas.drain(self.replicated.len()..);
        let further: SmallVec<[_; MAX_LISTS]> = further.map(read_only).collect();
        let of_sums = self.given.contributions.iter().map(|sum| match sum.slot {
            0 => grads[sum.rank],
            slot => further[slot - 1][sum.rank],
        });
        let of_sums: SmallVec<[&[u8]; 16]> = of_sums.collect();
        let lists = self.replicated.iter().zip(&mut replicas);
        let mut lists: SmallVec<[_; MAX_LISTS]> =
            lists.map(|(&list, ranks)| Replicated { list, ranks }).collect();
        let replicas = Replicas {
            sums: self.given.how(divisor),
            rank,
            first: self.stage.elements.start,
            grads: if of_sums.is_empty() { &grads } else { &of_sums },
            lists: &mut lists,
        };
        match launches::of_stage(plan, state, self.stage, self.update) {
            Some(launch) => host_of(backend)?.launch_reduced(launch, replicas),
            None => Ok(LaunchReport::default()),
        }
    }
}

/// A list of all ranks that nobody writes.
fn read_only(ranks: OfRanks<&mut [u8]>) -> OfRanks<&[u8]> {
    ranks.into_iter().map(|bytes| &*bytes).collect()
}

/// Sums of lanes that ranks bring to an update, where these are not one for each rank.
#[derive(Default)]
struct Given {
    contributions: Vec<Contribution>,
    merges: Vec<usize>,
    /// Memories of a rank that have some; 0 if each rank brings its gradients.
    slots: usize,
}

impl Given {
    /// The sums of the window under way; `None` if they are too many for one call that shows
    /// `lists` more.
    fn of(run: &Run<'_, '_>, lists: usize) -> Option<Self> {
        if !run.state.arena.window.as_ref().is_some_and(|window| window.exchanges) {
            return Some(Self::default());
        }
        let (contributions, merges) = lanes::order(run);
        let slots = contributions.iter().map(|sum| sum.slot + 1).max().unwrap_or(1);
        let fits = lists + slots - 1 <= ReduceUpdate::MAX_REPLICAS;
        fits.then_some(Self { contributions, merges, slots })
    }

    /// The way in which sums become a gradient; `divisor` is that of lanes.
    fn how(&self, divisor: Option<f64>) -> SumsOfRanks<'_> {
        match divisor {
            None => SumsOfRanks::Average,
            Some(divisor) if self.slots == 0 => SumsOfRanks::Tree(divisor),
            Some(divisor) => SumsOfRanks::Along { divisor, merges: &self.merges },
        }
    }
}

/// A segment's sums of lanes on this rank: the first where it lies apart from the gradients, and
/// all others.
#[derive(Default)]
struct OwnSums {
    /// Whether there are some.
    is_taken: bool,
    first: Option<Box<dyn Buffer>>,
    further: Vec<Box<dyn Buffer>>,
    /// Memories that the update has no use for.
    rest: Vec<Box<dyn Buffer>>,
}

impl OwnSums {
    fn take(state: &mut State, segment: usize, slots: usize) -> Self {
        if slots == 0 {
            return Self::default();
        }
        let mut further = std::mem::take(&mut state.arena.slots[segment]);
        let rest = further.split_off(further.len().min(slots - 1));
        Self { is_taken: true, first: state.arena.sums[segment].take(), further, rest }
    }

    fn put_back(self, state: &mut State, segment: usize) {
        let Self { is_taken, first, mut further, rest } = self;
        if is_taken {
            further.extend(rest);
            (state.arena.sums[segment], state.arena.slots[segment]) = (first, further);
        }
    }
}

/// The launches of a backend that reduce and update in one pass.
fn host_of(backend: &dyn Backend) -> Result<&dyn HostLaunches, BackendError> {
    backend.host().ok_or_else(|| BackendError::Unavailable {
        backend: backend.name(),
        reason: "expected gradients in host memory to reduce and update in one pass; reduce first \
                 and update then"
            .to_owned(),
    })
}

//! Sums of lanes that ranks exchange as they are, and the number that the sum of all is divided
//! by.

use std::ops::Range;

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Buffers, Call, CallContext, Divisor, OfRanks, Operation, RankMemory, Ranks, ReduceUpdate,
    Replica, TreeOrder, WaitingSums, even_counts, reduce_along_tree,
};
use fusestep_launch::Buffer;
use fusestep_simd::Level;
use fusestep_tensor::DType;
use smallvec::SmallVec;

use crate::error::Result;
use crate::plan::bucket::Bucket;
use crate::plan::lanes::Contribution;
use crate::plan::stage::Reduced;
use crate::run::comms::calls::Comms;
use crate::run::comms::sums::{Scope, sum_over};
use crate::run::memory::absorb::clear;
use crate::run::memory::device;
use crate::run::memory::lanes::mean;
use crate::run::run::Run;
use crate::run::stages::device_lanes::{DeviceExchange, DeviceMemory};

/// Tells all ranks the weights of all micro-batches; returns their sum, which is 0 if no rank has
/// given any.
pub(crate) fn share_weights(run: &mut Run<'_, '_>) -> Result<f64> {
    let arena = &mut run.state.arena;
    let Some(window) = &mut arena.window else {
        return Ok(0.0);
    };
    // The micro-step under way has not ended yet where updates run in backward.
    window.weigh(arena.micro_steps as usize, arena.weight.unwrap_or(1.0));
    if run.plan.topology.world > 1 {
        let mut weights = window.weights.clone();
        // Each has one rank that knows it; the others add zeros.
        sum_over(run.comms, &mut weights, Scope::World)?;
        window.weights = weights;
    }
    Ok(window.total())
}

/// Settles the number that sums are divided by in this update: `any_weighted` says whether any rank
/// has set a weight.
pub(crate) fn settle_divisor(run: &mut Run<'_, '_>, any_weighted: bool) -> Result<()> {
    let Some(window) = &run.state.arena.window else {
        return Ok(());
    };
    if window.divisor.is_some() {
        return Ok(());
    }
    let micro_batches = window.micro_batches;
    let total = if any_weighted { share_weights(run)? } else { micro_batches as f64 };
    let divisor = mean(run.plan, total);
    run.state.arena.window.as_mut().into_iter().for_each(|own| own.divisor = Some(divisor));
    Ok(())
}

/// The number that a sum over all ranks is divided by: what ranks have settled, or what a sum that
/// is reduced before needs without weights.
pub(crate) fn divisor(run: &Run<'_, '_>) -> Divisor {
    let window = run.state.arena.window.as_ref();
    let known =
        window.map(|own| own.divisor.unwrap_or_else(|| mean(run.plan, own.micro_batches as f64)));
    known.unwrap_or(Divisor::ONE)
}

/// Whether ranks exchange sums and add them here: these are not one for each rank, or calls are
/// made in memory of devices, where no call adds along a tree.
pub(crate) fn exchange(run: &Run<'_, '_>) -> bool {
    let window = run.state.arena.window.as_ref();
    let on_devices = || run.plan.lanes.is_some() && run.comms.device_of(run.backend).is_some();
    window.is_some_and(|window| window.exchanges) || window.is_some() && on_devices()
}

/// Reduces a segment whose gradients are sums of lanes: each rank adds all sums of its part, along
/// the tree. The results go to `memory`, the segment's own.
pub(crate) fn reduce_segment(
    run: &mut Run<'_, '_>,
    index: usize,
    result: Reduced,
    memory: &mut dyn Buffer,
) -> Result<()> {
    if run.comms.device_of(run.backend).is_some() {
        return reduce_on_device(run, index, result, memory);
    }
    if run.backend.device().is_some() {
        return reduce_by_host(run, index, result, memory);
    }
    reduce_on_host(run, index, result, memory)
}

/// The sums of all ranks, and how many are added to each before the next one comes.
pub(crate) fn order(run: &Run<'_, '_>) -> (Vec<Contribution>, Vec<usize>) {
    let window = run.state.arena.window.as_ref();
    let contributions = window.map_or(Vec::new(), |window| window.contributions.clone());
    let merges = match run.plan.lanes {
        Some(lanes) => lanes.merges(contributions.iter().map(|own| own.sum)),
        None => Vec::new(),
    };
    (contributions, merges)
}

fn context(run: &Run<'_, '_>, bucket: usize) -> CallContext {
    CallContext { plan_hash: run.plan.hash(), bucket: Some(bucket as u32) }
}

fn reduce_on_device(
    run: &mut Run<'_, '_>,
    index: usize,
    result: Reduced,
    memory: &mut dyn Buffer,
) -> Result<()> {
    let segment = &run.plan.segments[index];
    let (contributions, merges) = order(run);
    let exchange = DeviceExchange {
        backend: run.backend,
        contributions: &contributions,
        merges: &merges,
        divisor: divisor(run),
        result,
        dtype: run.plan.storages[segment.storage].grad_dtype(),
    };
    let first = run.state.arena.sums[index].take().into_iter();
    let rest = std::mem::take(&mut run.state.arena.slots[index]);
    let mut slots: Vec<Box<dyn Buffer>> = first.chain(rest).collect();
    let mut memory =
        DeviceMemory { start: segment.elements.start, grads: memory, slots: &mut slots };
    let mut done = Ok(());
    for at in segment.buckets.clone() {
        let context = context(run, at);
        run.comms.communicator().set_context(context);
        done = done.and_then(|()| exchange.reduce(run.comms, &run.plan.buckets[at], &mut memory));
    }
    run.comms.set_plan(run.plan.hash());
    for slot in &mut slots {
        done = done.and_then(|()| Ok(device::take_back(run.backend, slot.as_mut())?));
    }
    let mut slots = slots.into_iter();
    run.state.arena.sums[index] = slots.next();
    run.state.arena.slots[index] = slots.collect();
    done
}

/// Reduces a segment of a device whose ranks call each other on the host.
fn reduce_by_host(
    run: &mut Run<'_, '_>,
    index: usize,
    result: Reduced,
    memory: &mut dyn Buffer,
) -> Result<()> {
    let staged = |buffer: &dyn Buffer| -> Result<Box<dyn Buffer>> {
        Ok(Box::new(device::staged(run.backend, buffer)?))
    };
    let arena = &mut run.state.arena;
    let sums = arena.sums[index].as_deref().map(&staged).transpose()?;
    let slots = arena.slots[index].iter().map(|slot| staged(slot.as_ref()));
    let slots = slots.collect::<Result<Vec<_>>>()?;
    let mut grads = staged(memory)?;
    let own_sums = std::mem::replace(&mut arena.sums[index], sums);
    let own_slots = std::mem::replace(&mut arena.slots[index], slots);
    let done = reduce_on_host(run, index, result, grads.as_mut());
    run.state.arena.sums[index] = own_sums;
    run.state.arena.slots[index] = own_slots;
    done?;
    Ok(run.backend.write(memory, 0, grads.host().unwrap_or_default())?)
}

fn reduce_on_host(
    run: &mut Run<'_, '_>,
    index: usize,
    result: Reduced,
    memory: &mut dyn Buffer,
) -> Result<()> {
    let segment = &run.plan.segments[index];
    let dtype = run.plan.storages[segment.storage].grad_dtype();
    let region = index;
    let mut sums = run.state.arena.sums[region].take();
    let mut slots = std::mem::take(&mut run.state.arena.slots[region]);
    let (contributions, merges) = order(run);
    let divisor = divisor(run);
    let mut done = Ok(());
    for at in segment.buckets.clone() {
        let bucket = &run.plan.buckets[at];
        let mut exchange = Exchange {
            dtype,
            contributions: &contributions,
            merges: &merges,
            divisor,
            result,
            is_staged: run.backend.device().is_some(),
            counts: match result {
                Reduced::Part => bucket.counts(),
                Reduced::Whole => even_counts(bucket.numel() as usize, run.plan.topology.world),
            },
        };
        let memory =
            Memory::of(bucket, segment.elements.start, dtype, memory, &mut sums, &mut slots);
        let context = context(run, at);
        done = exchange.reduce(run.comms, memory, context);
        if done.is_err() {
            break;
        }
    }
    run.comms.set_plan(run.plan.hash());
    run.state.arena.sums[region] = sums;
    run.state.arena.slots[region] = slots;
    done
}

/// Makes one contribution of a segment's sums of lanes, that of rank 0, and clears those of others:
/// a window that began on other ranks goes on where each rank gives one sum.
pub(crate) fn bring_to_first_rank(
    run: &mut Run<'_, '_>,
    index: usize,
    memory: &mut dyn Buffer,
) -> Result<()> {
    let settled = run.state.arena.window.as_ref().and_then(|window| window.divisor);
    let set = |run: &mut Run<'_, '_>, divisor| {
        run.state.arena.window.as_mut().into_iter().for_each(|own| own.divisor = divisor);
    };
    set(run, Some(Divisor::ONE));
    let done = reduce_segment(run, index, Reduced::Whole, memory);
    set(run, settled);
    done?;
    if run.plan.topology.rank > 0 {
        let dtype = run.plan.storages[run.plan.segments[index].storage].grad_dtype();
        clear(dtype, memory.host_mut().unwrap_or_default());
    }
    Ok(())
}

/// A bucket's part of the memory of sums, and of the gradients that they become.
struct Memory<'a> {
    /// The gradients, where they do not lie in the first sum's place.
    out: Option<&'a mut [u8]>,
    slots: SmallVec<[&'a mut [u8]; 8]>,
}

impl<'a> Memory<'a> {
    fn of(
        bucket: &Bucket,
        start: u64,
        dtype: DType,
        memory: &'a mut dyn Buffer,
        sums: &'a mut Option<Box<dyn Buffer>>,
        slots: &'a mut [Box<dyn Buffer>],
    ) -> Self {
        let place = bucket.place(start, dtype.len_bytes());
        let part = |buffer: &'a mut dyn Buffer| {
            let bytes = buffer.host_mut().unwrap_or_default();
            bytes.get_mut(place.clone()).unwrap_or_default()
        };
        let own = part(memory);
        let mut all = Self { out: None, slots: SmallVec::new() };
        match sums {
            Some(sums) => {
                all.out = Some(own);
                all.slots.push(part(sums.as_mut()));
            }
            None => all.slots.push(own),
        }
        all.slots.extend(slots.iter_mut().map(|slot| part(slot.as_mut())));
        all
    }
}

/// Exchange of the sums of one bucket, and their addition.
struct Exchange<'a> {
    /// Element type of gradients, which is that of their sums: plans with lanes widen them.
    dtype: DType,
    contributions: &'a [Contribution],
    merges: &'a [usize],
    divisor: Divisor,
    result: Reduced,
    /// Whether the memory is a copy of a device's, which other ranks do not see.
    is_staged: bool,
    /// Elements of each rank's part.
    counts: Vec<usize>,
}

impl Exchange<'_> {
    fn reduce(
        &mut self,
        comms: &mut Comms<'_>,
        memory: Memory<'_>,
        context: CallContext,
    ) -> Result<()> {
        let slots = self.contributions.iter().map(|own| own.slot + 1).max().unwrap_or(1);
        let together = !self.is_staged
            && comms.communicator().shares_memory()
            && slots <= ReduceUpdate::MAX_REPLICAS;
        if together {
            self.where_they_lie(comms, memory, slots, context)
        } else {
            comms.communicator().set_context(context);
            self.by_messages(comms, memory)
        }
    }

    /// Adds the sums of all ranks where they lie.
    fn where_they_lie(
        &self,
        comms: &mut Comms<'_>,
        memory: Memory<'_>,
        slots: usize,
        context: CallContext,
    ) -> Result<()> {
        let Memory { out, slots: mut all } = memory;
        let (own, dtype) = (comms.rank(), self.dtype);
        let shown = all.iter_mut().take(slots);
        let replicas = shown.map(|bytes| Replica { dtype, elements: 1, bytes }).collect();
        let call = ReduceUpdate { grad_dtype: dtype, grads: &[], replicas, counts: &self.counts };
        let mut work = |memory: RankMemory<'_>| {
            let receivers = match self.result {
                Reduced::Whole => 0..self.counts.len(),
                Reduced::Part => own..own + 1,
            };
            self.add(own, &mut WhereTheyLie { of: self, sums: memory.replicas, receivers, own });
        };
        comms.reduce_update(call, context, &mut work)?;
        // What was written through a view lies apart from the sums.
        if let Some(out) = out {
            out.copy_from_slice(all[0]);
        }
        Ok(())
    }

    /// Sends each rank the sums of its part.
    fn by_messages(&self, comms: &mut Comms<'_>, memory: Memory<'_>) -> Result<()> {
        let own = comms.rank();
        let first: usize = (0..own).map(|rank| self.part_bytes(rank)).sum();
        let len_bytes = self.part_bytes(own);
        let mut parts = Vec::with_capacity(self.contributions.len());
        for Contribution { rank, slot, .. } in self.contributions {
            let mut part = HostMemory::zeroed(len_bytes)?;
            let send: &[u8] = if *rank == own { &*memory.slots[*slot] } else { &[] };
            comms.scatter(*rank, self.dtype, &self.counts, send, part.bytes_mut())?;
            parts.push(part);
        }
        let Memory { out, mut slots } = memory;
        let out = match out {
            Some(out) => out,
            None => &mut *slots[0],
        };
        let result = &mut out[first..first + len_bytes];
        self.add(own, &mut Received { parts: &parts, result });
        if self.result == Reduced::Whole {
            comms.count_in_world(Operation::AllGather, out.len());
            comms.communicator().execute(Call {
                operation: Operation::AllGather,
                dtype: self.dtype,
                counts: Some(&self.counts),
                buffers: Buffers::InPlace(out),
            })?;
        }
        Ok(())
    }

    /// Adds the sums of a rank's part along the tree, and divides.
    fn add(&self, rank: usize, sums: &mut dyn Ranks) {
        let order = TreeOrder { divisor: self.divisor, merges: self.merges };
        let mut waiting = WaitingSums::default();
        let len_bytes = self.part_bytes(rank);
        reduce_along_tree(Level::detect(), self.dtype, order, &mut waiting, len_bytes, sums);
    }

    fn part_bytes(&self, rank: usize) -> usize {
        self.counts[rank] * self.dtype.len_bytes()
    }
}

/// This rank's part in the memory of all ranks.
struct WhereTheyLie<'a, 'm> {
    of: &'a Exchange<'a>,
    /// The sums of all ranks by their slot; the first gets the result.
    sums: SmallVec<[OfRanks<&'m mut [u8]>; 4]>,
    /// Ranks that get the result.
    receivers: Range<usize>,
    own: usize,
}

impl Ranks for WhereTheyLie<'_, '_> {
    fn world_size(&self) -> usize {
        self.of.contributions.len()
    }

    fn share_bytes(&self) -> usize {
        self.of.part_bytes(self.own)
    }

    fn input(&self, sum: usize, bytes: Range<usize>) -> &[u8] {
        let from = &self.of.contributions[sum];
        &self.sums[from.slot][from.rank][bytes]
    }

    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        for rank in self.receivers.clone() {
            self.sums[0][rank][bytes.clone()].copy_from_slice(result);
        }
    }
}

/// This rank's part as it was sent.
struct Received<'a> {
    parts: &'a [HostMemory],
    result: &'a mut [u8],
}

impl Ranks for Received<'_> {
    fn world_size(&self) -> usize {
        self.parts.len()
    }

    fn share_bytes(&self) -> usize {
        self.result.len()
    }

    fn input(&self, sum: usize, bytes: Range<usize>) -> &[u8] {
        &self.parts[sum].bytes()[bytes]
    }

    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        self.result[bytes].copy_from_slice(result);
    }
}

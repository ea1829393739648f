//! Stage `Reduce`: buckets of gradients are reduced over all ranks.

use std::time::Instant;

use fusestep_collective::ReduceOp;
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::calls::WORD_BYTES;
use crate::plan::segments::keeps_segments;
use crate::plan::stage::{Reduced, Stage};
use crate::plan::storage::Extent;
use crate::plan::value::Plan;
use crate::run::comms::bytes::Bytes;
use crate::run::comms::calls::Comms;
use crate::run::comms::handshake;
use crate::run::comms::segment_calls::SegmentCalls;
use crate::run::memory;
use crate::run::memory::device;
use crate::run::memory::segment_state::SegmentState;
use crate::run::memory::state::State;
use crate::run::run::Run;
use crate::run::stages::{lanes, wire};

pub(crate) fn take_reduced(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<usize> {
    let groups = plan.shard_group < plan.topology.world;
    let started = state.arena.ready.started();
    while state.arena.through < started && !keeps_segments(plan) && !groups {
        let index = state.arena.through;
        if !is_through(state, index)? {
            break;
        }
        match state.arena.take(index) {
            SegmentState::Here(Some(memory)) => to_shard(plan, state, backend, index, memory)?,
            // Reduced into the shard.
            SegmentState::Through => state.arena.segments[index] = SegmentState::Through,
            other => {
                state.arena.segments[index] = other;
                break;
            }
        }
        state.arena.through = index + 1;
    }
    Ok(started.saturating_sub(state.arena.through))
}

/// Whether segments are reduced on communication streams as soon as they are full.
pub(crate) fn starts_on_streams(run: &Run<'_, '_>) -> bool {
    let arena = &run.state.arena;
    let asked = run.comms.has_streams() && arena.starts_early;
    let waits = memory::lanes::wait_for_step(run.plan) || waits_for_weights(run.state);
    asked && !waits && !lanes::exchange(run) && run.plan.wire.is_none()
}

/// Whether the number that sums are divided by is known in the step only.
pub(crate) fn waits_for_weights(state: &State) -> bool {
    let window = state.arena.window.as_ref();
    window.is_some_and(|window| window.is_weighted || window.exchanges)
}

/// Whether no stream has a segment any more; takes the memory of a finished one from its stream.
pub(crate) fn is_through(state: &mut State, index: usize) -> Result<bool> {
    let (held, is_through) = match state.arena.take(index) {
        SegmentState::InFlight(pending) => match pending.try_wait() {
            Ok(memory) => (SegmentState::Here(Some(state.or_poison(memory)?)), true),
            Err(pending) => (SegmentState::InFlight(pending), false),
        },
        other => (other, true),
    };
    state.arena.segments[index] = held;
    Ok(is_through)
}

/// Starts reducing a segment: on its stream, or at once, into the shard if the host has both.
pub(crate) fn start_segment(run: &mut Run<'_, '_>, index: usize) -> Result<()> {
    let result = result_of_reduce(run.plan);
    let SegmentState::Here(Some(mut memory)) = run.state.arena.take(index) else {
        return Err(run.state.poison());
    };
    let in_place = if lanes::exchange(run) {
        Some(lanes::reduce_segment(run, index, result, memory.as_mut()))
    } else {
        let wire = wire::of_segment(run, index);
        wire.map(|wire| wire::reduce_segment(run, index, wire, result, memory.as_mut()))
    };
    if let Some(done) = in_place {
        run.state.or_poison(done)?;
        run.state.arena.segments[index] = SegmentState::Here(Some(memory));
        run.state.arena.ready.start();
        return Ok(());
    }
    let how = how_to_reduce(run);
    let calls = SegmentCalls::of(run.plan, index, result, how);
    let memory = to_calls(run.backend, run.comms, memory)?;
    let at_once = calls.fit_shard && !run.comms.has_streams();
    let shard = at_once.then(|| shard_of(run.plan, run.state, index));
    run.state.arena.segments[index] = match (memory.host(), shard.flatten()) {
        (Some(bytes), Some(shard)) => {
            let done = run.comms.reduce_into(&calls, bytes, shard);
            run.state.or_poison(done)?;
            run.state.arena.spare.push(memory);
            SegmentState::Through
        }
        _ => {
            let started = run.comms.reduce(index, calls, memory);
            run.state.or_poison(started)?
        }
    };
    run.state.arena.ready.start();
    Ok(())
}

/// The host's memory for this rank's shard of a segment's reduced gradients, if they leave the
/// segment and no sum over shard groups comes between.
fn shard_of<'a>(plan: &Plan, state: &'a mut State, segment: usize) -> Option<&'a mut [u8]> {
    if keeps_segments(plan) || plan.shard_group < plan.topology.world {
        return None;
    }
    let storage = plan.segments[segment].storage;
    let list = plan.storages[storage].list(Role::Grad)?;
    state.storages[storage].lists[list].buffer.host_mut()
}

/// A segment's memory where calls can take it: that of a device goes through the host unless
/// they are made there.
fn to_calls(
    backend: &dyn Backend,
    comms: &Comms<'_>,
    mut memory: Box<dyn Buffer>,
) -> Result<Box<dyn Buffer>> {
    if comms.takes(backend, memory.as_ref()) {
        device::hand_over(backend, memory.as_mut())?;
        return Ok(memory);
    }
    Ok(Box::new(device::staged(backend, memory.as_ref())?))
}

/// The memory of a list as launches can take it.
fn to_launches(backend: &dyn Backend, mut memory: Box<dyn Buffer>) -> Result<Box<dyn Buffer>> {
    if backend.host().is_some() {
        return Ok(memory);
    }
    let Some(bytes) = memory.host() else {
        device::take_back(backend, memory.as_mut())?;
        return Ok(memory);
    };
    let mut own = backend.allocate(memory.len_bytes())?;
    backend.write(own.as_mut(), 0, bytes)?;
    Ok(own)
}

/// The way in which the gradients of ranks become one.
fn how_to_reduce(run: &Run<'_, '_>) -> ReduceOp {
    match run.plan.lanes {
        Some(_) => ReduceOp::Tree(lanes::divisor(run)),
        None => ReduceOp::Average,
    }
}

/// The part that each rank gets. Sums that no number of ranks changes are formed over all of them,
/// whatever groups share out shards.
fn result_of_reduce(plan: &Plan) -> Reduced {
    if plan.lanes.is_some() && plan.shard_group < plan.topology.world {
        return Reduced::Whole;
    }
    let result = plan.stages.iter().find_map(|stage| match stage {
        Stage::Reduce(reduce) => Some(reduce.result),
        _ => None,
    });
    result.unwrap_or(Reduced::Whole)
}

/// Reduces one segment, or waits until it is reduced, and puts it where updates read it.
pub(crate) fn reduce_segment(run: &mut Run<'_, '_>, index: usize) -> Result<()> {
    let start = Instant::now();
    while let Some(next) = run.state.arena.ready.rest().filter(|&next| next <= index) {
        start_segment(run, next)?;
    }
    let mut memory = match run.state.arena.take(index) {
        SegmentState::Here(Some(memory)) => memory,
        SegmentState::InFlight(pending) => pending.wait()?,
        SegmentState::Through => {
            run.state.arena.segments[index] = SegmentState::Through;
            return Ok(());
        }
        SegmentState::Here(None) | SegmentState::Lost => return Err(run.state.poison()),
    };
    reduce_across(run, index, memory.as_mut())?;
    run.state.arena.exposed_ns += start.elapsed().as_nanos() as u64;
    if !keeps_segments(run.plan) {
        return to_shard(run.plan, run.state, run.backend, index, memory);
    }
    let memory = to_launches(run.backend, memory)?;
    run.state.arena.segments[index] = SegmentState::Here(Some(memory));
    Ok(())
}

pub(crate) fn reduce_all(run: &mut Run<'_, '_>) -> Result<()> {
    for index in 0..run.plan.segments.len() {
        reduce_segment(run, index)?;
    }
    Ok(())
}

/// Takes the mean of the shard groups' results, in the order of groups.
fn reduce_across(run: &mut Run<'_, '_>, index: usize, memory: &mut dyn Buffer) -> Result<()> {
    if run.plan.shard_group == run.plan.topology.world || run.plan.lanes.is_some() {
        return Ok(());
    }
    if memory.host().is_none() {
        // Calls across groups are on another stream than those within, which they follow.
        device::take_back(run.backend, memory)?;
        device::hand_over(run.backend, memory)?;
    }
    let segment = &run.plan.segments[index];
    let dtype = run.plan.storages[segment.storage].grad_dtype();
    let rank = run.plan.shard_place().rank;
    for bucket in &run.plan.buckets[segment.buckets.clone()] {
        let own = match result_of_reduce(run.plan) {
            Reduced::Part => bucket.part(rank),
            Reduced::Whole => bucket.elements.clone(),
        };
        let place = |element: u64| (element - segment.elements.start) as usize;
        let range = place(own.start) * dtype.len_bytes()..place(own.end) * dtype.len_bytes();
        if let Some(bytes) = Bytes::of(memory, range) {
            run.comms.across_groups(dtype, bytes)?;
        }
    }
    Ok(())
}

/// Copies this rank's part of a reduced segment to its shard, and keeps the segment's memory for
/// later segments.
fn to_shard(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    index: usize,
    memory: Box<dyn Buffer>,
) -> Result<()> {
    let memory = to_launches(backend, memory)?;
    let segment = &plan.segments[index];
    let spec = &plan.storages[segment.storage];
    if let Some(list) = spec.list(Role::Grad) {
        let width = spec.grad_dtype().len_bytes();
        let buffer = state.storages[segment.storage].lists[list].buffer.as_mut();
        for part in spec.own_parts(segment.elements.clone()) {
            let from = (part.elements.start - segment.elements.start) as usize * width;
            let (at, len_bytes) = (part.at as usize * width, part.numel() * width);
            backend.copy(memory.as_ref(), from, buffer, at, len_bytes)?;
            state.arena.copied_bytes += len_bytes as u64;
        }
    }
    state.arena.spare.push(memory);
    state.arena.segments[index] = SegmentState::Through;
    Ok(())
}

/// Returns for each parameter whether any rank has given a gradient. Fails on all ranks if their
/// rules, parameters or weights of micro-steps differ.
pub(crate) fn agree_on_given(run: &mut Run<'_, '_>) -> Result<Vec<u8>> {
    let plan = run.plan;
    let given = run.state.arena.given.iter();
    let mut given: Vec<u8> = given.map(|&given| u8::from(given > 0)).collect();
    if !plan.reduces() {
        return Ok(given);
    }
    let values = [handshake::take_compared(run.state), run.state.arena.weights_hash];
    let [alike, weights] = largest_of_step(run, &mut given, values)?;
    handshake::check_alike(run, alike)?;
    if plan.reduces_each() && !weights {
        return Err(PlanError::Topology {
            expected: "the same weights of micro-steps on all ranks, since gradients are \
                       reduced in each"
                .to_owned(),
            found: "others; weigh gradients themselves, or reduce once per update".to_owned(),
        });
    }
    Ok(given)
}

/// [`handshake::largest`]; settles the divisor of lanes, too, which any rank's weights decide.
pub(crate) fn largest_of_step<const N: usize>(
    run: &mut Run<'_, '_>,
    given: &mut Vec<u8>,
    values: [u64; N],
) -> Result<[bool; N]> {
    let Some(window) = &run.state.arena.window else {
        return handshake::largest(run.comms, given, values);
    };
    let micro_batches = window.micro_batches;
    given.push(u8::from(window.is_weighted || window.is_cut_short));
    given.extend(micro_batches.to_le_bytes());
    given.extend((!micro_batches).to_le_bytes());
    let alike = handshake::largest(run.comms, given, values)?;
    let told = given.split_off(given.len() - WORD_BYTES as usize);
    if told[..8].iter().zip(&told[8..]).any(|(byte, complement)| byte ^ complement != 0xff) {
        return Err(PlanError::Topology {
            expected: format!("{micro_batches} micro-batches of the update on all ranks"),
            found: "another number; give all ranks the same one".to_owned(),
        });
    }
    let any_weighted = given.pop().is_some_and(|flag| flag > 0);
    lanes::settle_divisor(run, any_weighted)?;
    Ok(alike)
}

/// Does `work` with a bucket's gradients in their list, where the launch looks for them.
pub(crate) fn with_gradients<R>(
    plan: &Plan,
    state: &mut State,
    bucket: Option<usize>,
    work: impl FnOnce(&mut State) -> Result<R>,
) -> Result<R> {
    let Some(bucket) = bucket.map(|bucket| &plan.buckets[bucket]) else {
        return work(state);
    };
    let spec = &plan.storages[bucket.storage];
    let list = spec.list(Role::Grad);
    let Some(list) = list.filter(|&list| spec.extents[list] == Extent::Segments) else {
        return work(state);
    };
    let (storage, segment) = (bucket.storage, bucket.segment);
    match &mut state.arena.segments[segment] {
        SegmentState::Here(Some(memory)) => {
            std::mem::swap(memory, &mut state.storages[storage].lists[list].buffer);
        }
        _ => return Err(state.poison()),
    }
    let done = work(state);
    if let SegmentState::Here(Some(memory)) = &mut state.arena.segments[segment] {
        std::mem::swap(memory, &mut state.storages[storage].lists[list].buffer);
    }
    done
}
